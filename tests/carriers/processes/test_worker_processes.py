"""Tests of a loader's worker processes: their start, their ends, and what replaces them."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from cluster_programs import environment, run_program, spawn, wait_until, workplace
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from dpex import DpexDataLoader
from dpex.errors import BatchLostError, ClusterError
from dpex.transforms import MappedDataset, Stage

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "processes"}
GONE_SECONDS = 30


def children() -> set[int]:
    """Return the processes that this one has started, without multiprocessing's own."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "resource_tracker" not in command and "multiprocessing.forkserver" not in command:
                found.add(child.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Assert that a test's loaders leave no process and no thread."""
    before = children()
    yield
    gc.collect()
    wait_until(lambda: children() <= before, GONE_SECONDS, "end of the worker processes")
    threads = [thread.name for thread in threading.enumerate()]
    assert "dpex-processes" not in threads


class Squares(Dataset[Any]):
    """Squares, each with the process that computed it."""

    factor = 1

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.factor * index * index, os.getpid()


class Deadly(Squares):
    """Squares, of which one sample kills its process, always or once.

    Args:
        index: The deadly sample.
        mark: File that exists once the sample has killed a process; None to kill each process.
        what: The signal.
    """

    def __init__(self, index: int, mark: Path | None, what: int = signal.SIGKILL) -> None:
        self.index, self.mark, self.what = index, mark, what

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.index and not (self.mark and self.mark.exists()):
            if self.mark:
                self.mark.touch()
            os.kill(os.getpid(), self.what)
        return super().__getitem__(index)


def values(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


EXPECTED = values(DataLoader(Squares(), batch_size=4))


def test_each_logical_worker_has_one_process() -> None:
    loader = DpexDataLoader(Squares(), batch_size=4, num_workers=3, **OURS)
    pids = [set(batch[1].tolist()) for batch in loader]
    for worker in range(3):
        [pid] = set.union(*pids[worker::3])
        assert pid != os.getpid()
    assert len(set.union(*pids)) == 3


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_has_new_processes_unless_they_persist(persistent: bool) -> None:
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": persistent}
    with DpexDataLoader(Squares(), **options, **OURS) as loader:
        first, second = ({p for batch in loader for p in batch[1].tolist()} for _ in range(2))
        assert (first == second) == persistent


def test_ray_is_not_imported() -> None:
    program = """
import sys
from torch.utils.data import TensorDataset
import torch
from dpex import DpexDataLoader
loader = DpexDataLoader(TensorDataset(torch.arange(8)), num_workers=2, distribute_mode=True,
                        head_address="processes")
assert [int(x) for x, in loader] == list(range(8))
loader.warm_up(wait=True)
assert not {"ray", "dpex.carriers.ray.session"} & sys.modules.keys()
print("the end is reached")
"""
    with workplace() as place:
        (place / "program.py").write_text(program)
        said = run_program(place / "program.py", place=place, seconds=60)
        assert "the end is reached" in said.stdout, said.stderr


def test_a_fork_has_none_of_dpex_s_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    at_fork: list[set[str]] = []
    fork = os.fork
    known = {thread.name for thread in threading.enumerate()}

    def noting() -> int:
        at_fork.append({thread.name for thread in threading.enumerate()})
        return fork()

    monkeypatch.setattr(os, "fork", noting)
    loader = DpexDataLoader(Squares(), batch_size=4, num_workers=2, **OURS)
    for _ in range(2):
        assert values(loader) == EXPECTED
    assert len(at_fork) == 2 * 2, "the training process forks as often as torch's"
    assert all(names <= known for names in at_fork)


# --- what dies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_is_replaced(
    tmp_path: Path, what: int, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Deadly(17, tmp_path / "mark", what)
    loader = DpexDataLoader(dataset, batch_size=4, num_workers=2, **OURS)
    batches = list(loader)
    assert values(batches) == EXPECTED
    assert (tmp_path / "mark").exists()
    assert len({p for batch in batches for p in batch[1].tolist()}) == 3
    assert "The process of logical worker 0 has ended" in caplog.text.replace("the p", "The p")


def test_a_replacement_has_what_the_training_process_was_at_iter(tmp_path: Path) -> None:
    dataset = Deadly(33, tmp_path / "mark")
    loader = DpexDataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=1, **OURS)
    iterator = iter(loader)
    batches = [next(iterator)]
    dataset.factor = 100
    lock = threading.Lock()
    lock.acquire()
    waiting = threading.Thread(target=lock.acquire, daemon=True)
    waiting.start()
    batches += iterator
    lock.release()
    waiting.join()
    assert (tmp_path / "mark").exists()
    assert values(batches) == EXPECTED


def forks_replacements() -> psutil.Process:
    """Return the process that forks replacements: the only child of a worker process."""
    [process] = (p for worker in psutil.Process().children() for p in worker.children())
    return process


def test_the_process_that_forks_replacements_ends_with_the_epoch() -> None:
    loader = DpexDataLoader(Squares(), batch_size=4, num_workers=2, **OURS)
    for _ in range(2):
        iterator = iter(loader)
        batches = [next(iterator)]
        process = forks_replacements()
        assert values([*batches, *iterator]) == EXPECTED
        wait_until(
            lambda process=process: not process.is_running(), GONE_SECONDS, "end of the process"
        )


def test_the_loss_of_the_process_that_forks_replacements_is_an_error(tmp_path: Path) -> None:
    dataset = Deadly(33, tmp_path / "mark")
    loader = DpexDataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=1, **OURS)
    iterator = iter(loader)
    assert values([next(iterator)]) == EXPECTED[:1]
    forks_replacements().kill()
    with pytest.raises(BatchLostError, match="SIGKILL, and cannot be replaced"):
        list(iterator)


def test_a_worker_runs_if_the_system_refuses_the_process_that_forks_replacements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, fork = os.getpid(), os.fork

    def refused() -> int:
        if os.getpid() != training:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    monkeypatch.setattr(os, "fork", refused)
    assert values(DpexDataLoader(Squares(), batch_size=4, num_workers=2, **OURS)) == EXPECTED, (
        "it does without"
    )
    loader = DpexDataLoader(Deadly(17, None), batch_size=4, num_workers=2, **OURS)
    with pytest.raises(BatchLostError, match=r"cannot be replaced: .*no more processes"):
        list(loader)


@pytest.mark.parametrize("number", [0, 2])
def test_a_start_that_fails_leaves_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training, fork, forks = os.getpid(), os.fork, itertools.count()

    def refused() -> int:
        if os.getpid() == training and next(forks) == number:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    loader = DpexDataLoader(Squares(), batch_size=4, num_workers=3, **OURS)
    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(BlockingIOError, match="no more processes"):
        iter(loader)
    assert values(loader) == EXPECTED


def test_a_batch_that_kills_each_process_is_named() -> None:
    loader = DpexDataLoader(Deadly(17, None), batch_size=4, num_workers=2, **OURS)
    iterator = iter(loader)
    assert values(next(iterator) for _ in range(4)) == EXPECTED[:4]
    with pytest.raises(BatchLostError, match=r"exited unexpectedly: .* batch 4 .*16, 17, 18, 19"):
        next(iterator)
    assert values(iterator) == EXPECTED[5:]


def test_a_process_that_dies_while_it_is_idle_is_replaced() -> None:
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    with DpexDataLoader(Squares(), **options, **OURS) as loader:
        first = {p for batch in loader for p in batch[1].tolist()}
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not first & children(), GONE_SECONDS, "end of the killed processes")
        batches = list(loader)
        assert values(batches) == EXPECTED
        assert first.isdisjoint(p for batch in batches for p in batch[1].tolist())


class Dies:
    """An object that ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (7,)


def test_processes_that_cannot_start_are_an_error() -> None:
    dataset = Squares()
    dataset.deadly = Dies()  # type: ignore[attr-defined]
    loader = DpexDataLoader(
        dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn", **OURS
    )
    with pytest.raises(BatchLostError, match="exited with status 7"):
        next(iter(loader))


class StartsProcesses(Squares):
    """Squares whose process starts one that outlives it."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 17 and not self.mark.exists():
            child = subprocess.Popen(["sleep", "600"], close_fds=False)
            self.mark.write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

    def __init__(self, mark: Path) -> None:
        self.mark = mark


def test_a_process_may_leave_another_one_that_has_its_descriptors(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    try:
        loader = DpexDataLoader(StartsProcesses(mark), batch_size=4, num_workers=2, **OURS)
        assert values(loader) == EXPECTED
    finally:
        os.kill(int(mark.read_text()), signal.SIGKILL)


# --- ends -----------------------------------------------------------------------------------------


def test_processes_end_with_the_loop() -> None:
    before = children()
    loader = DpexDataLoader(Squares(), batch_size=4, num_workers=2, **OURS)
    for _ in loader:
        break
    assert children() - before
    list(loader)
    del _
    gc.collect()
    wait_until(lambda: children() <= before, GONE_SECONDS, "end of the worker processes")
    assert values(loader) == EXPECTED
    assert children() <= before, "iter() waits for the end of the epoch's processes"


class Slow(Squares):
    def __getitem__(self, index: int) -> tuple[int, int]:
        if index >= 8:
            time.sleep(600)
        return super().__getitem__(index)


def test_close_does_not_wait_for_a_sample_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.tuning.END_S", 0.5)
    loader = DpexDataLoader(Slow(), batch_size=4, num_workers=2, **OURS)
    iterator = iter(loader)
    assert values([next(iterator), next(iterator)]) == EXPECTED[:2]
    loader.close()
    with pytest.raises(BatchLostError, match="the loader was closed"):
        next(iterator)


PARENT = """
import os, sys, time, torch
from torch.utils.data import Dataset
from dpex import DpexDataLoader
class Waits(Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        if index > 20: time.sleep(0.2)
        return os.getpid()
loader = DpexDataLoader(Waits(), batch_size=4, num_workers=3, distribute_mode=True,
                        head_address="processes")
for number, batch in enumerate(loader):
    print(batch[0].item(), flush=True)
    if number == 4: time.sleep(600)
"""


def test_a_killed_training_process_leaves_nothing() -> None:
    with workplace() as place:
        (place / "parent.py").write_text(PARENT)
        process = spawn(
            [sys.executable, "parent.py"], place, env=environment(place), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline()
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 4
        process.kill()
        process.wait()
        process.stdout.close()
        wait_until(
            lambda: not any(p.is_running() and p.status() != "zombie" for p in started),
            GONE_SECONDS,
            "end of the worker processes",
        )


def test_a_fork_of_the_training_process_cannot_use_the_iterator() -> None:
    loader = DpexDataLoader(Squares(), batch_size=4, num_workers=2, **OURS)
    iterator = iter(loader)
    batches = [next(iterator)]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            next(iterator)
        except ClusterError:
            status = 0 if values(loader) == EXPECTED else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert values([*batches, *iterator]) == EXPECTED


# --- what travels ---------------------------------------------------------------------------------


def test_chunks_and_blocks_larger_than_a_pipe() -> None:
    class Large(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: str) -> torch.Tensor:
            return torch.full((100_000,), int(index[-6:]))

    indices = [str(number).zfill(300_000) for number in range(12)]
    loader = DpexDataLoader(Large(), batch_size=2, sampler=indices, num_workers=2, **OURS)
    assert [batch[:, 0].tolist() for batch in loader] == [[n, n + 1] for n in range(0, 12, 2)]


def twice(value: int) -> int:
    return 2 * value


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_start_methods(method: str) -> None:
    dataset = TensorDataset(torch.arange(12))
    options = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": method}
    batches = [batch.tolist() for (batch,) in DpexDataLoader(dataset, **options, **OURS)]
    assert batches == [batch.tolist() for (batch,) in DataLoader(dataset, **options)]


def test_unpicklable_datasets_need_no_pickle() -> None:
    class Locked(Squares):
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.generator = (n for n in range(3))

    assert values(DpexDataLoader(Locked(), batch_size=4, num_workers=2, **OURS)) == EXPECTED


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, 20, info.num_workers))


def test_streams_need_no_pickle() -> None:
    options = {"batch_size": 3, "num_workers": 2}
    ours = [batch.tolist() for batch in DpexDataLoader(Stream(), **options, **OURS)]
    assert ours == [batch.tolist() for batch in DataLoader(Stream(), **options)]


def test_batches_have_the_classes_of_this_process() -> None:
    class Local(NamedTuple):
        index: int

    class Typed(Squares):
        def __getitem__(self, index: int) -> Any:
            return kinds[index % 2](index)

    def keep(samples: list[Any]) -> list[Any]:
        return samples

    script: Any = sys.modules["__main__"]
    loader = DpexDataLoader(Typed(), batch_size=4, num_workers=2, collate_fn=keep, **OURS)
    for epoch in range(2):  # the script's class is redefined, as in a notebook
        script.OfScript = type("OfScript", (int,), {"__module__": "__main__", "epoch": epoch})
        try:
            kinds = [Local, script.OfScript]
            assert {type(sample) for batch in loader for sample in batch} == set(kinds)
        finally:
            del script.OfScript


# --- arguments ------------------------------------------------------------------------------------


def test_what_needs_ray_is_refused() -> None:
    loader = DpexDataLoader(
        Squares(), num_workers=2, worker_options={"resources": {"tape": 1}}, **OURS
    )
    with pytest.raises(ValueError, match=r"cannot meet worker_options\['resources'\]"):
        iter(loader)
    staged = MappedDataset(TensorDataset(torch.arange(4)), Stage(twice, num_gpus=1))
    with pytest.raises(ValueError, match="only Ray assigns"):
        iter(DpexDataLoader(staged, num_workers=2, **OURS))


def test_what_is_ignored_is_told() -> None:
    loader = DpexDataLoader(
        Squares(), batch_size=4, num_workers=2, worker_options={"memory": 1 << 20}, **OURS
    )
    with pytest.warns(UserWarning, match=r"ignore worker_options\['memory'\]"):
        assert values(loader) == EXPECTED


def test_a_late_batch_says_who_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.tuning.END_S", 0.5)
    loader = DpexDataLoader(Slow(), batch_size=4, num_workers=2, timeout=3, **OURS)
    iterator = iter(loader)
    assert values([next(iterator), next(iterator)]) == EXPECTED[:2]
    with pytest.raises(RuntimeError, match="2 of 2 worker processes of this machine"):
        next(iterator)


class DrawsLate(Squares):
    """Samples of which only the later ones draw."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(()) if index >= 10 else torch.zeros(())


def test_a_late_first_draw_does_not_depend_on_the_workers() -> None:
    drawn = []
    for workers in (1, 2, 3):
        generator = torch.Generator().manual_seed(3)
        loader = DpexDataLoader(
            DrawsLate(), batch_size=4, num_workers=workers, generator=generator, **OURS
        )
        drawn.append(torch.cat(list(loader)))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert len(set(drawn[0].tolist())) > 2


OF_SCRIPT = """
import threading
from dpex import DpexDataLoader

lock = threading.Lock()  # no pickle can have it


class Pair:
    def __init__(self, sample):
        with lock:
            self.sample = sample


def collate(samples):
    return Pair(samples[0])


if __name__ == "__main__":
    loader = DpexDataLoader(range(4), num_workers=2, collate_fn=collate, distribute_mode=True)
    pairs = list(loader)
    assert {type(pair) for pair in pairs} == {Pair}
    print([pair.sample for pair in pairs])
"""


@pytest.mark.multiprocess
def test_classes_of_the_script_need_no_pickle_of_their_code() -> None:
    with workplace() as place:
        (place / "program.py").write_text(OF_SCRIPT)
        said = run_program(place / "program.py", place=place, seconds=60)
    assert (said.returncode, said.stdout) == (0, "[0, 1, 2, 3]\n"), said.stderr


END_WHILE_UNPICKLING = """
import threading
import time
from dpex import DpexDataLoader

unpickles = threading.Event()


class Slow:
    def __setstate__(self, state):
        unpickles.set()
        time.sleep(4)  # longer than an end waits for anything else
        print("unpickled", flush=True)

    def __getstate__(self):
        return {"state": 1}


def collate(samples):
    return Slow() if samples[0] else samples


if __name__ == "__main__":
    loader = DpexDataLoader(range(6), num_workers=1, collate_fn=collate, distribute_mode=True)
    batches = iter(loader)
    next(batches)
    unpickles.wait()
"""


@pytest.mark.multiprocess
def test_an_exit_waits_for_the_batch_that_is_being_unpickled_and_for_no_other() -> None:
    with workplace() as place:
        (place / "program.py").write_text(END_WHILE_UNPICKLING)
        said = run_program(place / "program.py", place=place, seconds=60)
    assert (said.returncode, said.stdout) == (0, "unpickled\n"), said.stderr
