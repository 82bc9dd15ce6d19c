"""A program for ``test_forkserver.py``: a training process that runs the given scenarios."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cluster_programs.on_ray import on_ray
from cluster_programs.output import take_stdout

from dpex import DpexDataLoader


class Tells:
    """Sample i is i, the pids of worker process, parent and training process, and a check.

    Only a fork of the training process knows the training process's pid. The check is whether the
    worker process has the script's arguments.
    """

    def __init__(self) -> None:
        self.arguments = sys.argv

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        own = sys.argv == self.arguments
        return index, os.getpid(), os.getppid(), getattr(sys, "of_the_training_process", 0), own


def loader_of(**arguments: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(
        Tells(),
        batch_size=8,
        num_workers=2,
        distribute_mode=True,
        head_address="local",
        **arguments,
    )


def read(loader: DpexDataLoader[Any]) -> tuple[set[int], set[int], bool]:
    """Read an epoch; return the pids of workers and parents, and whether workers are forks."""
    columns = [torch.cat(parts).tolist() for parts in zip(*on_ray(loader), strict=True)]
    assert columns[0] == list(range(80))
    return set(columns[1]), set(columns[2]), set(columns[3]) == {os.getpid()}


def ended(pid: int) -> bool:
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/stat").open() as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_for_the_end(pids: set[int]) -> None:
    deadline = time.monotonic() + 30
    while not all(map(ended, pids)):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


def forked() -> Any:
    _, parents, forks = read(loader_of())
    return [forks, len(parents)]


class Counts:
    """Samples that change their dataset, in memory that a fork inherits."""

    def __init__(self) -> None:
        self.counts = np.zeros((8, 1 << 18))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.counts += 1
        return float(self.counts[index, index])


def fresh_copies() -> Any:
    """Iterate twice over a changing dataset, without and with a ``worker_init_fn``."""
    seen = []
    for init in (None, int):
        loader: DpexDataLoader[Any] = DpexDataLoader(
            Counts(),
            num_workers=2,
            distribute_mode=True,
            head_address="local",
            worker_init_fn=init,
        )
        for _ in range(2):
            epoch = [float(batch) for batch in on_ray(loader)]
            seen.append(sorted(epoch))
    return seen


class Objects:
    """Samples that tell whether the rows are the training process's own objects.

    A fork has them at the same address.
    """

    state = "live"

    def __init__(self, rows: int) -> None:
        self.rows = [(0, str(row)) for row in range(rows)]
        self.address = id(self.rows)
        self.seen = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return id(self.rows) == self.address, self.seen, self.rows[5][0], self.state


class ReducedObjects(Objects):
    """The same, with a ``__getstate__`` of its own."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "state": "pickled"}


def objects_of(dataset: Objects) -> Any:
    """Read three epochs with one worker; the dataset changes before the last."""
    loader: DpexDataLoader[Any] = DpexDataLoader(
        dataset, batch_size=None, num_workers=1, distribute_mode=True, head_address="local"
    )
    seen = []
    for epoch in range(3):
        if epoch == 2:
            dataset.rows[5] = (7, "")
        *_, last = on_ray(loader)
        seen.append(dict(zip(("own", "seen", "value", "state"), last, strict=True)))
    return seen


def own_objects() -> Any:
    return objects_of(Objects(500_000))


def reduced_objects() -> Any:
    return objects_of(ReducedObjects(500_000))


def small_objects() -> Any:
    return objects_of(Objects(1_000))


def random_ids() -> Any:
    """Return how many object ids the worker processes draw, and how many of them differ."""
    import ray

    drawn = list(DpexDataLoader(Draws(), num_workers=2, distribute_mode=True, batch_size=None))
    assert ray.is_initialized()
    return [len(drawn), len(set(drawn))]


class Draws:
    """Samples that are random object ids of Ray."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        import ray

        return ray.ObjectID.from_random().hex()


class Shares:
    """Samples that write to memory that the training process shares with its children."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(1 << 16).share_memory_()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.numbers[index] += 1
        return index


def shared_memory() -> Any:
    dataset = Shares()
    loader: DpexDataLoader[Any] = DpexDataLoader(
        dataset, num_workers=2, distribute_mode=True, head_address="local"
    )
    return [sorted(int(batch) for batch in on_ray(loader)), float(dataset.numbers.sum())]


def groups() -> Any:
    """Return whether worker processes share the group of the server or the training process."""
    loader = DpexDataLoader(Groups(), num_workers=2, distribute_mode=True, batch_size=None)
    told = on_ray(loader)
    return sorted({(own == server, own == training) for own, server, training in told})


class Groups:
    """Samples that are the process groups of worker process, server and training process."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return os.getpgid(0), os.getpgid(os.getppid()), os.getpgid(sys.of_the_training_process)  # type: ignore[attr-defined]


def spawned_beside_forked() -> Any:
    return [read(loader_of())[2], read(loader_of(multiprocessing_context="spawn"))[2]]


def spawned() -> Any:
    return from_new_server(multiprocessing_context="spawn")


def with_ray_loaded() -> Any:
    import ray

    assert ray.__version__
    return from_new_server()


def from_new_server(**arguments: Any) -> Any:
    """Return the name of the fork server, which must be a new process, not a fork of this one."""
    loader = loader_of(**arguments)
    _, [parent], forks = read(loader)
    assert not forks
    assert all(own.all() for *_, own in loader)
    return Path(f"/proc/{parent}/comm").read_text().strip()


def after_shutdown() -> Any:
    loader = loader_of()
    workers, _, first = read(loader)
    import ray

    ray.shutdown()
    wait_for_the_end(workers)
    others, _, second = read(loader)
    return [first, second, bool(workers & others)]


class Environment:
    """Samples are whether the worker process is a fork, and two variables of the environment."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        is_fork = getattr(sys, "of_the_training_process", 0) == self.training_pid
        return is_fork, os.environ["RANK"], os.environ["OWN"]

    training_pid = os.getpid()


def rank() -> Any:
    """Return what workers of a rank know, before and after the rank has left the shared Ray."""
    dataset = Environment()
    dataset.training_pid = os.getpid()
    os.environ["OWN"] = f"of rank {os.environ['RANK']}"
    loader: DpexDataLoader[Any] = DpexDataLoader(
        dataset, batch_size=None, num_workers=2, distribute_mode=True, head_address="local"
    )
    first = sorted({tuple(sample) for sample in on_ray(loader)})
    if os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1":
        return [first, first]  # Ray keeps no token beyond its shutdown
    import ray

    ray.shutdown()
    return [first, sorted({tuple(sample) for sample in loader})]


def no_fork_of_a_rank() -> Any:
    os.fork = refuse_once(os.fork)
    return rank()


def without_server() -> Any:
    loader = loader_of()
    workers, parents, first = read(loader)
    os.kill(*parents, signal.SIGKILL)
    wait_for_the_end(workers | parents)
    return [first, read(loader)[2]]


def forks_that_fail() -> Any:
    """Simulate forks that cannot run Ray's worker program, though the server has agreed to fork."""
    from dpex.cluster.local import forkserver

    def fail(program: Path) -> None:
        raise FileNotFoundError(program)

    forkserver._run = fail
    return read(loader_of())[2]


def no_fork() -> Any:
    """Simulate a kernel that does not overcommit memory: the first fork fails."""
    os.fork = refuse_once(os.fork)
    return read(loader_of())[2]


def refuse_once(fork: Callable[[], int]) -> Callable[[], int]:
    def refuse() -> int:
        os.fork = fork
        raise OSError("Cannot allocate memory")

    return refuse


def a_server_that_never_answers() -> Any:
    """Simulate a server that never answers, for example because an import never ends."""
    from dpex.cluster.local import forkserver

    def load_for_ever(_: Any, parents_life: int, *__: str) -> None:
        forkserver._leave_training_process()
        forkserver._end_with(parents_life)
        while True:
            signal.pause()

    forkserver._serve = load_for_ever
    return read(loader_of())[2]


def no_worker_program() -> Any:
    """Simulate worker processes that all end as soon as Ray starts them."""
    from dpex.cluster.local import forked_worker

    forked_worker.__file__ += ".gone"
    return read(loader_of())[2]


def killed() -> Any:
    loader = loader_of(persistent_workers=True)
    result = read(loader)[2]
    print(json.dumps([result]), file=replies)
    time.sleep(1000)


if __name__ == "__main__":
    sys.of_the_training_process = os.getpid()  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork")  # not the default since Python 3.14
    replies = take_stdout()
    print(json.dumps([globals()[scenario]() for scenario in sys.argv[1:]]), file=replies)
