"""Tests of the start and end of iterations: nothing is left behind, and the next one works."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_programs import wait_until
from living import ImageAndArrays, LargeArray, Plain, Remembers, Slow
from torch.utils.data import DataLoader, Dataset

from dpex import BatchLostError, DpexDataLoader

pytestmark = pytest.mark.usefixtures("shared_ray", "nothing_to_collect")


CARRIERS = ("local", "processes")
OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "local"}


def loader_of(dataset: Any, **changes: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, **{"batch_size": 10, "num_workers": 2, **OURS, **changes})


def indices(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch[1]]


def kept_by_ray() -> int:
    """Count the local objects of Ray's processes, without this process."""
    import ray
    from ray._private.internal_api import node_stats

    [node] = [node for node in ray.nodes() if node["Alive"]]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).core_workers_stats
    return sum(worker.num_local_objects for worker in stats if worker.pid != os.getpid())


def receiving() -> int:
    """Return the number of threads that wait for batches."""
    names = ("dpex-receive", "dpex-processes")
    return sum(thread.name in names for thread in threading.enumerate())


def test_a_break_leaves_the_loader_usable_and_no_thread() -> None:
    loader = loader_of(Plain())
    for _ in range(5):
        for batch in loader:
            assert indices([batch]) == list(range(10))
            break
    assert indices(loader) == list(range(200))
    wait_until(lambda: receiving() == 0, 10, "end of the receiving threads")


class CannotBeSent(int):
    """An index that raises ``KeyboardInterrupt`` when dpex pickles it."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_while_indices_are_sent_is_the_end_of_the_iterator() -> None:
    sampler = [*range(50), CannotBeSent(50), *range(51, 200)]
    iterator = iter(loader_of(Plain(), sampler=sampler, prefetch_bytes=0))
    with pytest.raises(KeyboardInterrupt):
        for _ in iterator:
            pass
    with pytest.raises(BatchLostError, match="batches outstanding"):
        next(iterator)


def test_many_breaks_and_epochs_leak_neither_threads_nor_files(carrier: str) -> None:
    loader = loader_of(Plain(40))
    list(loader)

    def threads_and_files() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    wait_until(lambda: receiving() == 0, 10, "end of the receiving threads")
    threads, files = threads_and_files()
    # Ray keeps a connection to each worker process whose blocks this process has read.
    before = threads, files + 2
    for epoch in range(200 if carrier == "local" else 40):  # each starts three processes
        if epoch % 2:
            next(iter(loader))
        else:
            assert len(indices(loader)) == 40
    gc.collect()
    wait_until(
        lambda: all(now <= then for now, then in zip(threads_and_files(), before, strict=True)),
        10,
        "as few threads and files as before",
    )


@pytest.mark.only_ray
def test_no_process_keeps_blocks_that_were_read() -> None:
    loader = loader_of(Plain(40))
    list(loader)
    before = kept_by_ray()
    for _ in range(100):
        assert len(indices(loader)) == 40
    wait_until(lambda: kept_by_ray() < before + 20, 20, "the end of what 100 epochs kept")


@pytest.mark.only_ray
def test_no_process_keeps_anything_of_loaders_that_are_closed() -> None:
    def read_one() -> None:
        with loader_of(Plain(1000)) as loader:
            next(iter(loader))

    read_one()
    before = kept_by_ray()
    for _ in range(20):
        read_one()
    wait_until(lambda: kept_by_ray() <= before + 5, 20, "the end of what 20 loaders kept")


@pytest.mark.only_ray
def test_many_executions_leave_ray_s_function_table_as_it_was() -> None:
    import ray

    def exported() -> int:
        client = ray._private.worker.global_worker.gcs_client
        return len(client.internal_kv_keys(b"", b"fun"))

    # With a worker_init_fn, each logical worker needs a task. So the Dataset of the further tasks
    # starts in the first epoch, and not in a later one.
    loader = loader_of(Plain(40), worker_init_fn=int)
    list(loader)
    before = exported()
    for epoch in range(20):
        iterator = iter(loader)
        next(iterator)
        if epoch % 2:
            list(iterator)
        del iterator
    assert exported() == before


def test_dropping_an_iterator_stops_the_work(tmp_path: Path) -> None:
    log = tmp_path / "log"
    loader = loader_of(Slow(log, 0.05), batch_size=100, prefetch_factor=4)
    iterator = iter(loader)
    wait_until(log.exists, 60, "first sample")
    del iterator
    gc.collect()

    def made() -> int:
        return len(log.read_text().splitlines())

    # 800 samples of 50 ms were in flight. Tasks soon notice that the iteration has ended.
    assert indices(loader_of(Plain(40))) == list(range(40))
    seen = -1
    while seen != made():
        seen = made()
        indices(loader_of(Plain(40)))
    assert seen < 700


def test_close_ends_what_runs_and_the_loader_can_be_iterated_again() -> None:
    with loader_of(Plain()) as loader:
        iterator = iter(loader)
        next(iterator)
        assert loader._cluster is not None
    assert loader._cluster is None
    with pytest.raises(RuntimeError):
        list(iterator)
    assert indices(loader) == list(range(200))
    loader.close()
    loader.close()


class Sleeps(Plain):
    """Samples that write the pid of their process, and then take minutes."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def __getitem__(self, index: int) -> Any:
        self.place.write_text(f"{os.getpid()}\n")
        time.sleep(600)
        return super().__getitem__(index)


def test_close_ends_a_process_that_is_busy_for_long(tmp_path: Path) -> None:
    place = tmp_path / "process"
    loader = loader_of(Sleeps(place), num_workers=1)
    iterator = iter(loader)
    wait_until(lambda: place.exists() and place.read_text().endswith("\n"), 60, "first sample")
    process = Path("/proc", place.read_text().strip())
    loader.close()
    wait_until(lambda: not process.exists(), 30, "end of the process")
    del iterator


def test_three_iterators_of_one_loader_do_not_disturb_each_other() -> None:
    loader = loader_of(Plain(60))
    iterators = [iter(loader) for _ in range(3)]
    for first in range(0, 60, 10):
        for iterator in iterators:
            assert indices([next(iterator)]) == list(range(first, first + 10))
    for iterator in iterators:
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


def test_an_exception_in_the_training_step_leaves_the_loader_usable() -> None:
    loader = loader_of(Plain(60))

    def step(batch: Any) -> None:
        raise KeyError(len(batch))

    with pytest.raises(KeyError):
        list(map(step, loader))
    assert indices(loader) == list(range(60))


def test_every_iteration_sees_the_dataset_as_it_is_then() -> None:
    dataset = Remembers()
    loader = loader_of(dataset, collate_fn=list)
    versions = {version for batch in loader for _, _, version in batch}
    dataset.version = 1
    assert versions == {0}
    assert {version for batch in loader for _, _, version in batch} == {1}


def reads_by_process(loader: Any) -> dict[int, list[int]]:
    """Return for each process how often its copy had been read, at each of its samples."""
    reads: dict[int, list[int]] = {}
    for batch in loader:
        for pid, read, _ in batch:
            reads.setdefault(pid, []).append(read)
    assert sum(map(len, reads.values())) == 40
    return reads


@pytest.mark.parametrize("persistent", [False, True])
def test_copies_are_fresh_unless_workers_persist(persistent: bool) -> None:
    loader = loader_of(Remembers(), collate_fn=list, persistent_workers=persistent)
    before: dict[int, int] = {}
    for _ in range(3):
        for pid, reads in reads_by_process(loader).items():
            first = before.get(pid, 0) + 1
            assert sorted(reads) == list(range(first, first + len(reads)))
            if persistent:
                before[pid] = max(reads)


def test_what_a_worker_changes_never_crosses_loaders() -> None:
    dataset = Remembers()
    for _ in range(2):
        loader = loader_of(dataset, collate_fn=list)
        for reads in reads_by_process(loader).values():
            assert sorted(reads) == list(range(1, len(reads) + 1))


@pytest.mark.only_ray
def test_worker_processes_are_kept_from_epoch_to_epoch() -> None:
    loader = loader_of(Remembers(), collate_fn=list)
    pids = [{pid for batch in loader for pid, _, _ in batch} for _ in range(4)]
    assert len(set.union(*pids)) <= 4


def test_endless_samplers_are_read_no_further_than_the_run_ahead() -> None:
    drawn = []

    def endless() -> Any:
        index = 0
        while True:
            drawn.append(index)
            yield index % 200
            index += 1

    loader = loader_of(Plain(), sampler=endless(), prefetch_bytes=0, prefetch_factor=3)
    iterator = iter(loader)
    assert len(drawn) == 3 * 2 * 10
    for _ in range(50):
        next(iterator)
    assert len(drawn) <= (50 + 3 * 2 + 1) * 10


def test_the_next_iterator_has_the_attributes_as_they_are_then() -> None:
    drawn = 0

    def indices_drawn() -> Any:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn % 200

    loader = loader_of(Plain(), sampler=indices_drawn(), prefetch_bytes=0)
    for name, value, batches in (
        ("num_workers", 3, 6),
        ("prefetch_factor", 4, 12),
        ("num_workers", 1, 4),
        ("prefetch_bytes", 1 << 30, 4),
    ):
        setattr(loader, name, value)
        drawn = 0
        iterator = iter(loader)
        assert drawn == 10 * batches
        for _ in range(20):
            next(iterator)
    assert drawn > (20 + 4 + 1) * 10  # prefetch_bytes allows more than prefetch_factor
    loader.prefetch_bytes = drawn = 0
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    assert drawn <= (20 + 4 + 1) * 10


class Variable(Plain):
    """Samples that are an environment variable of their process."""

    def __getitem__(self, index: int) -> Any:
        return os.environ.get("DPEX_TEST_LIFE")


def with_variable(value: str) -> Any:
    return {"runtime_env": {"env_vars": {"DPEX_TEST_LIFE": value}}}


@pytest.mark.only_ray
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_have_the_options_as_they_are_at_iter_unless_they_persist(persistent: bool) -> None:
    options = {"num_workers": 1, "collate_fn": set, "persistent_workers": persistent}
    loader = loader_of(Variable(), worker_options=with_variable("first"), **options)
    first = iter(loader)
    assert next(first) == {"first"}
    loader.worker_options = with_variable("second")
    loader.warm_up()
    second = iter(loader)
    assert next(second) == {"first" if persistent else "second"}
    assert list(first) == [{"first"}] * 19
    loader.close()


def test_set_epoch_between_iter_and_next_draws_again() -> None:
    class Shifted:
        """A sampler whose indices depend on its epoch, like torch's DistributedSampler."""

        epoch = 0

        def __iter__(self) -> Any:
            return iter([(i + self.epoch) % 200 for i in range(60)])

        def __len__(self) -> int:
            return 60

    sampler = Shifted()
    loader = loader_of(Plain(), sampler=sampler)
    iterator = iter(loader)
    sampler.epoch = 7
    assert indices(iterator) == list(range(7, 67))


def test_a_forked_torch_loader_beside_it_works() -> None:
    ours = iter(loader_of(Plain(60)))
    next(ours)
    theirs = DataLoader(Plain(60), batch_size=10, num_workers=2, multiprocessing_context="fork")
    assert indices(theirs) == list(range(60))
    assert indices(ours) == list(range(10, 60))


def test_a_thousand_kept_batches_stay_what_they_were() -> None:
    kept = list(loader_of(Plain(5000), batch_size=5))
    assert len(kept) == 1000
    assert all(
        torch.equal(tensor, torch.full((5, 3), 1.0) * index[:, None]) for tensor, index in kept
    )


def test_an_image_among_large_arrays_leaves_each_its_own_memory() -> None:
    for sample in loader_of(ImageAndArrays(), batch_size=None):
        assert sample == [1.0, 2.0, 3, 4.0]


@pytest.mark.only_ray
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_arrays_are_the_store_s_memory_until_they_are_written_to() -> None:
    loader = loader_of(LargeArray(), batch_size=None)
    for _ in range(2):
        sums, shared = zip(*loader, strict=True)
        assert sums == (float(1 << 16),) * 20  # no change of the last iteration is visible
        assert all(shared)


def test_a_sampler_that_counts_its_epochs_itself_is_drawn_from_once() -> None:
    class Counting:
        epoch = 0

        def __iter__(self) -> Any:
            self.epoch += 1
            return iter([(i + self.epoch) % 200 for i in range(60)])

    sampler, torch_s = Counting(), Counting()
    ours = loader_of(Plain(), sampler=sampler)
    theirs = DataLoader(Plain(), batch_size=10, num_workers=2, sampler=torch_s)
    for _ in range(2):
        assert indices(ours) == indices(theirs)
        assert sampler.epoch == torch_s.epoch


@pytest.mark.only_ray
def test_the_collector_meets_no_call_of_ray_s() -> None:
    """The collector may run while Ray or gRPC hold a lock that such a call needs."""
    loader: Any = loader_of(Plain())
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(iterator)
    loader.cycle = loader, iterator
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and f"{os.sep}ray{os.sep}" in frame.f_code.co_filename:
            called.append(frame.f_code.co_qualname)

    del loader, iterator
    sys.setprofile(note)
    try:
        gc.collect()
    finally:
        sys.setprofile(None)
    assert gone() is None
    assert not called


class Locking(Dataset[int]):
    """Samples of a dataset whose copy holds a lock on a file from its first sample on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None
        self.cycle: Any = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.file = self.path.open()
            self.cycle = self  # only the garbage collector frees the copy
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return index

    def is_free(self) -> bool:
        with self.path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


def test_what_dataset_copies_hold_is_free_after_the_epoch_and_after_close(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    dataset = Locking(path)
    loader = loader_of(dataset)
    for _ in range(3):
        assert [int(index) for batch in loader for index in batch] == list(range(16))
        assert dataset.is_free()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert dataset.is_free()
    with loader_of(dataset, persistent_workers=True) as persistent:
        list(persistent)
        assert not dataset.is_free(), "persistent workers keep their state"
    assert dataset.is_free()
