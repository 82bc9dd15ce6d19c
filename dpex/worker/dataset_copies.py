"""The dataset copies that a worker process keeps, each for as long as its pipeline exists.

A Ray worker process keeps this module across all tasks that it runs. So this module holds the
copies, and no closure of a task does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dpex.protocol.chunks import ALL_ITERATIONS
from dpex.worker.seeding import Habits, WorkerGenerators

if TYPE_CHECKING:
    from dpex.worker.state_watch import StateWatch

__all__ = [
    "Copy",
    "SHARED",
    "Slot",
    "copy_of",
    "find_copy",
    "forget_copy",
    "hand_over",
    "keep_copy",
    "kept_for",
    "release_copies",
]

JobT = TypeVar("JobT")

Slot = tuple[str, int, int]
"""Loader, dataset version, and logical worker or ``SHARED``."""

SHARED = -1
"""Stands for all logical workers in a slot; they share its copy until one of them changes it."""

_copies: dict[Slot, Copy[Any]] = {}
# Guards `_copies`: another thread may release copies at any time.
_lock = threading.RLock()
_pipeline = ""
_iteration = ALL_ITERATIONS


@dataclass
class Copy(Generic[JobT]):
    """This process's copy of a loader's job.

    Attributes:
        job: The copy itself.
        pipeline: The pipeline for which the process keeps the copy.
        iteration: Number of the last iteration that used the copy, or ``ALL_ITERATIONS``.
        habits: The generators that its samples draw from.
        generators: The global generators that belong to its logical worker.
        watch: Detects whether batches change the copy; None if this does not matter.
        initialised: Whether ``worker_init_fn``, if any, has been called for the copy.
        init_error: The error that ``worker_init_fn`` raised.
        init_traceback: The traceback of that error when it was raised. Every further ``raise``
            would extend it.
        restarted: Whether its logical worker was bound to another task before.
        stream: The stream that its logical worker reads in this epoch, if any.
    """

    job: JobT
    pipeline: str
    habits: Habits
    iteration: int = ALL_ITERATIONS
    generators: WorkerGenerators = field(default_factory=WorkerGenerators)
    watch: StateWatch | None = None
    initialised: bool = False
    init_error: BaseException | None = None
    init_traceback: TracebackType | None = None
    restarted: bool = False
    stream: Any = None


@contextlib.contextmanager
def kept_for(pipeline: str, iteration: int = ALL_ITERATIONS) -> Iterator[None]:
    """Keep the copies that the block uses until ``release_copies`` is called for ``pipeline``.

    Args:
        pipeline: The pipeline.
        iteration: Number of the iteration that the block works for, or ``ALL_ITERATIONS``.
    """
    global _pipeline, _iteration
    outer, (_pipeline, _iteration) = (_pipeline, _iteration), (pipeline, iteration)
    try:
        yield
    finally:
        _pipeline, _iteration = outer


def copy_of(slot: Slot, read_job: Callable[[], JobT]) -> Copy[JobT]:
    """Return this process's copy in a slot, created on first use.

    A pipeline serves one iteration at a time. So before the function creates a copy, it drops the
    pipeline's copies of the loader's other dataset versions.

    Args:
        slot: The loader, dataset version and logical worker of the copy.
        read_job: Function that returns a new copy, which nothing else uses.
    """
    copy = _copies.get(slot)
    if copy is None:
        with _lock:
            habits = next((c.habits for k, c in _copies.items() if k[0] == slot[0]), None)
            for stale in [k for k, c in _copies.items() if k[0] == slot[0] and k[1] != slot[1]]:
                if _copies[stale].pipeline == _pipeline:
                    del _copies[stale]
        copy = Copy(read_job(), _pipeline, habits or Habits())
        if "cv2" in sys.modules:
            # OpenCV's thread pool would start one thread per core in every worker process.
            sys.modules["cv2"].setNumThreads(0)
    keep_copy(slot, copy)
    return copy


def find_copy(slot: Slot) -> Copy[Any] | None:
    """Return this process's copy in a slot, or None."""
    return _copies.get(slot)


def keep_copy(slot: Slot, copy: Copy[Any]) -> None:
    """Move a copy into a slot, out of any other slot, and keep it for the current pipeline."""
    with _lock:
        if _copies.get(slot) is not copy:
            for other in [k for k, c in _copies.items() if c is copy]:
                del _copies[other]
            _copies[slot] = copy
        copy.pipeline, copy.iteration = _pipeline, _iteration


def hand_over(slot: Slot, *, watched: bool = False) -> None:
    """Move an unchanged copy of the same dataset version into an empty slot, if there is one.

    Args:
        slot: The slot of a logical worker, or a ``SHARED`` slot.
        watched: Whether a logical worker may take the copy of another logical worker; if not, it
            may take only the shared copy.
    """
    if slot in _copies:
        return
    with _lock:
        found = [
            copy
            for other, copy in _copies.items()
            if other[:2] == slot[:2] and (watched or SHARED in (slot[2], other[2]))
        ]
    for copy in found:
        if copy.watch is not None and copy.watch.look():
            keep_copy(slot, copy)
            return


def forget_copy(slot: Slot) -> None:
    """Drop the copy in a slot, so that ``copy_of`` creates a new one."""
    with _lock:
        _copies.pop(slot, None)


def release_copies(pipeline: str, ended: int = ALL_ITERATIONS) -> bool:
    """Drop the copies that this process keeps for iterations of a pipeline.

    Args:
        pipeline: The pipeline.
        ended: Number of the last iteration whose copies are dropped.

    Returns:
        Whether there were copies to drop.
    """
    with _lock:
        dropped = [
            slot
            for slot, copy in _copies.items()
            if copy.pipeline == pipeline and copy.iteration <= ended
        ]
        for slot in dropped:
            del _copies[slot]
    return bool(dropped)
