"""Datasets that lie in memory, and the memory that a loader over one takes.

``memory`` and ``worker_init`` measure it.
"""

import os
import time
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset, get_worker_info

from benchmarks.fresh import own_processes
from benchmarks.harness import make_loader

ROW_FLOATS = 32_768
ROW_BYTES = 4 * ROW_FLOATS
SAMPLES = 8_192
BATCH_SIZE = 32
# Samples that wait keep every worker of eight on two cores at work.
SLEEP_S = 0.002
FEATURES = 4_096
MAX_EPOCHS = 8
MORE_EPOCHS = 2

Sample = tuple[Any, int]


class InMemory(Dataset[Sample]):
    """Some rows, read in turn; with each comes the number of the process that read it."""

    samples = SAMPLES
    sleep_s = SLEEP_S

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.sleep_s)
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


class SeededTexts(InMemory):
    """A list of strings, and a random generator that belongs to the dataset.

    Args:
        rows: How many strings.
        samples: Length of an epoch.
        sleep_s: Time that a sample waits, beside its processor time.
    """

    def __init__(self, rows: int, samples: int = SAMPLES, sleep_s: float = SLEEP_S) -> None:
        self.rows = [f"train/{row % 1_000:04d}/{row:08d}.jpg" for row in range(rows)]
        self.samples = samples
        self.sleep_s = sleep_s
        self.generator = np.random.default_rng(0)

    def read(self, index: int) -> Any:
        text = self.rows[index * (len(self.rows) // self.samples) % len(self.rows)]
        codes = np.frombuffer(text.encode(), dtype=np.uint8)
        features = self.generator.standard_normal(FEATURES, dtype=np.float32)
        features[: len(codes)] += codes
        return features


def seed_dataset(worker_id: int) -> None:
    """Seed the generator of the worker's dataset; a ``worker_init_fn``."""
    info: Any = get_worker_info()
    info.dataset.generator = np.random.default_rng(info.seed)


KINDS: dict[str, type[ArrayRows | TensorRows | ArrowRows | ObjectRows | SeededTexts]] = {
    "array": ArrayRows,
    "tensor": TensorRows,
    "arrow": ArrowRows,
    "objects": ObjectRows,
    "texts": SeededTexts,
}


def measure(
    kind: str, rows: int, peer: str, workers: int, worker_init: bool = False
) -> dict[str, Any]:
    """Read a dataset until every worker has delivered, and weigh all processes.

    Args:
        kind: One of ``KINDS``.
        rows: How many the dataset has.
        peer: As ``make_loader`` takes it.
        workers: Number of workers.
        worker_init: Whether the loader has :func:`seed_dataset`; ``kind`` must be ``"texts"``.

    Returns:
        ``epochs`` that it took, ``readers`` (worker processes that delivered), the memory of all
        ``processes``, and of all ``processes_later``, after ``MORE_EPOCHS``; with dpex also
        ``stored_bytes``, what Ray's object store holds at both moments.
    """
    torch.set_num_threads(1)
    loader = make_loader(
        peer,
        KINDS[kind](rows),
        batch_size=BATCH_SIZE,
        num_workers=workers,
        worker_init_fn=seed_dataset if worker_init else None,
    )
    readers: set[int] = set()
    epochs = 0
    while len(readers) < workers and epochs < MAX_EPOCHS:
        for _, pids in loader:
            readers.update(pids.tolist())
        epochs += 1
    weights = [weigh(process, readers) for process in own_processes()]
    stored_bytes = [object_store_bytes()] if peer == "dpex" else []
    for _ in range(MORE_EPOCHS):
        for _ in loader:
            pass
    weights_later = [weigh(process, readers) for process in own_processes()]
    if peer == "dpex":
        stored_bytes.append(object_store_bytes())
    return {
        "epochs": epochs,
        "readers": len(readers),
        "processes": weights,
        "processes_later": weights_later,
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
