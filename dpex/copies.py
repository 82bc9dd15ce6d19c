"""The copies of datasets that a worker process keeps, each as long as its pipeline.

A Ray worker process keeps this module over all tasks that it runs, so copies live here and never in
a task's closure.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dpex.seeding import Habits, WorkerGenerators

if TYPE_CHECKING:
    from dpex.binding import StateWatch

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
        restarted: Whether another process had this logical worker before.
        stream: What its logical worker reads in this epoch, of an ``IterableDataset``.
    """

    job: JobT
    pipeline: str
    habits: Habits
    generators: WorkerGenerators = field(default_factory=WorkerGenerators)
    watch: StateWatch | None = None
    initialised: bool = False
    init_error: Exception | None = None
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
        slot: Whose it is.
        read_job: Makes one more copy, which nobody else has.
    """
    copy = _copies.get(slot)
    if copy is None:
        habits = next((c.habits for k, c in _copies.items() if k[0] == slot[0]), None)
        for stale, other in list(_copies.items()):
            if stale[0] == slot[0] and stale[1] != slot[1] and other.pipeline == _pipeline:
                del _copies[stale]
        copy = _copies[slot] = Copy(read_job(), _pipeline, habits or Habits())
        if "cv2" in sys.modules:
            # OpenCV's own pool would start a thread per core in every worker.
            sys.modules["cv2"].setNumThreads(0)
    copy.pipeline = _pipeline
    return copy


def find_copy(slot: Slot) -> Copy[Any] | None:
    """Return this process's copy in a slot, if there is one."""
    return _copies.get(slot)


def keep_copy(slot: Slot, copy: Copy[Any]) -> None:
    """Put a copy into a slot, and into no other."""
    for other in [k for k, c in _copies.items() if c is copy]:
        del _copies[other]
    _copies[slot] = copy


def hand_over(slot: Slot) -> None:
    """Give an empty slot a copy of the same iteration that no batch has changed, if there is one.

    Args:
        slot: ``SHARED``, or a logical worker's; the latter gets none but the shared copy.
    """
    if slot in _copies:
        return
    for other, copy in _copies.items():
        may_go = other[:2] == slot[:2] and SHARED in (slot[2], other[2])
        if may_go and copy.watch is not None and copy.watch.seen_unchanged:
            keep_copy(slot, copy)
            return


def forget_copy(slot: Slot) -> None:
    """Drop the copy in a slot, so that the next one there is a new one."""
    _copies.pop(slot, None)


def release_copies(pipeline: str) -> None:
    """Drop the copies that this process keeps for a pipeline."""
    for slot, copy in list(_copies.items()):
        if copy.pipeline == pipeline:
            _copies.pop(slot, None)
