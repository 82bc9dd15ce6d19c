"""Ctrl-C, as a terminal sends it: to the training process and to all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_programs import environment, run_program, wait_until, workplace

from dpex import DpexDataLoader

PROGRAM = Path(__file__).with_name("interrupt_program.py")
EARLY_PROGRAM = Path(__file__).with_name("interrupt_early_program.py")
# Between two moments at which an epoch of some milliseconds is interrupted.
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


@pytest.mark.usefixtures("shared_ray")
def test_an_interrupt_at_any_moment_leaves_no_pipeline_behind() -> None:
    loader: DpexDataLoader[Any] = DpexDataLoader(
        range(40),  # type: ignore[arg-type]
        batch_size=10,
        num_workers=2,
        distribute_mode=True,
        head_address="local",
    )
    expected = [batch.tolist() for batch in loader]
    assert expected == [[*range(first, first + 10)] for first in range(0, 40, 10)]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for step in range(1, 31):
            try:
                signal.setitimer(signal.ITIMER_REAL, step * STEP_SECONDS)
                list(loader)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert [batch.tolist() for batch in loader] == expected, step
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 10
    wait_until(lambda: pipelines(loader) <= 1, 30, "end of pipelines that nobody knows of")
    loader.close()


def pipelines(loader: Any) -> int:
    """Return how many the loader's host has."""
    import ray

    actor = loader._cluster.session._host.actor
    return int(ray.get(actor.__ray_call__.remote(lambda host: len(host._lanes))))
