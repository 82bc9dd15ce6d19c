"""The copies of datasets that a worker process keeps, each as long as its pipeline.

A Ray worker process keeps this module over all tasks that it runs, so copies live here and never in
a task's closure.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
"""Loader, generation, and logical worker, or ``SHARED``."""

SHARED = -1
"""In a slot: whatever logical worker it is, as long as none changes the copy."""

_copies: dict[Slot, Copy[Any]] = {}
# Of the copies: a thread of its own releases them, at any time.
_lock = threading.RLock()
_pipeline = ""


@dataclass
class Copy(Generic[JobT]):
    """This process's copy of what a loader sent.

    Attributes:
        job: The copy itself.
        pipeline: The pipeline that the process keeps it for.
        habits: Which generators its samples draw from.
        generators: The global generators that belong to its logical worker.
        watch: Looks whether batches change it, where that matters.
        initialised: Whether ``worker_init_fn`` has been called for it.
        init_error: What ``worker_init_fn`` raised.
        init_traceback: Its traceback at that time, which grows with every ``raise``.
        restarted: Whether its logical worker was bound to another task before.
        stream: The stream that its logical worker reads in this epoch, if any.
    """

    job: JobT
    pipeline: str
    habits: Habits
    generators: WorkerGenerators = field(default_factory=WorkerGenerators)
    watch: StateWatch | None = None
    initialised: bool = False
    init_error: BaseException | None = None
    init_traceback: TracebackType | None = None
    restarted: bool = False
    stream: Any = None


@contextlib.contextmanager
def kept_for(pipeline: str) -> Iterator[None]:
    """Keep the copies that the block uses until ``release_copies`` names their pipeline."""
    global _pipeline
    outer, _pipeline = _pipeline, pipeline
    try:
        yield
    finally:
        _pipeline = outer


def copy_of(slot: Slot, read_job: Callable[[], JobT]) -> Copy[JobT]:
    """Return this process's copy in a slot, made on first use.

    A pipeline serves one iteration at a time. Those of its copies that belong to an earlier one go
    before a new copy is made.

    Args:
        slot: The loader, the generation and the logical worker that the copy belongs to.
        read_job: Makes one more copy, which nobody else has.
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
            # OpenCV's own pool would start a thread per core in every worker.
            sys.modules["cv2"].setNumThreads(0)
    keep_copy(slot, copy)
    return copy


def find_copy(slot: Slot) -> Copy[Any] | None:
    """Return this process's copy in a slot, if there is one."""
    return _copies.get(slot)


def keep_copy(slot: Slot, copy: Copy[Any]) -> None:
    """Put a copy into a slot, and into no other, for the pipeline at work."""
    with _lock:
        if _copies.get(slot) is not copy:
            for other in [k for k, c in _copies.items() if c is copy]:
                del _copies[other]
            _copies[slot] = copy
        copy.pipeline = _pipeline


def hand_over(slot: Slot, *, watched: bool = False) -> None:
    """Give an empty slot a copy of the same iteration that no batch has changed, if there is one.

    Args:
        slot: ``SHARED``, or a logical worker's.
        watched: Whether a logical worker may get another one's; else it gets none but the shared.
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
    """Drop the copy in a slot, so that the next one there is a new one."""
    with _lock:
        _copies.pop(slot, None)


def release_copies(pipeline: str) -> None:
    """Drop the copies that this process keeps for a pipeline."""
    with _lock:
        for slot, copy in list(_copies.items()):
            if copy.pipeline == pipeline:
                del _copies[slot]
