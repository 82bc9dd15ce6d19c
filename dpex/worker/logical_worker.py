"""A worker process: what it must be for the user's code to find what torch's workers offer.

Module-level state on purpose: torch and the user's code look for it where torch's workers have it.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpex.compat.torch_names import ExceptionWrapper, WorkerInfo, numpy_seed, set_worker_info
from dpex.errors import SerializationError
from dpex.wire.pickling import dump
from dpex.worker.seeding import WorkerGenerators
from dpex.worker.training_settings import Settings

if TYPE_CHECKING:
    from dpex.wire.pickling import Pickled

__all__ = [
    "At",
    "Cancelled",
    "Run",
    "initialise",
    "leave_worker",
    "settle_process",
    "show_worker",
    "wrap_error",
]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 29

_initial_seed: int | None = None


@dataclass(frozen=True)
class Run:
    """One iteration over a loader: what all its chunks have in common.

    Attributes:
        key: Identity of the iteration.
        loader: Identity of the loader.
        base_seed: What torch draws for its workers' seeds.
        epoch: How many iterations with this base_seed came before.
        num_workers: Number of logical workers; batch k belongs to worker k mod num_workers.
        generation: Which copy of the dataset it reads: a new one for every iteration unless
            workers are persistent.
        settings: The training process's, which the workers take over.
    """

    key: str
    loader: str
    base_seed: int
    epoch: int
    num_workers: int
    generation: int
    settings: Settings


class Cancelled(BaseException):
    """The consumer has gone."""


def settle_process(run: Run) -> None:
    """Make this process like one that torch would have forked: on one thread, in its place."""
    run.settings.take_over()
    if torch.initial_seed is not _worker_initial_seed:
        torch.set_num_threads(1)
        _keep_freed_memory()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.initial_seed = torch.random.initial_seed = _worker_initial_seed


def _keep_freed_memory() -> None:
    """Have the C library keep what a batch frees for the next batch.

    It would give every large block back to the kernel and fault it in again page by page, which
    for a batch of 38 MB takes ten times as long as filling it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


_process_initial_seed = torch.initial_seed


def _worker_initial_seed() -> int:
    """Return the logical worker's seed, as torch's workers see it.

    dpex seeds the generator itself again for every sample, which would show here.
    """
    return _initial_seed if _initial_seed is not None else _process_initial_seed()


def show_worker(worker_id: int, run: Run, dataset: Any, *, owns_generator: bool = False) -> None:
    """Set what torch and the user's code see of a logical worker.

    Args:
        worker_id: Which one.
        run: The iteration.
        dataset: Its copy.
        owns_generator: Whether torch's generator is the worker's own, so that ``initial_seed`` is
            what its ``worker_init_fn`` seeded it with.
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
        worker_id: Which logical worker.
        base_seed: What torch draws for its workers' seeds.
        worker_init_fn: The loader's.
        generators: Takes those that ``worker_init_fn`` seeds or draws from.
    """
    global _initial_seed
    seed = base_seed + worker_id
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(numpy_seed(base_seed, worker_id))
    if worker_init_fn is not None:
        _initial_seed = None  # it may seed torch's generator, and ask for its seed then
        with generators.taken():
            worker_init_fn(worker_id)


def leave_worker() -> None:
    """Be no logical worker any more."""
    global _initial_seed
    _initial_seed = None
    set_worker_info(None)


class At:
    """The index or indices at work, for error messages."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        """Note what is at work now."""
        self.name = name
        self.value = value

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{self.name} {text if len(text) <= 200 else text[:200] + ' …'}"


def wrap_error(where: str) -> Pickled:
    """Pickle the exception being handled as torch wraps it, with the place it came from."""
    kind, error, traceback = sys.exc_info()
    assert kind is not None
    if isinstance(error, SystemExit):
        kind, error = RuntimeError, RuntimeError(f"the dataset called sys.exit({error.code!r})")
    wrapper = ExceptionWrapper((kind, error, traceback), where=where)
    try:
        return dump(wrapper, "error")
    except SerializationError:
        wrapper.exc_type = RuntimeError
        return dump(wrapper, "error")
