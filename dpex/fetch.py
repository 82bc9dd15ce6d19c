"""A worker process: what torch's worker loop does, one chunk at a time.

Module-level state on purpose: a Ray worker process imports this module once and keeps it over
all tasks it runs, so dataset copies live here, and never in a task's closure.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate

from dpex.errors import SerializationError
from dpex.frame import Entry
from dpex.pickling import Pickled, dump
from dpex.seeding import Habits, sample_seed, seed_generators, stream_key

__all__ = ["Chunk", "Job", "Run", "fetch_chunk"]

# Copies of datasets that a process keeps: a training and a validation loader, each with an
# iteration that ends while the next begins, and as many to spare.
_MAX_COPIES = 8
# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 29

_copies: OrderedDict[tuple[str, int, int], _Copy] = OrderedDict()
_initial_seed: int | None = None


@dataclass(frozen=True)
class Job:
    """What every worker of a loader needs; pickled once, while its bytes stay the same.

    Attributes:
        dataset: The map-style dataset.
        collate_fn: Makes a batch from a list of samples.
        worker_init_fn: Called with the worker id before a logical worker's first sample.
        num_workers: Number of logical workers.
        auto_collation: Whether indices come in lists (torch's automatic batching).
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    auto_collation: bool


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
        oldest_generation: The oldest one that an open iterator of the loader still reads.
        copy_per_worker: Whether logical workers of one process have a copy each, because
            worker_init_fn may make them differ.
        working_directory: The training process's; the workers', where they have it.
        default_dtype: The training process's, and the workers'.
    """

    key: str
    loader: str
    base_seed: int
    epoch: int
    num_workers: int
    generation: int
    oldest_generation: int
    copy_per_worker: bool
    working_directory: str
    default_dtype: torch.dtype


@dataclass(frozen=True)
class Chunk:
    """Several consecutive batches, made by one task.

    Attributes:
        run: The iteration that it belongs to.
        number: Its number in the iteration.
        first_batch: Number of its first batch in the epoch.
        batches: The indices of each batch, as the sampler gave them.
        positions: Place in the epoch of each batch's first sample.
        patient: Whether so much is under way before it that its batches may come together.
    """

    run: Run
    number: int
    first_batch: int
    batches: Sequence[Any]
    positions: Sequence[int]
    patient: bool = False


@dataclass
class _Copy:
    job: Job
    habits: Habits
    initialised: bool = False


def fetch_chunk(
    chunk: Chunk,
    read_job: Callable[[], Job],
    where: str,
    cancelled: Callable[[], bool],
) -> Iterator[tuple[Entry, float, float]]:
    """Make the batches of one chunk.

    Args:
        chunk: What to make.
        read_job: Makes one more copy of the ``Job``, which nobody else has.
        where: Node and process, for error messages.
        cancelled: Asked between samples; once it says so, nothing more is made.

    Yields:
        The batch, or the error in its place; its wall seconds; its processor seconds.
    """
    _settle_process(chunk.run)
    key = stream_key(chunk.run.base_seed, chunk.run.epoch)
    for place, indices in enumerate(chunk.batches):
        batch = chunk.first_batch + place
        worker_id = batch % chunk.run.num_workers
        started, cpu_started = time.perf_counter(), time.process_time()
        at = _At("indices", indices)
        try:
            copy = _enter_worker(worker_id, chunk.run, read_job)
            value = _fetch(copy, indices, key, chunk.positions[place], cancelled, at)
            entry = Entry(batch, dump(value, "batch"), failed=False)
        except _Cancelled:
            return
        except (Exception, SystemExit):
            place_of_error = f"dataset {at}, batch {batch}, {where}"
            error = _wrap_error(f"in DataLoader worker process {worker_id} ({place_of_error})")
            entry = Entry(batch, error, failed=True)
        finally:
            _leave_worker()
        yield entry, time.perf_counter() - started, time.process_time() - cpu_started
        if cancelled():
            return


class _Cancelled(Exception):
    """The consumer has gone."""


def _copy_of(slot: tuple[str, int, int], read_job: Callable[[], Job], oldest: int) -> _Copy:
    """Return this process's copy of a dataset, made on first use."""
    copy = _copies.get(slot)
    if copy is None:
        habits = next((c.habits for k, c in _copies.items() if k[0] == slot[0]), None)
        for stale in [k for k in _copies if k[0] == slot[0] and k[1] < oldest]:
            del _copies[stale]
        copy = _copies[slot] = _Copy(read_job(), habits or Habits())
        most_workers = max(c.job.num_workers for c in _copies.values())
        while len(_copies) > max(_MAX_COPIES, 2 * most_workers):
            _copies.popitem(last=False)
        if "cv2" in sys.modules:
            # OpenCV's own pool would start a thread per core in every worker.
            sys.modules["cv2"].setNumThreads(0)
    _copies.move_to_end(slot)
    return copy


def _settle_process(run: Run) -> None:
    """Make this process like one that torch would have forked: on one thread, in its place."""
    if torch.get_default_dtype() is not run.default_dtype:
        torch.set_default_dtype(run.default_dtype)
    with contextlib.suppress(OSError):  # a node without that directory
        os.chdir(run.working_directory)
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

    The generator itself is seeded anew for every sample, which would show here.
    """
    return _initial_seed if _initial_seed is not None else _process_initial_seed()


def _enter_worker(worker_id: int, run: Run, read_job: Callable[[], Job]) -> _Copy:
    """Be a logical worker, as far as torch and the user's code can see."""
    global _initial_seed
    slot = (run.loader, run.generation, worker_id if run.copy_per_worker else -1)
    copy = _copy_of(slot, read_job, run.oldest_generation)
    job = copy.job
    _initial_seed = seed = run.base_seed + worker_id
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=run.num_workers, seed=seed, dataset=job.dataset
    )
    if not copy.initialised:
        if job.worker_init_fn is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(torch_worker._generate_state(run.base_seed, worker_id))
            job.worker_init_fn(worker_id)
        copy.initialised = True
    return copy


def _leave_worker() -> None:
    global _initial_seed
    _initial_seed = None
    torch_worker._worker_info = None


def _fetch(
    copy: _Copy,
    indices: Any,
    key: int,
    position: int,
    cancelled: Callable[[], bool],
    at: _At,
) -> Any:
    """Do what torch's ``_MapDatasetFetcher.fetch`` does, each sample seeded.

    Args:
        copy: Dataset and collate_fn.
        indices: One batch of indices; a single index without automatic batching.
        key: Key of the epoch's seeds.
        position: Place of the first sample in the epoch.
        cancelled: Asked between samples.
        at: Kept at the index being read, for error messages.
    """
    job, dataset = copy.job, copy.job.dataset
    if not job.auto_collation:
        at.set("index", indices)
        seed_generators(sample_seed(key, position))
        return job.collate_fn(dataset[indices])
    if getattr(dataset, "__getitems__", None):
        seed_generators(sample_seed(key, position))
        return _collate(job, dataset.__getitems__(indices), at, indices)
    indices = list(indices)  # they may be read twice
    habits = copy.habits
    while True:
        habits.begin(sample_seed(key, position))
        at.set("index", None)
        samples = []
        try:
            for place, index in enumerate(indices):
                at.value = index
                if place and habits.need_seeds:
                    habits.seed(sample_seed(key, position + place))
                samples.append(dataset[index])
                if cancelled():
                    raise _Cancelled
            batch = _collate(job, samples, at, indices)
        except _Cancelled:
            raise
        except Exception:
            if habits.end_of_batch():
                raise
        else:
            if habits.end_of_batch():
                return batch


def _collate(job: Job, samples: Any, at: _At, indices: Any) -> Any:
    at.set("indices", indices)
    info = torch_worker._worker_info
    try:
        if job.collate_fn is default_collate:
            # In a worker, default_collate would build the batch in a shared memory file.
            torch_worker._worker_info = None
        return job.collate_fn(samples)
    finally:
        torch_worker._worker_info = info


class _At:
    """The index or indices at work, for error messages."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{self.name} {text if len(text) <= 200 else text[:200] + ' …'}"


def _wrap_error(where: str) -> Pickled:
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
