"""A program for ``test_cache.py``: other processes that use a cache.

Usage: cache_program.py read DIRECTORY VERSION | write DIRECTORY | check DIRECTORY |
    grow DIRECTORY | train DIRECTORY | epochs | hold
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cluster_programs.output import take_stdout

from dpex import DpexDataLoader
from dpex.datasets import cached
from dpex.datasets.node_memory import job_directory
from dpex.datasets.sample_store import SampleStore, open_store
from dpex.wire.pickling import dump

OWNER = b"o" * 16


class Arrays:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return np.full(60_000, index, dtype=np.uint8)


def content(index: int) -> Any:
    return np.random.default_rng(index).bytes(2_000 + 37 * index)


def read(directory: str, version: str) -> None:
    """Read all samples; print the numbers of hits and misses."""
    dataset = cached(Arrays(), at=directory, version=version)
    for index in range(30):
        assert (dataset[index] == index).all()
    print(dataset.info().hits, dataset.info().misses)


def write(directory: str) -> None:
    """Store samples until this process is killed."""
    store = SampleStore(Path(directory), 1 << 30)
    print("ready", flush=True)
    while True:
        for index in range(2_000):
            store.put(OWNER, index, dump(content(index), "sample"))


def check(directory: str) -> None:
    """Compare all samples; print how many are in the store, and how many of them are wrong."""
    store = SampleStore(Path(directory), 1 << 30)
    found = [(index, store.get(OWNER, index)) for index in range(2_000)]
    there = [(index, value) for index, (is_there, value) in found if is_there]
    assert store.size()[0] == len(there), "a sample that is there cannot be read"
    print(len(there), sum(value != content(index) for index, value in there))


def grow(directory: str) -> None:
    """Store more samples than the limit of another process allows."""
    store = SampleStore(Path(directory), 1 << 30)
    for index in range(2_000):
        store.put(OWNER, index, dump(bytes(100_000), "sample"))


def train(directory: str) -> None:
    """Read an epoch with worker processes."""
    dataset = cached(Arrays(), at=directory)
    loader: Any = DpexDataLoader(
        dataset, 10, num_workers=2, distribute_mode=True, head_address="local"
    )
    assert [len(batch) for batch in loader] == [10, 10, 10]


def epochs() -> None:
    """Read a sample here, and two epochs with worker processes; print the epochs' lengths.

    Ray starts before the cache exists.
    """
    replies = take_stdout()
    options: Any = {"num_workers": 2, "distribute_mode": True, "head_address": "local"}
    list(DpexDataLoader(Arrays(), 10, **options))
    dataset = cached(Arrays())
    dataset[0]
    loader: Any = DpexDataLoader(dataset, 10, **options)
    for _ in range(2):
        print(sum(len(batch) for batch in loader), file=replies)


def hold() -> None:
    """Open a job's cache in memory, and keep it open."""
    directory = job_directory("cache", "held")
    open_store(directory, 1 << 20)
    print(directory, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
