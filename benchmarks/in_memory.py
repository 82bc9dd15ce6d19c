"""Datasets that lie in memory, and what a loader over one makes of it; ``memory`` runs it."""

import os
import time
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from benchmarks.fresh import own_processes
from benchmarks.harness import make_loader

ROW_FLOATS = 32_768
ROW_BYTES = 4 * ROW_FLOATS
SAMPLES = 8_192
BATCH_SIZE = 32
# Samples that wait keep every worker of eight on two cores at work.
SLEEP_S = 0.002
MAX_EPOCHS = 8
MORE_EPOCHS = 2

Sample = tuple[Any, int]


class InMemory(Dataset[Sample]):
    """Some rows, read in turn; with each comes the number of the process that read it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        time.sleep(SLEEP_S)
        return self.read(index), os.getpid()

    def read(self, index: int) -> Any:
        """Return what ``default_collate`` can stack."""
        raise NotImplementedError


class ArrayRows(InMemory):
    """One numpy array.

    Args:
        rows: How many.
    """

    def __init__(self, rows: int) -> None:
        self.rows = np.ones((rows, ROW_FLOATS), dtype=np.float32)

    def read(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class TensorRows(InMemory):
    """One tensor.

    Args:
        rows: How many.
    """

    def __init__(self, rows: int) -> None:
        self.rows = torch.ones(rows, ROW_FLOATS)

    def read(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class ArrowRows(InMemory):
    """One Arrow table.

    Args:
        rows: How many.
    """

    def __init__(self, rows: int) -> None:
        floats = pa.array(np.ones(rows * ROW_FLOATS, dtype=np.float32))
        self.table = pa.table({"row": pa.FixedSizeListArray.from_arrays(floats, ROW_FLOATS)})

    def read(self, index: int) -> Any:
        row = self.table["row"][index % len(self.table)]
        return row.values.to_numpy().copy()  # Arrow's own memory is read-only


class ObjectRows(InMemory):
    """A list of Python objects, as of the paths and labels of many files.

    Args:
        rows: How many.
    """

    def __init__(self, rows: int) -> None:
        self.rows = [(f"train/{row % 1_000:04d}/{row:08d}.jpg", row % 1_000) for row in range(rows)]

    def read(self, index: int) -> Any:
        # Rows that lie far apart, so that they lie in different pages.
        path, label = self.rows[index * (len(self.rows) // SAMPLES) % len(self.rows)]
        return len(path) + label


KINDS: dict[str, type[ArrayRows | TensorRows | ArrowRows | ObjectRows]] = {
    "array": ArrayRows,
    "tensor": TensorRows,
    "arrow": ArrowRows,
    "objects": ObjectRows,
}


def measure(kind: str, rows: int, peer: str, workers: int) -> dict[str, Any]:
    """Read a dataset until every worker has delivered, and weigh all processes.

    Args:
        kind: One of ``KINDS``.
        rows: How many the dataset has.
        peer: As ``make_loader`` takes it.
        workers: Number of workers.

    Returns:
        ``epochs`` that it took, ``readers`` (worker processes that delivered), the memory of all
        ``processes``, and with dpex ``stored_bytes``, what Ray's object store holds then and
        after ``MORE_EPOCHS``.
    """
    torch.set_num_threads(1)
    loader = make_loader(peer, KINDS[kind](rows), batch_size=BATCH_SIZE, num_workers=workers)
    readers: set[int] = set()
    epochs = 0
    while len(readers) < workers and epochs < MAX_EPOCHS:
        for _, pids in loader:
            readers.update(pids.tolist())
        epochs += 1
    weights = [weigh(process, readers) for process in own_processes()]
    stored_bytes = []
    if peer == "dpex":
        stored_bytes.append(object_store_bytes())
        for _ in range(MORE_EPOCHS):
            for _ in loader:
                pass
        stored_bytes.append(object_store_bytes())
    return {
        "epochs": epochs,
        "readers": len(readers),
        "processes": weights,
        "stored_bytes": stored_bytes,
    }


def object_store_bytes() -> float:
    """Return what this process's Ray holds in its object store."""
    import ray

    name = "object_store_memory"
    total, free = ray.cluster_resources(), ray.available_resources()
    return float(total[name] - free[name])


def weigh(process: Any, readers: set[int]) -> dict[str, Any]:
    """Return what a process is and how much memory is its own."""
    memory = process.memory_full_info()
    role = "trainer" if process.pid == os.getpid() else "other"
    return {
        "role": "worker" if process.pid in readers else role,
        "name": process.name(),
        "pss_bytes": memory.pss,
        "uss_bytes": memory.uss,
    }
