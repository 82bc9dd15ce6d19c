"""Tests of an ``IterableDataset``, compared with torch's loader and its workers."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import seed_everything
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    TensorDataset,
    get_worker_info,
)

from dpex import BatchLostError, DpexDataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

CARRIERS = ("local", "processes")
OURS = {"distribute_mode": True, "head_address": "local"}
Same = Callable[[Any, Any], None]


class Everything(IterableDataset[Any]):
    """A stream that each logical worker reads in full."""

    def __init__(self, length: int = 11) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.length))


class Shard(Everything):
    """A stream that the logical workers divide among them, as in torch's documentation."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, self.length, info.num_workers) if info else range(self.length))


class Uneven(IterableDataset[Any]):
    """A stream of 7 samples in worker 0, none in worker 1, 20 in worker 2, and so on."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info().id
        for place in range([7, 0, 20, 4, 13][worker % 5]):
            yield worker, place


class Drawing(Everything):
    """A stream that draws from all global generators, also before its first sample."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length).tolist()
        for index in order:
            yield index, torch.rand(2), np.random.rand(), random.random()


class Remembers(Everything):
    """A stream that counts its passes."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for index in range(self.length):
            yield self.epoch, index


class Lines(IterableDataset[str]):
    """The lines of a file, divided among the logical workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        info = get_worker_info()
        with self.path.open() as file:
            yield from itertools.islice(file, info.id, None, info.num_workers)


class Failing(IterableDataset[Any]):
    """A stream that raises two errors and then continues."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.place += 1
        if self.place in (5, 6):
            raise LookupError(f"no {self.place}")
        if self.place > 12:
            raise StopIteration
        return self.place


class Deadly(Everything):
    """A stream that kills worker 0's process at sample 6, ``times`` times."""

    def __init__(self, marks: Path, times: int) -> None:
        super().__init__(12)
        self.marks = marks
        self.times = times

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            if index == 6 and get_worker_info().id == 0:
                died = len(list(self.marks.iterdir()))
                if died < self.times:
                    (self.marks / str(died)).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            yield index, torch.rand(())


class DiesLater(Deadly):
    """A shuffled stream that kills worker 0's process in its second pass, if ``times`` is 1."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for place, index in enumerate(torch.randperm(self.length).tolist()):
            if place == 5 and get_worker_info().id == 0 and self.epoch == 2 and self.times:
                mark = self.marks / "died"
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            yield index, torch.rand(())


class SlowBeside(Deadly):
    """A stream that is slow in worker 1 while worker 0's process dies."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if get_worker_info().id == 1:
                time.sleep(0.3)
            yield sample


class Sized(Everything):
    def __len__(self) -> int:
        return self.length


def run_epochs(loader_type: Any, dataset: Any, epochs: int, **arguments: Any) -> list[list[Any]]:
    seed_everything()
    loader = loader_type(dataset, **arguments)
    result = [[batch for batch in loader] for _ in range(epochs)]  # noqa: C416 - list() asks for len()
    if loader_type is DpexDataLoader:
        loader.close()
    return [*result, [torch.get_rng_state()]]


def check(assert_same: Same, dataset: Any, epochs: int = 1, **arguments: Any) -> list[list[Any]]:
    ours = run_epochs(DpexDataLoader, dataset, epochs, **arguments, **OURS)
    assert_same(ours, run_epochs(DataLoader, dataset, epochs, **arguments))
    return ours


@pytest.mark.parametrize(
    "batching",
    [
        {"batch_size": 3},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_workers", [1, 5])
@pytest.mark.parametrize(
    "dataset",
    [Everything(), Everything(0), Everything(300), Shard(), Shard(3), Uneven(), Drawing()],
    ids=["all", "none", "many", "shard", "few", "uneven", "drawing"],
)
def test_batches_come_in_torch_s_round_robin(
    assert_same: Same, dataset: Any, num_workers: int, batching: dict[str, Any]
) -> None:
    check(assert_same, dataset, num_workers=num_workers, **batching)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Remembers(), Uneven()], ids=["remembers", "uneven"])
def test_epochs(assert_same: Same, dataset: Any, persistent: bool) -> None:
    check(
        assert_same,
        dataset,
        epochs=3,
        batch_size=3,
        num_workers=3,
        persistent_workers=persistent,
    )


def test_draws_of_further_epochs() -> None:
    """Unlike torch, dpex seeds every epoch of persistent workers, so a restart changes no draws."""

    def epochs(**options: Any) -> list[Any]:
        arguments = {"batch_size": 5, "num_workers": 2, **options}
        return run_epochs(DpexDataLoader, Drawing(20), 3, **arguments, **OURS)[:-1]

    lasting, again = (list(map(str, epochs(persistent_workers=True))) for _ in range(2))
    assert lasting == again
    assert len(set(lasting)) == 3
    torchs = run_epochs(DataLoader, Drawing(20), 3, batch_size=5, num_workers=2)
    assert list(map(str, epochs())) == list(map(str, torchs[:-1]))
    assert lasting[0] == str(torchs[0])


def test_a_later_epoch_of_persistent_workers_continues() -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    seed_everything()
    with DpexDataLoader(Drawing(20), **arguments, **OURS) as loader:
        list(loader)
        whole = list(map(str, loader))
    seed_everything()
    with DpexDataLoader(Drawing(20), **arguments, **OURS) as loader:
        list(loader)
        before = list(map(str, itertools.islice(loader, 3)))
        state = loader.state_dict()
    with DpexDataLoader(Drawing(20), **arguments, **OURS) as loader:
        next(iter(loader))  # the loader must not continue this epoch
        loader.load_state_dict(state)
        assert before + list(map(str, loader)) == whole


def test_a_worker_that_dies_in_a_later_epoch_changes_nothing(tmp_path: Path) -> None:
    def epochs(times: int) -> list[Any]:
        (marks := tmp_path / f"{times}").mkdir()
        dataset = DiesLater(marks, times)
        arguments = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
        return run_epochs(DpexDataLoader, dataset, 2, **arguments, **OURS)[:-1]

    assert str(epochs(1)) == str(epochs(0))
    assert (tmp_path / "1" / "died").exists()


def prepare(worker_id: int) -> None:
    info = get_worker_info()
    assert info.id == worker_id
    info.dataset.length = 5 + 4 * worker_id
    random.seed(worker_id)


def test_worker_init_fn_prepares_each_worker_s_copy(assert_same: Same) -> None:
    check(assert_same, Drawing(), batch_size=2, num_workers=3, worker_init_fn=prepare, epochs=2)


def test_chained_streams(assert_same: Same) -> None:
    dataset = ChainDataset([Shard(5), Shard(9)])
    batches = check(assert_same, dataset, batch_size=4, num_workers=3)[0]
    assert sorted(i for batch in batches for i in batch.tolist()) == sorted([*range(5), *range(9)])


def test_lines_of_a_file(assert_same: Same, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {number}\n" for number in range(50)))
    [batches, _] = check(assert_same, Lines(path), batch_size=4, num_workers=2)
    assert sorted(line for batch in batches for line in batch) == sorted(path.open())


def test_any_order_gives_every_batch_once() -> None:
    loader = DpexDataLoader(Uneven(), 3, num_workers=5, in_order=False, **OURS)
    got = sorted(str(batch) for batch in loader)
    assert got == sorted(str(batch) for batch in DataLoader(Uneven(), 3, num_workers=5))


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_an_endless_stream_is_read_no_further_than_the_run_ahead(
    prefetch_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "read"
    loader = DpexDataLoader(Endless(path), 2, num_workers=2, prefetch_bytes=prefetch_bytes, **OURS)
    with loader:
        for number, batch in enumerate(itertools.islice(loader, 20)):
            assert batch.tolist() == [number // 2 * 2, number // 2 * 2 + 1]
    read = max(map(int, path.read_text().split()))
    assert read < (20 + 2 * 2 + 2 if not prefetch_bytes else 2 * 1200)


class Endless(IterableDataset[int]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            with self.path.open("a") as file:
                file.write(f"{number} ")
            yield number


def outcomes(loader: Any) -> list[str]:
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(str(next(iterator)))
        except StopIteration:
            return found
        except Exception as error:
            found.append(f"{type(error).__name__} {str(error).splitlines()[-1]}")


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_errors_come_in_their_place_and_the_stream_continues(batch_size: int | None) -> None:
    loader = DpexDataLoader(Failing(), batch_size, num_workers=2, **OURS)
    got = outcomes(loader)
    assert got == outcomes(DataLoader(Failing(), batch_size, num_workers=2))
    assert any("LookupError" in outcome for outcome in got)


def test_a_stream_that_cannot_begin_says_so_once() -> None:
    with DpexDataLoader(CannotBegin(), 2, num_workers=2, **OURS) as loader:
        got = outcomes(loader)
    assert got == ["LookupError LookupError: nothing here", "tensor([0, 1])", "tensor([2])"]


class CannotBegin(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        if get_worker_info().id == 0:
            raise LookupError("nothing here")
        return iter(range(3))


def test_an_error_names_worker_and_place() -> None:
    loader = DpexDataLoader(Failing(), None, num_workers=2, **OURS)
    with pytest.raises(LookupError, match=r"process 0 \(batch 4 of its stream, node .*, pid"):
        list(loader)


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=[pytest.mark.extended])])
def test_a_worker_that_dies_changes_nothing(assert_same: Same, tmp_path: Path, times: int) -> None:
    (marks := tmp_path / "marks").mkdir()
    arguments = {"batch_size": 2, "num_workers": 3}
    ours = run_epochs(DpexDataLoader, Deadly(marks, times), 1, **arguments, **OURS)
    assert len(list(marks.iterdir())) == times
    assert_same(ours, run_epochs(DataLoader, Deadly(marks, times), 1, **arguments))


@pytest.mark.extended
def test_a_slow_stream_beside_one_that_dies_for_good(tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    loader = DpexDataLoader(SlowBeside(marks, 6), 2, num_workers=2, **OURS)
    batches = [batch[0].tolist() for batch in loader]
    assert batches == [[i, i + 1] for i in range(0, 12, 2) for _ in range(2)]


def test_streams_that_hold_a_resource_take_turns() -> None:
    options = {"worker_options": {"memory": 0.6 * memory_of_the_cluster()}, **OURS}
    with DpexDataLoader(Shard(40), 2, num_workers=2, **options) as loader:
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(40))


def memory_of_the_cluster() -> float:
    import ray

    return float(ray.cluster_resources()["memory"])


@pytest.mark.extended
def test_a_stream_that_always_kills_ends_in_an_error_that_names_it(tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    loader = DpexDataLoader(Deadly(marks, 1000), 2, num_workers=2, **OURS)
    iterator, seen = iter(loader), []
    with pytest.raises(BatchLostError, match="batch 3 of the stream of logical worker 0"):
        seen.extend(iterator)
    assert len(list(iterator)) == 3  # batches of the other logical worker


def test_a_wrong_length_warns_as_torch_s_does() -> None:
    loader = DpexDataLoader(Sized(11), None, num_workers=2, **OURS)
    assert len(loader) == 11
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len(list(iter(loader))) == 22


def test_statistics_count_a_stream_s_samples() -> None:
    with DpexDataLoader(Shard(50), 4, num_workers=2, **OURS) as loader:
        iterator = iter(loader)
        next(iterator)
        assert loader.stats().samples == 4
        batches = list(loader)
        assert loader.stats().samples == 50
        assert loader.stats().batches == len(batches)
        assert loader.stats().in_flight == 0


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "second"),
    [(Drawing(9), "dpex"), (Uneven(), "dpex"), (Uneven(), "torch")],
    ids=["drawing", "uneven", "in torch's workers"],
)
def test_a_stream_resumes_where_it_was(dataset: Any, second: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": 3}
    seed_everything()
    with DpexDataLoader(dataset, **arguments, **OURS) as loader:
        whole = list(map(str, loader))
    for place in range(0, len(whole) + 1, 3):
        seed_everything()
        with DpexDataLoader(dataset, **arguments, **OURS) as loader:
            before = list(map(str, itertools.islice(loader, place)))
            state = json.loads(json.dumps(loader.state_dict()))
        assert sum(state["streams"]) == state["batches"] == place
        with DpexDataLoader(dataset, **arguments, **(OURS if second == "dpex" else {})) as loader:
            loader.load_state_dict(state)
            assert before + list(map(str, loader)) == whole, place
            assert not loader.state_dict()["in_progress"]


@pytest.mark.parametrize("ours", [{}, OURS], ids=["torch", "dpex"])
@pytest.mark.parametrize("change", [{"num_workers": 0}, {"num_workers": 3}, {"batch_size": 3}])
def test_a_stream_resumes_in_the_same_batches_only(change: Any, ours: Any) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": 2, **ours}
    with DpexDataLoader(Shard(), **arguments) as loader:
        list(loader)
        between = loader.state_dict()
        next(iter(loader))
        state = loader.state_dict()
    with DpexDataLoader(Shard(), **{**arguments, **change}) as loader:
        has = f"num_workers={loader.num_workers} and batch_size={loader.batch_size}"
        with pytest.raises(ValueError, match=f"num_workers=2 and batch_size=2, but .* has {has}"):
            loader.load_state_dict(state)
        loader.load_state_dict(between)


def test_an_epoch_of_torch_s_workers_does_not_resume_in_dpex_s() -> None:
    plain = DpexDataLoader(Shard(), 2, num_workers=2)
    next(iter(plain))
    loader = DpexDataLoader(Shard(), 2, num_workers=2, **OURS)
    with pytest.raises(ValueError, match="saved without distribute_mode"):
        loader.load_state_dict(plain.state_dict())


def test_a_stream_does_not_resume_as_a_map_nor_a_map_as_a_stream() -> None:
    loaders = DpexDataLoader(Shard(), 2), DpexDataLoader(TensorDataset(torch.arange(9)), 2)
    for one, other in itertools.permutations(loaders):
        next(iter(one))
        with pytest.raises(
            ValueError, match=r"map-style dataset.*IterableDataset|IterableDat.*map-s"
        ):
            other.load_state_dict(one.state_dict())


def test_without_the_cluster_errors_are_read_over() -> None:
    def read(loader: Any, batches: int) -> list[str]:
        iterator, found = iter(loader), []
        for _ in range(batches):
            try:
                found.append(str(next(iterator)))
            except LookupError as error:
                found.append(str(error))
        return found

    whole = read(DpexDataLoader(Failing(), None), 9)
    loader = DpexDataLoader(Failing(), None)
    before = read(loader, 6)
    state = loader.state_dict()
    loader = DpexDataLoader(Failing(), None)
    loader.load_state_dict(state)
    assert before + read(loader, 3) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_the_cluster_a_stream_resumes_too(num_workers: int) -> None:
    whole = [batch.tolist() for batch in DataLoader(Shard(), 2, num_workers=num_workers)]
    loader = DpexDataLoader(Shard(), 2, num_workers=num_workers)
    before = [batch.tolist() for batch in itertools.islice(loader, 3)]
    state = loader.state_dict()
    loader = DpexDataLoader(Shard(), 2, num_workers=num_workers)
    loader.load_state_dict(state)
    assert before + [batch.tolist() for batch in loader] == whole


class Exits(IterableDataset[int]):
    """A stream that raises ``SystemExit`` and then continues."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.place += 1
        if self.place == 2:
            raise SystemExit("for good")
        if self.place == 5:
            raise StopIteration
        return self.place


def test_an_exit_is_read_over_too() -> None:
    found: list[Any] = []
    state: dict[str, Any] = {}
    for batches in (3, 1):
        with DpexDataLoader(Exits(), None, num_workers=1, **OURS) as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            for _ in range(batches):
                try:
                    found.append(next(iterator))
                except (RuntimeError, SystemExit) as error:
                    found.append("SystemExit" in repr(error) and "exit")
            state = loader.state_dict()
    assert found == [1, "exit", 3, 4]


# --- datasets and options that are refused --------------------------------------------------------


class Pipe(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"DataPipes \(Pipe"):
        DpexDataLoader(Pipe(), num_workers=1, **OURS)
    with pytest.raises(ValueError, match=r"map-style.*Everything.*__iter__"):
        DpexDataLoader(Everything(), num_workers=1, on_error="skip", **OURS)
    with pytest.raises(ValueError, match="shuffle"):
        DpexDataLoader(Everything(), num_workers=1, shuffle=True, **OURS)
