"""Tests of failures on the cluster side, as the training loop sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from cluster_programs import wait_until
from living import (
    AlwaysKills,
    DividesByZero,
    Draws,
    Hangs,
    KillsOnce,
    KillsPipelineActor,
    LastSamplesAreSlow,
    Plain,
    read_past_errors,
)

from dpex import BatchLostError, DpexDataLoader, SerializationError
from dpex.transforms import MappedDataset, Stage

pytestmark = pytest.mark.usefixtures("shared_ray", "nothing_to_collect")


CARRIERS = ("local", "processes")
OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "local"}


def loader_of(dataset: Any, **changes: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, **{"batch_size": 10, "num_workers": 2, **OURS, **changes})


def test_an_error_arrives_at_its_batch_with_its_type_and_place() -> None:
    loader = loader_of(DividesByZero())
    iterator = iter(loader)
    assert [next(iterator)[1].tolist()[0] for _ in range(5)] == [0, 10, 20, 30, 40]
    with pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    text = str(caught.value)
    del caught  # breaks a reference cycle with this frame, which holds the iterator
    assert "dataset index 57, batch 5, node " in text
    assert ", pid " in text
    assert "return 1 / (index - 57), index" in text
    assert [batch[1].tolist()[0] for batch in iterator] == list(range(60, 200, 10))
    assert sum(1 for _ in range(2) for _ in zip(range(5), loader, strict=False)) == 10


def test_an_error_does_not_come_early_where_order_does_not_matter() -> None:
    firsts, errors = read_past_errors(iter(loader_of(DividesByZero(), in_order=False)))
    assert errors == 1
    assert sorted(firsts) == [first for first in range(0, 200, 10) if first != 50]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_changes_nothing(tmp_path: Path, how: signal.Signals) -> None:
    mark = tmp_path / "mark"
    dataset = KillsOnce(mark, how)

    def epoch() -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        return list(loader_of(dataset, collate_fn=list, generator=generator))

    disturbed = epoch()
    assert mark.exists()
    assert disturbed == epoch()
    assert [index for batch in disturbed for index, _ in batch] == list(range(200))


class SlowlyKillsOnce(KillsOnce):
    """Samples so slow that their task checks whether the iteration is still open."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_a_worker_that_dies_continues_with_the_stages_in_its_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    dataset = MappedDataset(SlowlyKillsOnce(mark, signal.SIGKILL), [Stage(lambda index: index)])
    loader = loader_of(dataset, collate_fn=list, generator=torch.Generator().manual_seed(3))
    with caplog.at_level("WARNING", "dpex"):
        indices = [index for batch in loader for index, _ in batch]
    assert mark.exists()
    assert indices == [*range(200)]
    assert "batches were lost" not in caplog.text, "the task knows what it has made"


@pytest.mark.parametrize("worker_init_fn", [None, id], ids=["released", "bound"])
def test_a_sample_that_always_kills_ends_in_an_error_that_names_it(worker_init_fn: Any) -> None:
    loader = loader_of(AlwaysKills(), worker_init_fn=worker_init_fn)
    iterator = iter(loader)
    assert [next(iterator)[1].tolist()[0] for _ in range(5)] == [0, 10, 20, 30, 40]
    with pytest.raises(BatchLostError, match=r"batch 5 \(dataset indices \[50, 51, .*57, 58, 59"):
        next(iterator)
    assert [batch[1].tolist()[0] for batch in iterator] == list(range(60, 200, 10))


@pytest.mark.extended
def test_an_interrupt_while_lost_batches_are_resent_leaves_none_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterator: Any = iter(loader_of(AlwaysKills()))

    def interrupted(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(iterator._epoch._delivery, "_resend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    with pytest.raises(BatchLostError, match="the next one is 5"):
        next(iterator)


@pytest.mark.only_ray
@pytest.mark.parametrize(
    ("options", "by_signal"),
    [
        ({}, True),
        pytest.param({"persistent_workers": True}, False, marks=pytest.mark.extended),
        pytest.param({"in_order": False}, True, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_a_pipeline_actor_that_dies_changes_nothing(
    options: dict[str, Any], by_signal: bool
) -> None:
    import ray

    def epochs(deaths: set[int]) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        loader = loader_of(
            Draws(500), collate_fn=list, generator=generator, prefetch_bytes=0, **options
        )
        killed: list[Any] = []
        streams = []
        for _ in range(2):
            batches = []
            for step, batch in enumerate(loader):
                batches.append(batch)
                assert loader._cluster is not None
                actor = loader._cluster.session._actor.handle
                if step in deaths and actor not in killed:
                    killed.append(actor)
                    if by_signal:
                        os.kill(pipeline_actor_pid(), signal.SIGKILL)
                    else:
                        ray.kill(actor)
            streams.append(batches if options != {"in_order": False} else sorted(batches))
        assert len(killed) >= 2 * len(deaths) - 2
        return streams

    undisturbed = epochs(set())
    assert [len(batches) for batches in undisturbed] == [50, 50]
    assert epochs({0, 30}) == undisturbed


class Told(Draws):
    """Samples that write their indices to a log."""

    def __init__(self, length: int, log: Path) -> None:
        super().__init__(length)
        self.log = log

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as log:
            log.write(f"{index} ")
        return super().__getitem__(index)


@pytest.mark.only_ray
@pytest.mark.extended
def test_what_was_delivered_is_not_read_again_when_the_pipeline_actor_dies(tmp_path: Path) -> None:
    log = tmp_path / "log"
    delivered = 210
    for step, _ in enumerate(loader_of(Told(500, log), prefetch_bytes=0), 1):
        if step == delivered // 10:
            os.kill(pipeline_actor_pid(), signal.SIGKILL)
    times = Counter(map(int, log.read_text().split()))
    assert sorted(times) == list(range(500))
    assert {times[index] for index in range(delivered)} == {1}


def pipeline_actor_pid() -> int:
    """Return the pid of this process's pipeline actor."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
            if command.startswith(b"ray::_PipelineActor"):
                found.append(int(entry.name))
    [pid] = [pid for pid in found if os.getpid() in ancestors(pid)]
    return pid


def ancestors(pid: int) -> set[int]:
    above: set[int] = set()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        above.add(pid)
    return above


@pytest.mark.only_ray
@pytest.mark.extended
def test_pipeline_actors_that_die_one_after_the_other_end_in_an_error_and_not_the_loader() -> None:
    loader = loader_of(KillsPipelineActor(40))
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(BatchLostError, match="outstanding"):
            next(iterator)
    loader = loader_of(Plain(2000))
    assert [int(index) for batch in loader for index in batch[1]] == list(range(2000))


@pytest.mark.extended
def test_an_error_elsewhere_does_not_stop_a_loader() -> None:
    ours = iter(loader_of(Plain(2000), prefetch_bytes=0))
    next(ours)
    with pytest.raises(BatchLostError):
        list(loader_of(AlwaysKills()))
    assert len(list(ours)) == 199


def test_a_timeout_names_the_batch_and_the_loader_works_on(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    list(loader_of(Plain()))  # so that the timeout does not include the start of a worker process
    loader = loader_of(Hangs(mark), timeout=15)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    with pytest.raises(RuntimeError, match=r"timed out after 15 seconds.*batch 5 .*\[50, 51, .*57"):
        next(iterator)
    assert mark.exists()
    del iterator
    assert len(list(loader_of(Plain()))) == 20
    assert next(iter(loader))[1].tolist()[0] == 0


def test_a_task_that_hangs_in_its_last_sample_gets_no_chunk_of_the_next_epoch(
    tmp_path: Path,
) -> None:
    """Before its last sample, the task has asked for its next chunk."""
    mark = tmp_path / "mark"
    # The loader requests all batches at once, so the last one is made without the training loop.
    loader = loader_of(Hangs(mark, 199, once=True), num_workers=1, prefetch_factor=20, timeout=20)
    iterator = iter(loader)
    next(iterator)
    wait_until(mark.exists, 60, "start of the sample that hangs")
    del iterator
    assert [int(batch[1][0]) for batch in loader] == list(range(0, 200, 10))


def test_a_task_that_is_cancelled_in_its_last_batch_serves_the_next_epoch(tmp_path: Path) -> None:
    """Before its last samples, the task has asked for its next chunk."""
    loader = loader_of(
        LastSamplesAreSlow(tmp_path), num_workers=1, prefetch_factor=20, persistent_workers=True
    )
    iterator: Any = iter(loader)
    next(iterator)
    wait_until((tmp_path / "mark").exists, 60, "start of the sample that waits")
    iterator._epoch.close()
    (tmp_path / "go").touch()
    counts, _ = next(iter(loader))
    assert 197 < counts[0] <= 201


@pytest.mark.only_ray
def test_a_dataset_that_cannot_be_pickled_fails_at_iter_with_the_attribute() -> None:
    dataset = Plain()
    dataset.handles = {"rows": iter_of_rows()}  # type: ignore[attr-defined]
    with pytest.raises(SerializationError, match=r"loader\.dataset\.handles\['rows'\]") as info:
        iter(loader_of(dataset))
    assert len(traceback.extract_tb(info.value.__traceback__)) == 2, "the caller, and __iter__"


class Refuses:
    def __getstate__(self) -> Any:
        raise TypeError("a session cannot be pickled")


@pytest.mark.only_ray
def test_what_refuses_to_be_pickled_is_named_with_its_own_words() -> None:
    dataset = Plain()
    dataset.handles = [Refuses()]  # type: ignore[attr-defined]
    with pytest.raises(SerializationError, match=r"handles\[0\] .*a session cannot be pickled"):
        iter(loader_of(dataset))


@pytest.mark.only_ray
def test_a_global_that_cannot_be_pickled_is_named_after_the_method_that_uses_it() -> None:
    rows = iter_of_rows()

    class Reads(Plain):
        def __getitem__(self, index: int) -> Any:
            return next(rows)

    with pytest.raises(SerializationError, match=r"loader\.dataset\.__getitem__\.<rows>"):
        iter(loader_of(Reads()))


def iter_of_rows() -> Any:
    return (row for row in ())


@pytest.mark.only_ray
def test_worker_options_that_ray_refuses_reach_the_training_loop() -> None:
    loader = loader_of(Plain(), worker_options={"label_selector": {"disk": "like(f*)"}})
    with pytest.raises(RuntimeError, match=r"like\(f\*\)"):
        next(iter(loader))


@pytest.mark.only_ray
def test_workers_that_cannot_be_set_up_are_an_error() -> None:
    missing = {"runtime_env": {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}}
    iterator = iter(loader_of(Plain(), worker_options=missing))
    with pytest.raises(BatchLostError, match="RuntimeEnvSetupError"):
        next(iterator)
