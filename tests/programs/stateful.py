"""Loaders whose logical workers keep state, as the arguments of torch's ``DataLoader``."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

LENGTH = 60
BATCH_SIZE = 4
SEED = 20_000
_drawn_from: Any = None


def _info() -> Any:
    info = get_worker_info()
    assert info is not None
    return info


class Numbers(Dataset[Any]):
    """Sample i is i."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index


class Counts(Numbers):
    """Sample i is i, and how many samples its dataset copy has read."""

    def __init__(self) -> None:
        self.seen = 0

    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return index, self.seen

    def collate(self, samples: list[Any]) -> Any:
        self.seen += 100
        return samples


class Alone(Numbers):
    """Sample i is i; a mapped file counts the times that two processes were one logical worker."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.processes, self.met = mapped_file()[:16].reshape(2, 8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        worker, process = _info().id, os.getpid()
        self.met[worker] += int(self.processes[worker]) not in {0, process}
        self.processes[worker] = process
        time.sleep(0.002 + index % 5 * 0.001)
        self.met[worker] += int(self.processes[worker]) != process
        self.processes[worker] = 0
        return index


def read_alone(loader: Any) -> list[Any]:
    """Read epochs of ``Alone``, some of them not to the end, and return batches and meetings."""
    read = []
    for most in (1000, 3, 20, 3, 1000):
        batches = iter(loader)
        read.append([batch.tolist() for batch in itertools.islice(batches, most)])
        del batches
    return [read, int(loader.dataset.met.sum())]


class CountsOddBatches(Counts):
    """Sample i is i, and how many samples of odd batches its dataset copy has read."""

    def __getitem__(self, index: int) -> Any:
        if index // BATCH_SIZE % 2:
            self.seen += 1
        return index, self.seen


class SeenBefore(Numbers):
    """Sample i is i, and the last samples that its dataset copy has read, by index modulo 7."""

    def __init__(self) -> None:
        self.cache: dict[int, int] = {}

    def __getitem__(self, index: int) -> Any:
        self.cache[index % 7] = index
        return index, sorted(self.cache.values())


class Owns(Numbers):
    """Sample i is i, and a number from the dataset's own generator."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return index, self.draw()


class SeedsLazily(Numbers):
    """A generator for each logical worker, made when needed, as in numpy's documentation."""

    generator: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.generator is None:
            self.generator = np.random.default_rng(_info().seed)
        return index, self.generator.random()


class Draws(Numbers):
    """Sample i is i, and a number from each of the three global generators."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


class DrawsTwice(Numbers):
    """Sample i is i, and a number from each of two global generators."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())), random.random()


class SaysSeed(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, torch.initial_seed(), _info().seed == torch.initial_seed()


class DrawsFromModule(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, _drawn_from.random()


class Stream(IterableDataset[Any]):
    """A stream that counts its passes, and draws from a generator of ``worker_init_fn``."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        for place in range(10):
            yield _info().id, place, self.passes, float(np.random.rand())


class CountsBatches:
    """A ``collate_fn`` whose image size grows at every third batch of a logical worker."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.batches += 1
        return samples, 320 + 32 * (self.batches // 3)


class SharedCache(Numbers):
    """Sample i is i, and the number that an earlier epoch wrote for it to a mapped file."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __getitem__(self, index: int) -> Any:
        found = int(self.memory[index])
        self.memory[index] = index + 1
        return index, found


def seed_own(_: int) -> None:
    _info().dataset.draw = np.random.default_rng(_info().seed).random


def seed_globals(worker_id: int) -> None:
    """Seed all three global generators, as Lightning's and transformers' functions do."""
    torch.manual_seed(SEED + worker_id)
    np.random.seed(SEED + worker_id)
    random.seed(SEED + worker_id)


def seed_again(_: int) -> None:
    """Seed two generators with the seed that they already have from torch's worker."""
    torch.manual_seed(_info().seed)
    random.seed(_info().seed)


def seed_torch(_: int) -> None:
    torch.manual_seed(SEED)


def seed_numpy(_: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def draw_once(_: int) -> None:
    _info().dataset.draw = functools.partial(_shifted, random.random())


def _shifted(by: float) -> float:
    return by + random.random()


def seed_module(_: int) -> None:
    global _drawn_from
    _drawn_from = random.Random(_info().seed)


def log_start(worker_id: int, *, place: str) -> None:
    with Path(place, f"log{worker_id}").open("a") as log:
        log.write("begun\n")


def fail_in_first(worker_id: int) -> None:
    if worker_id == 0:
        raise ValueError("worker 0 cannot begin")


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "counter of the dataset": lambda: {"dataset": Counts()},
    "counter of odd batches": lambda: {"dataset": CountsOddBatches()},
    "counter of collate_fn": lambda: {"dataset": Numbers(), "collate_fn": CountsBatches()},
    "collate_fn is a method": lambda: _with_method(Counts()),
    "cache of the dataset": lambda: {"dataset": SeenBefore()},
    "numpy generator": lambda: {"dataset": Owns(np.random.default_rng(5).random)},
    "python generator": lambda: {"dataset": Owns(random.Random(5).random)},
    "torch generator": lambda: {"dataset": OwnsTorch()},
    "generator from the worker's seed": lambda: {"dataset": SeedsLazily()},
    "generator from worker_init_fn": lambda: {"dataset": Owns(float), "worker_init_fn": seed_own},
    "worker_init_fn seeds all": lambda: {"dataset": Draws(), "worker_init_fn": seed_globals},
    "worker_init_fn seeds again": lambda: {
        "dataset": DrawsTwice(),
        "worker_init_fn": seed_again,
    },
    "worker_init_fn seeds torch": lambda: {"dataset": SaysSeed(), "worker_init_fn": seed_torch},
    "worker_init_fn draws": lambda: {"dataset": Owns(float), "worker_init_fn": draw_once},
    "worker_init_fn sets a global": lambda: {
        "dataset": DrawsFromModule(),
        "worker_init_fn": seed_module,
    },
    "mapped file": lambda: {"dataset": SharedCache(mapped_file())},
    "stream": lambda: {"dataset": Stream(), "worker_init_fn": seed_numpy},
}
"""Functions that make the arguments of a loader, by kind of state."""


class OwnsTorch(Numbers):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand((), generator=self.generator))


def mapped_file() -> Any:
    """Return an array on a new file, which is removed when this process exits."""
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    return np.memmap(Path(place.name, "numbers"), np.int64, "w+", shape=LENGTH)


def _with_method(dataset: Counts) -> dict[str, Any]:
    return {"dataset": dataset, "collate_fn": dataset.collate}


def epochs(
    kind: str, make: Callable[..., Iterable[Any]] = DataLoader, *, workers: int, persistent: bool
) -> list[Any]:
    """Read two epochs of a loader of one kind.

    Args:
        kind: One of ``KINDS``.
        make: Makes a loader from the arguments of torch's ``DataLoader``.
        workers: The loader's ``num_workers``.
        persistent: The loader's ``persistent_workers``.

    Returns:
        The batches of each epoch.
    """
    arguments = {"collate_fn": list, **KINDS[kind]()}
    loader = make(
        **arguments,
        batch_size=BATCH_SIZE,
        num_workers=workers,
        persistent_workers=persistent,
        generator=torch.Generator().manual_seed(3),
    )
    return [list(loader) for _ in range(2)]
