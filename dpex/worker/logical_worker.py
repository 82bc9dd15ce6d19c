"""State of a worker process that torch and the user's code expect in a DataLoader worker.

The state is module-level on purpose: torch and the user's code look for it where torch's worker
processes keep it.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpex import tuning
from dpex.compat.torch_names import WorkerInfo, numpy_seed, set_worker_info
from dpex.protocol.chunks import Run
from dpex.worker.seeding import WorkerGenerators

__all__ = [
    "Cancelled",
    "initialise",
    "leave_worker",
    "settle_process",
    "show_worker",
]

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_initial_seed: int | None = None


class Cancelled(BaseException):
    """Signal that nothing waits for the batch any more."""


def settle_process(run: Run) -> None:
    """Apply the run's settings, and set up this process like a worker that torch forked."""
    if run.settings is not None:
        run.settings.take_over()
    if torch.initial_seed is not _worker_initial_seed:
        torch.set_num_threads(1)
        _keep_freed_memory()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.initial_seed = torch.random.initial_seed = _worker_initial_seed


def _keep_freed_memory() -> None:
    """Make the C library keep the memory that a batch frees, for the next batch.

    By default, glibc returns every large block to the kernel, which maps it again page by page.
    For a batch of 38 MB, the page faults take ten times as long as filling it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, tuning.MALLOC_KEEPS_BYTES)
        mallopt(_M_TRIM_THRESHOLD, tuning.MALLOC_KEEPS_BYTES)


_process_initial_seed = torch.initial_seed


def _worker_initial_seed() -> int:
    """Return the logical worker's seed, as torch's workers see it.

    dpex reseeds torch's generator for every sample. torch's function would return that seed.
    """
    return _initial_seed if _initial_seed is not None else _process_initial_seed()


def show_worker(worker_id: int, run: Run, dataset: Any, *, owns_generator: bool = False) -> None:
    """Set ``get_worker_info()`` and ``torch.initial_seed()`` for a logical worker.

    Args:
        worker_id: Number of the logical worker.
        run: The iteration.
        dataset: The logical worker's copy of the dataset.
        owns_generator: Whether torch's generator belongs to the logical worker. If it does,
            ``initial_seed`` returns the seed that ``worker_init_fn`` gave the generator.
    """
    global _initial_seed
    seed = run.base_seed + worker_id
    _initial_seed = None if owns_generator else seed
    set_worker_info(
        WorkerInfo(id=worker_id, num_workers=run.num_workers, seed=seed, dataset=dataset)
    )


def initialise(
    worker_id: int,
    base_seed: int,
    worker_init_fn: Callable[[int], None] | None,
    generators: WorkerGenerators,
) -> None:
    """Seed the global generators as torch's worker does, then call ``worker_init_fn``.

    Args:
        worker_id: Number of the logical worker.
        base_seed: The number that torch draws to seed its workers.
        worker_init_fn: The loader's ``worker_init_fn``.
        generators: Takes over the generators that ``worker_init_fn`` seeds or draws from.
    """
    global _initial_seed
    seed = base_seed + worker_id
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(numpy_seed(base_seed, worker_id))
    if worker_init_fn is not None:
        _initial_seed = None  # worker_init_fn may seed torch's generator and read that seed
        with generators.taken():
            worker_init_fn(worker_id)


def leave_worker() -> None:
    """Reset ``get_worker_info()`` and ``torch.initial_seed()`` after ``show_worker``."""
    global _initial_seed
    _initial_seed = None
    set_worker_info(None)
