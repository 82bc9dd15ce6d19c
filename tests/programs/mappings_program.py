"""A program for tests of shared memory: datasets on mapped files and on shared memory.

Usage: mappings_program.py processes
       mappings_program.py cluster HOST:PORT FILE
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import sys
import warnings
from typing import Any

import datasets
import numpy as np
import torch
from cluster_programs.output import take_stdout
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader

LENGTH = 8
EPOCHS = 3


class Shared(Dataset[Any]):
    """Samples that read an epoch from shared memory, count reads, and are written in epoch 0."""

    def __init__(self) -> None:
        self.epoch = multiprocessing.Value("i", 0)
        self.flag = torch.tensor(0).share_memory_()
        self.counts = multiprocessing.Array(ctypes.c_long, LENGTH)
        self.total = multiprocessing.Value("i", 0)
        memory = multiprocessing.RawArray(ctypes.c_float, LENGTH)
        self.array = np.frombuffer(memory, np.float32)
        self.tensor = torch.zeros(LENGTH, 3).share_memory_()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        epoch = self.epoch.value
        if epoch == 0:
            self.array[index] = index + 1
            self.tensor[index] = index + 1
        self.counts[index] += 1
        with self.total.get_lock():
            self.total.value += 1
        row = torch.from_numpy(self.array[index : index + 1])
        return epoch, int(self.flag), self.counts[index], row, self.tensor[index]


def epochs_of(loader: Any, dataset: Shared) -> Any:
    seen = []
    for epoch in range(EPOCHS):
        dataset.epoch.value = epoch
        dataset.flag.fill_(epoch)
        seen.append([[column.tolist() for column in batch] for batch in loader])
    return [seen, dataset.total.value, list(dataset.counts), dataset.tensor.tolist()]


def stream() -> Any:
    rows = datasets.Dataset.from_dict({"x": list(range(12))})
    shuffled = rows.to_iterable_dataset(num_shards=4).shuffle(seed=7, buffer_size=3)
    return shuffled.with_format("torch")


def orders_of(loader: Any) -> Any:
    orders = []
    for epoch in range(EPOCHS):
        loader.dataset.set_epoch(epoch)
        orders.append([batch["x"].tolist() for batch in loader])
    return orders


def run_shared(make_loader: Any) -> Any:
    """Read datasets that exist before the process's first iteration, and later ones."""
    results = []
    for persistent in (False, True):
        options = {"batch_size": 2, "num_workers": 2, "persistent_workers": persistent}
        dataset = Shared()
        results.append(epochs_of(make_loader(dataset, **options), dataset))
        results.append(orders_of(make_loader(stream(), **options)))
    return results


def ours(dataset: Any, **options: Any) -> Any:
    return DpexDataLoader(dataset, distribute_mode=True, head_address="processes", **options)


def run_local() -> Any:
    torchs = run_shared(lambda dataset, **options: DataLoader(dataset, **options))
    return [torchs, run_shared(ours)]


class Rows(Dataset[Any]):
    """A dataset of an array's rows."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + 0


def outcome(dataset: Any, address: str, **options: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loader: Any = DpexDataLoader(
                dataset,
                2,
                num_workers=2,
                distribute_mode=True,
                head_address=address,
                **options,
            )
            first = next(iter(loader))
            loader.close()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    told = [str(warning.message) for warning in caught if "shares with" in str(warning.message)]
    return [first["x" if isinstance(first, dict) else slice(None)].tolist(), told]


def run_cluster(address: str, file: str) -> Any:
    rows = np.memmap(file, np.int64, "r").reshape(LENGTH, -1)
    fixed = np.frombuffer(multiprocessing.RawArray(ctypes.c_long, LENGTH), np.int64)
    fixed.flags.writeable = False
    return {
        "mapped": outcome(Rows(rows[:, :2]), address),
        "tensor": outcome(Rows(torch.zeros(LENGTH).share_memory_()), address),
        "fixed": outcome(Rows(fixed), address),
        "stream": outcome(stream(), address),
        "persistent stream": outcome(stream(), address, persistent_workers=True),
    }


def main() -> None:
    replies = take_stdout()
    kind, *arguments = sys.argv[1:]
    report = run_cluster(*arguments) if kind == "cluster" else run_local()
    print(json.dumps(report), file=replies)


if __name__ == "__main__":
    main()
