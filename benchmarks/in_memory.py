"""Datasets in memory, and a measurement of the memory that a loader of such a dataset uses.

The benchmarks ``memory`` and ``worker_init`` use them.
"""

import os
import time
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset, get_worker_info

from benchmarks.addresses import address_of
from benchmarks.fresh import own_processes
from benchmarks.harness import make_loader

ROW_FLOATS = 32_768
ROW_BYTES = 4 * ROW_FLOATS
SAMPLES = 8_192
BATCH_SIZE = 32
# Samples wait, so that each of eight workers gets samples even on two cores.
SLEEP_S = 0.002
FEATURES = 4_096
MAX_EPOCHS = 8
MORE_EPOCHS = 2
# Role of the process that runs the training loop.
TRAINING_PROCESS = "training process"

Sample = tuple[Any, int]


class InMemory(Dataset[Sample]):
    """Rows that are read in turn; a sample also has the pid of the process that read it."""

    samples = SAMPLES
    sleep_s = SLEEP_S

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.sleep_s)
        return self.read(index), os.getpid()

    def read(self, index: int) -> Any:
        """Return a value that ``default_collate`` can stack."""
        raise NotImplementedError


class ArrayRows(InMemory):
    """Rows of one numpy array.

    Args:
        rows: Number of rows.
    """

    def __init__(self, rows: int) -> None:
        self.rows = np.ones((rows, ROW_FLOATS), dtype=np.float32)

    def read(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class TensorRows(InMemory):
    """Rows of one tensor.

    Args:
        rows: Number of rows.
    """

    def __init__(self, rows: int) -> None:
        self.rows = torch.ones(rows, ROW_FLOATS)

    def read(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class ArrowRows(InMemory):
    """Rows of one Arrow table.

    Args:
        rows: Number of rows.
    """

    def __init__(self, rows: int) -> None:
        floats = pa.array(np.ones(rows * ROW_FLOATS, dtype=np.float32))
        self.table = pa.table({"row": pa.FixedSizeListArray.from_arrays(floats, ROW_FLOATS)})

    def read(self, index: int) -> Any:
        row = self.table["row"][index % len(self.table)]
        return row.values.to_numpy().copy()  # Arrow's own memory is read-only


class ObjectRows(InMemory):
    """A list of Python objects, like the paths and labels of many files.

    Args:
        rows: Number of rows.
    """

    def __init__(self, rows: int) -> None:
        self.rows = [(f"train/{row % 1_000:04d}/{row:08d}.jpg", row % 1_000) for row in range(rows)]

    def read(self, index: int) -> Any:
        # These rows are far apart, so that they are in different pages.
        path, label = self.rows[index * (len(self.rows) // SAMPLES) % len(self.rows)]
        return len(path) + label


class SeededTexts(InMemory):
    """A list of strings, and a random generator that belongs to the dataset.

    Args:
        rows: Number of strings.
        samples: Number of samples in an epoch.
        sleep_s: Time that a sample waits, in addition to its processor time.
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
    """Read a dataset until every worker has delivered, and measure the memory of all processes.

    Args:
        kind: One of ``KINDS``.
        rows: Number of rows of the dataset.
        peer: A peer of ``make_loader``.
        workers: Number of workers.
        worker_init: Whether the loader has :func:`seed_dataset`; if so, ``kind`` is ``"texts"``.

    Returns:
        The number of ``epochs``, and ``readers``, the number of worker processes that delivered.
        ``processes`` has the memory of each process, and ``processes_later`` the same
        ``MORE_EPOCHS`` epochs later. With a peer on Ray, ``stored_bytes`` has the size of the
        objects in Ray's object store at both times.
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
    on_ray = peer in {"dpex", "local"} and address_of(peer) == "local"
    stored_bytes = [object_store_bytes()] if on_ray else []
    for _ in range(MORE_EPOCHS):
        for _ in loader:
            pass
    weights_later = [weigh(process, readers) for process in own_processes()]
    if on_ray:
        stored_bytes.append(object_store_bytes())
    return {
        "epochs": epochs,
        "readers": len(readers),
        "processes": weights,
        "processes_later": weights_later,
        "stored_bytes": stored_bytes,
    }


def object_store_bytes() -> float:
    """Return the size of the objects in the object store of this process's Ray."""
    import ray

    name = "object_store_memory"
    total, free = ray.cluster_resources(), ray.available_resources()
    return float(total[name] - free[name])


def weigh(process: Any, readers: set[int]) -> dict[str, Any]:
    """Return role, name and memory of a process."""
    memory = process.memory_full_info()
    role = TRAINING_PROCESS if process.pid == os.getpid() else "other"
    return {
        "role": "worker" if process.pid in readers else role,
        "name": process.name(),
        "pss_bytes": memory.pss,
        "uss_bytes": memory.uss,
    }
