"""Tests of interrupts of the training process, at any time and at chosen places of the code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

import pytest
import torch
from cluster_programs import PROGRAMS, ask_actor, environment, run_program, wait_until, workplace
from torch.utils.data.distributed import DistributedSampler

from dpex import BatchLostError, DpexDataLoader

PROGRAM = PROGRAMS / "interrupt_program.py"
EARLY_PROGRAM = PROGRAMS / "interrupt_early_program.py"
EXIT_PROGRAM = PROGRAMS / "interrupt_exit_program.py"
# Step between the times at which an epoch of some milliseconds is interrupted.
STEP_SECONDS = 0.0006


@pytest.mark.extended
@pytest.mark.multiprocess
def test_the_loader_is_usable_after_an_interrupt_and_after_ray_s_end() -> None:
    with workplace() as place:
        waiting = place / "waiting"
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(waiting)],
            cwd=place,
            env=environment(place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(waiting.exists, 90, "sample that waits")
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=80)
        assert process.returncode == 0, out + errors
        assert [line for line in out.splitlines() if not line.startswith("batch")] == [
            "interrupted",
            *["complete"] * 3,
        ], out + errors


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_ray_is_started_whole_or_not_at_all() -> None:
    with workplace() as place:
        done = run_program(EARLY_PROGRAM, place=place, seconds=150)
    assert done.stdout.splitlines() == ["interrupted", "complete"], done.stdout + done.stderr


def interrupt_when(reached: list[str], *, mode: str) -> tuple[int, str]:
    """Run a program that waits at each place, interrupt it there, and return how it ended."""
    with workplace() as place:
        paths = [place / name for name in reached]
        process = subprocess.Popen(
            [sys.executable, str(EXIT_PROGRAM), mode, *map(str, paths)],
            cwd=place,
            env=environment(place),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for path in paths:
            wait_until(path.exists, 90, path.name)
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=80)
        return process.returncode, errors


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["torch", "processes", "local", "importing"])
def test_ctrl_c_kills_the_process_so_that_a_shell_ends_its_loop(mode: str) -> None:
    status, errors = interrupt_when(["sample"], mode=mode)
    assert status == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors


@pytest.mark.multiprocess
def test_another_ctrl_c_at_exit_kills_the_process_at_once() -> None:
    status, errors = interrupt_when(["sample", "exit"], mode="local")
    assert status == -signal.SIGINT, errors
    assert "Exception ignored" not in errors
    assert errors.count("Traceback") == 1, errors


def loader_of(dataset: Any, **options: Any) -> Any:
    return DpexDataLoader(
        dataset, num_workers=2, distribute_mode=True, head_address="local", **options
    )


def interrupted(*_: Any, **__: Any) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.extended
@pytest.mark.usefixtures("shared_ray")
def test_an_interrupt_at_any_moment_leaves_no_pipeline_behind() -> None:
    loader = loader_of(range(40), batch_size=10)
    expected = [batch.tolist() for batch in loader]
    assert expected == [[*range(first, first + 10)] for first in range(0, 40, 10)]

    before = signal.signal(signal.SIGALRM, interrupted)
    interrupts = 0
    try:
        for step in range(1, 31):
            try:
                signal.setitimer(signal.ITIMER_REAL, step * STEP_SECONDS)
                list(loader)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            assert [batch.tolist() for batch in loader] == expected, step
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 10
    wait_until(lambda: len(pipelines(loader)) <= 1, 30, "end of pipelines that nobody knows of")
    loader.close()


class Slow:
    """Samples that take a while, so that tasks are running when an iteration is cancelled."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        time.sleep(0.03)
        return index


@pytest.mark.usefixtures("shared_ray")
def test_an_iteration_that_did_not_begin_takes_nothing_from_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pipeline actor may begin the interrupted iteration after the next one."""
    loader = loader_of(Slow(), batch_size=4)

    list(loader)
    session = loader._cluster.session
    [first] = session._pipelines._pipelines
    with monkeypatch.context() as patch:
        patch.setattr(session._nodes, "wait_for_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    assert torch.cat(list(loader)).tolist() == [*range(16)]
    [second] = session._pipelines._pipelines
    assert second is not first
    loader.close()


@pytest.mark.usefixtures("shared_ray")
def test_an_epoch_that_an_interrupt_ended_does_not_seem_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler: Any = DistributedSampler(Slow(), num_replicas=2, rank=0)  # type: ignore[arg-type]
    loader = loader_of(Slow(), batch_size=4, sampler=sampler)
    iterator = iter(loader)
    sampler.set_epoch(1)  # so next() draws the indices again

    with monkeypatch.context() as patch:
        patch.setattr(loader._cluster.session, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    for _ in range(2):
        with pytest.raises(BatchLostError, match="the next one is 0"):
            next(iterator)
    assert len(list(loader)) == 2
    loader.close()


def pipelines(loader: Any) -> set[str]:
    """Return the keys of the pipelines in the loader's pipeline actor."""
    return set(ask_actor(loader, lambda actor: list(actor._pipelines)))
