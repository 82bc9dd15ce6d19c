"""The job that a fork of the training process has inherited with its memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpex import tuning
from dpex.wire.memory_map import address_of, memory_in

if TYPE_CHECKING:
    from dpex.wire.pickling import Pickled
    from dpex.worker.map_style import Job

__all__ = ["Bequest", "inheritance", "inherited_job", "with_size"]


@dataclass
class Bequest:
    """A job that the forks of the training process inherit, with its memory copied on write.

    Attributes:
        pickled: The pickled job. Its buffers are the training process's memory.
        job: The job itself, for the first copy that a fork needs of it; None after that.
    """

    pickled: Pickled
    job: Any


inheritance: dict[str, Bequest] = {}
"""In a fork of the training process: the job that was pickled for the fork, by its digest."""

# For each inherited job: the copy that uses the inherited memory itself.
_borrowers: dict[str, weakref.ref[Job]] = {}


def inherited_job(job_key: str) -> Any | None:
    """Return a copy of a job in the memory that this process has inherited.

    Args:
        job_key: Digest of the job.

    Returns:
        The copy. None if this process has not inherited the job, or if a copy that uses its memory
        exists or has changed it.
    """
    inherited = inheritance.get(job_key)
    if inherited is None:
        return None
    borrower = _borrowers.get(job_key)
    # Invariant: at most one live copy uses the inherited memory. A later copy may use it only if
    # the earlier ones left its contents unchanged.
    if borrower is not None and (borrower() is not None or inherited.pickled.digest != job_key):
        return None
    copy = with_size(_borrow(inherited), inherited.pickled)
    _borrowers[job_key] = weakref.ref(copy)
    return copy


def _borrow(inherited: Bequest) -> Any:
    """Return a copy of a job in the memory that this process inherited."""
    from dpex.wire.pickling import load, own_copy  # loads torch, which the actor does not need

    shared = memory_in(lambda span: span.shared)
    pickled = inherited.pickled
    # A write to a shared mapping would reach the file or other processes. So dpex copies such
    # memory now.
    exposed = {
        id(buffer)
        for buffer in pickled.buffers
        if buffer.flags.writeable and shared(address_of(buffer), buffer.nbytes)
    }
    job, inherited.job = inherited.job, None
    # A small job is unpickled, because dpex compares its pickle after batches. Nothing compares a
    # large one, whose objects take as much time and memory again.
    large = len(pickled.head) > tuning.WATCHED_PICKLE_BYTES
    if large and pickled.plain and not exposed and job is not None:
        return job
    return load(pickled, lambda buffer: own_copy(buffer) if id(buffer) in exposed else buffer)


def with_size(job: Any, pickled: Pickled) -> Any:
    """Return a job with the sizes of its pickle, if it is a ``Job``."""
    if hasattr(job, "pickled_bytes"):
        return replace(job, pickled_bytes=(len(pickled.head), pickled.size_bytes))
    return job
