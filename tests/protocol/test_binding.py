"""Tests of the state of logical workers: dpex and torch make the same batches."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import stateful
import torch
from cluster_programs import (
    PROGRAM_SECONDS,
    PROGRAMS,
    processes_in,
    run_program,
    wait_until,
    workplace,
)
from cluster_programs.clusters import Cluster
from stateful import (
    BATCH_SIZE,
    KINDS,
    LENGTH,
    Alone,
    Counts,
    Draws,
    Numbers,
    epochs,
    log_start,
    read_alone,
)
from torch.utils.data import DataLoader, get_worker_info

from dpex import DpexDataLoader

PROGRAM = PROGRAMS / "state_program.py"
WORKERS = (2, 5)

distributed = functools.partial(DpexDataLoader, distribute_mode=True)
on_shared_ray = pytest.mark.usefixtures("shared_ray")

FULL = [(kind, w, p) for kind in KINDS for w in WORKERS for p in (False, True)]
# Every pair of a kind, a number of workers and a persistence occurs.
PAIRWISE = [
    (kind, WORKERS[(place + persistent) % 2], persistent)
    for place, kind in enumerate(KINDS)
    for persistent in (False, True)
]


@functools.cache
def torchs(kind: str, workers: int, persistent: bool) -> list[Any]:
    """Return the epochs that torch's forked workers make, in the form that JSON gives them."""
    make = functools.partial(DataLoader, multiprocessing_context="fork")
    read = epochs(kind, make, workers=workers, persistent=persistent)
    plain: list[Any] = json.loads(json.dumps(read))
    return plain


@on_shared_ray
@pytest.mark.parametrize(("kind", "workers", "persistent"), PAIRWISE)
def test_state_is_torch_s_in_spawned_workers(kind: str, workers: int, persistent: bool) -> None:
    read = epochs(kind, distributed, workers=workers, persistent=persistent)
    assert json.loads(json.dumps(read)) == torchs(kind, workers, persistent)


@on_shared_ray
@pytest.mark.extended
@pytest.mark.parametrize(("kind", "workers", "persistent"), sorted(set(FULL) - set(PAIRWISE)))
def test_state_is_torch_s_in_spawned_workers_whatever_else(
    kind: str, workers: int, persistent: bool
) -> None:
    test_state_is_torch_s_in_spawned_workers(kind, workers, persistent)


def read_in_program(address: str, combinations: list[Any], place: Path, **variables: str) -> Any:
    arguments = map(json.dumps, combinations)
    done = run_program(
        PROGRAM, address, *arguments, place=place, seconds=PROGRAM_SECONDS, **variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def compare(read: list[Any], combinations: list[Any]) -> None:
    for found, combination in zip(read, combinations, strict=True):
        assert found == torchs(*combination), combination


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_state_is_torch_s_in_forked_workers() -> None:
    with workplace() as place:
        compare(read_in_program("processes", PAIRWISE, place), PAIRWISE)
        wait_until(lambda: not processes_in(place), 20, "end of the worker processes")


@pytest.mark.extended
def test_state_is_torch_s_in_forked_workers_whatever_else() -> None:
    with workplace() as place:
        compare(read_in_program("processes", FULL, place), FULL)


def read_on_two_nodes(combinations: list[Any], cpus: int) -> None:
    with workplace() as place:
        cluster = Cluster(place)
        for _ in range(2):
            cluster.add(f"--num-cpus={cpus}")
        read = read_in_program(cluster.address, combinations, place, **cluster.variables)
        compare(read, combinations)


@pytest.mark.extended
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_state_is_torch_s_on_two_nodes(part: int) -> None:
    read_on_two_nodes(FULL[part::2], cpus=3)


@pytest.mark.extended
def test_state_is_torch_s_where_workers_take_turns_on_two_nodes() -> None:
    # With one CPU a node, few first batches are made at once. They must not decide the binding of
    # the other logical workers.
    odd = [("counter of odd batches", 5, persistent) for persistent in (False, True)]
    others = [c for c in FULL if c[1] == 5 and c not in odd]
    read_on_two_nodes(odd + others[::5], cpus=1)


@pytest.mark.extended
def test_state_is_torch_s_with_public_names_of_ray_alone() -> None:
    kinds = (
        "counter of the dataset",
        "generator from worker_init_fn",
        "stream",
        "cache of the dataset",
    )
    combinations = [(kind, 5, place % 2 == 0) for place, kind in enumerate(kinds)]
    with workplace() as place:
        compare(
            read_in_program("local", combinations, place, DPEX_PUBLIC_RAY_ONLY="1"), combinations
        )


# --- worker_init_fn -------------------------------------------------------------------------------


@on_shared_ray
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_runs_once_for_each_logical_worker(tmp_path: Path, persistent: bool) -> None:
    init = functools.partial(log_start, place=str(tmp_path))
    loader = distributed(
        Numbers(),
        batch_size=BATCH_SIZE,
        num_workers=3,
        worker_init_fn=init,
        persistent_workers=persistent,
    )
    for _ in range(2):
        assert len(list(loader)) == LENGTH // BATCH_SIZE
    times = 1 if persistent else 2
    logs = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert logs == {f"log{worker}": "begun\n" * times for worker in range(3)}


@on_shared_ray
def test_a_worker_init_fn_that_fails_is_an_error_in_its_workers_batches() -> None:
    loader = distributed(
        Numbers(), batch_size=BATCH_SIZE, num_workers=2, worker_init_fn=stateful.fail_in_first
    )
    batches = iter(loader)
    for number in range(4):
        if number % 2:
            next(batches)
        else:
            with pytest.raises(ValueError, match="worker 0 cannot begin"):
                next(batches)


@on_shared_ray
def test_generators_that_worker_init_fn_leaves_alone_are_seeded_for_each_sample() -> None:
    def draws(**arguments: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        loader = distributed(Draws(), generator=generator, collate_fn=list, **arguments)
        return [sample for batch in loader for sample in batch]

    alone = draws(num_workers=1)
    seeded = draws(num_workers=3, worker_init_fn=stateful.seed_torch)
    assert [sample[2:] for sample in seeded] == [sample[2:] for sample in alone]
    assert [sample[1] for sample in seeded] != [sample[1] for sample in alone]


# --- when a logical worker is bound ---------------------------------------------------------------


class ChangesLate(Counts):
    """A dataset that counts its reads from a certain sample on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> Any:
        if index >= self.first:
            return super().__getitem__(index)
        return index, self.seen


@on_shared_ray
def test_state_that_first_changes_at_a_later_sample_is_warned_of_once() -> None:
    loader = distributed(ChangesLate(1_000), batch_size=5, num_workers=2, collate_fn=list)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = [sample for batch in loader for sample in batch]
        list(loader)
    # The import of Ray causes other warnings.
    changed = "changed its logical worker's dataset"
    told = [warning for warning in caught if changed in str(warning.message)]
    assert [warning.filename for warning in told] == [__file__]
    assert [index for index, _ in samples] == list(range(4_000))


@on_shared_ray
@pytest.mark.parametrize("persistent", [False, True])
def test_no_two_processes_are_one_logical_worker(persistent: bool) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "persistent_workers": persistent}
    ours = read_alone(distributed(Alone(200), num_workers=3, **arguments))
    assert ours == read_alone(DataLoader(Alone(200), num_workers=3, **arguments))
    assert ours[1] == 0


@on_shared_ray
def test_with_a_worker_init_fn_such_state_is_torch_s() -> None:
    arguments: dict[str, Any] = {
        "batch_size": 5,
        "num_workers": 2,
        "collate_fn": list,
        "worker_init_fn": _nothing,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = list(distributed(ChangesLate(1_000), **arguments))
    assert ours == list(DataLoader(ChangesLate(1_000), **arguments))


def _nothing(_: int) -> None:
    pass


_counted = 0


class CountsInModule(Numbers):
    """A dataset that counts in a global variable, which its pickle does not contain."""

    def __getitem__(self, index: int) -> Any:
        global _counted
        _counted += 1
        return index, os.getpid(), _counted


@on_shared_ray
def test_a_global_counts_in_its_process_and_needs_a_worker_init_fn_to_be_one_worker_s() -> None:
    arguments: dict[str, Any] = {"batch_size": 1, "num_workers": 3, "collate_fn": list}
    free = [s for batch in distributed(CountsInModule(), **arguments) for s in batch]
    counts: dict[int, int] = {}
    for _, pid, count in sorted(free, key=lambda sample: sample[2]):
        assert count > counts.get(pid, 0), "each process has a global of its own"
        counts[pid] = count
    loader = distributed(CountsInModule(), worker_init_fn=_nothing, **arguments)
    bound = [s for batch in loader for s in batch]
    workers: dict[int, list[int]] = {}
    for number, (_, pid, count) in enumerate(bound):
        workers.setdefault(number % 3, []).append(count)
        assert {p for _, p, _ in bound[number % 3 :: 3]} == {pid}, "one process for each worker"
    for found in workers.values():
        assert [b - a for a, b in itertools.pairwise(found)] == [1] * (len(found) - 1)


class CountsUnseen(Counts):
    """A dataset that leaves its counter out of its pickle."""

    def __getstate__(self) -> Any:
        return {"seen": 0}


@on_shared_ray
def test_state_that_a_pickle_leaves_out_needs_a_worker_init_fn() -> None:
    arguments: dict[str, Any] = {"batch_size": 1, "num_workers": 3, "collate_fn": list}
    free = [s for batch in distributed(CountsUnseen(), **arguments) for s in batch]
    assert [index for index, _ in free] == list(range(LENGTH))
    arguments["worker_init_fn"] = _nothing
    expected = list(DataLoader(CountsUnseen(), multiprocessing_context="fork", **arguments))
    assert list(distributed(CountsUnseen(), **arguments)) == expected


class Meets(Numbers):
    """Samples that wait until every logical worker has started its first batch."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __getitem__(self, index: int) -> Any:
        (self.place / f"{_id()}").touch()
        wait_until(lambda: len(list(self.place.iterdir())) == 6, 60, "the others")
        return index


@on_shared_ray
@pytest.mark.parametrize("init", [None, _nothing])
def test_samples_may_wait_for_those_of_other_workers(tmp_path: Path, init: Any) -> None:
    loader = distributed(Meets(tmp_path), batch_size=1, num_workers=6, worker_init_fn=init)
    assert [int(batch) for batch in loader] == list(range(LENGTH))


@functools.lru_cache
def _squared(index: int) -> int:
    return index * index


class Cached(Numbers):
    def __getitem__(self, index: int) -> Any:
        return _squared(index % 7)


@on_shared_ray
def test_what_an_lru_cache_keeps_changes_no_batch() -> None:
    ours = distributed(Cached(), batch_size=BATCH_SIZE, num_workers=3)
    expected = DataLoader(Cached(), batch_size=BATCH_SIZE)
    for batch, other in zip(ours, expected, strict=True):
        assert torch.equal(batch, other)


class DiesOnce(Counts):
    """A dataset whose sample 30 kills its worker process the first time."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 30 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@on_shared_ray
def test_after_a_worker_s_death_its_state_begins_again_and_no_other_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init = functools.partial(log_start, place=str(tmp_path))
    loader = distributed(
        DiesOnce(tmp_path / "mark"),
        batch_size=1,
        num_workers=3,
        collate_fn=list,
        worker_init_fn=init,
        prefetch_bytes=0,
    )
    samples = [sample for batch in loader for sample in batch]
    assert [index for index, _ in samples] == list(range(LENGTH))
    for worker in (1, 2):
        assert [seen for _, seen in samples[worker::3]] == list(range(1, LENGTH // 3 + 1))
    # The restarted logical worker recomputes some batches that had arrived, then continues.
    steps = [after - before for before, after in itertools.pairwise(s for _, s in samples[::3])]
    assert len([step for step in steps if step != 1]) == 1
    assert min(steps) < 0
    logs = {path.name: path.read_text().count("begun") for path in tmp_path.glob("log*")}
    assert logs == {"log0": 2, "log1": 1, "log2": 1}
    said = [record for record in caplog.records if "logical worker 0 has ended" in record.message]
    assert len(said) == 1


# --- how long copies live -------------------------------------------------------------------------


class LeavesMark(Numbers):
    """A dataset with a file for each copy in a worker process, as long as the copy lives."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.mark: Path | None = None

    def __getitem__(self, index: int) -> Any:
        if self.mark is None and get_worker_info() is not None:
            self.mark = self.place / f"{os.getpid()}-{_id()}"
            self.mark.touch()
        return index

    def __getstate__(self) -> Any:
        return {"place": self.place, "mark": None}

    def __del__(self) -> None:
        if self.mark is not None:
            self.mark.unlink(missing_ok=True)


def _id() -> int:
    info = get_worker_info()
    assert info is not None
    return info.id


@on_shared_ray
@pytest.mark.parametrize("how", ["finished", "closed", "dropped"])
@pytest.mark.parametrize("persistent", [False, True])
def test_copies_go_with_their_loader(tmp_path: Path, how: str, persistent: bool) -> None:
    loader = distributed(
        LeavesMark(tmp_path),
        batch_size=BATCH_SIZE,
        num_workers=3,
        worker_init_fn=_nothing,
        persistent_workers=persistent,
    )
    for _ in range(3):
        list(loader)
        # Each logical worker has a copy. Persistent workers keep it after an epoch.
        kept = {path.name.partition("-")[2] for path in tmp_path.iterdir()}
        assert kept == ({"0", "1", "2"} if persistent else set())
    if how != "finished":
        next(iter(loader))  # the logical workers make the run-ahead
    if how == "closed":
        loader.close()
    del loader
    wait_until(lambda: not list(tmp_path.iterdir()), 20, "end of the copies")
