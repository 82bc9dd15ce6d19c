"""The id of this process's job in a Ray that several processes share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from dpex.compat.shortcut import PrivateName, Shortcut, replaced

__all__ = ["JOB_IDS", "chosen_job_id", "new_job_id"]

_NEXT_JOB_ID = PrivateName(
    "ray._private.state:next_job_id",
    "gives a rank's job the id that the rank's fork server has",
    check="the job has another id",
)
_LEAST, _MOST = 1 << 24, (1 << 32) - 1  # the largest number is Ray's id of no job
JOB_IDS = Shortcut(
    "fork the workers of ranks that share a local Ray",
    "Ray starts these workers, and each imports torch itself",
    "ray",
    next_job_id=_NEXT_JOB_ID,
)


def new_job_id() -> str:
    """Return a new id in hexadecimal form, above all ids that Ray counts up from 1."""
    number = _LEAST + int.from_bytes(os.urandom(8), "little") % (_MOST - _LEAST)
    return number.to_bytes(4, "little").hex()


@contextlib.contextmanager
def chosen_job_id(job_id: str) -> Iterator[None]:
    """Make ``ray.init`` give this process's job an id.

    Args:
        job_id: The id, from ``new_job_id``.
    """
    import ray

    with replaced({_NEXT_JOB_ID: lambda: ray.JobID(bytes.fromhex(job_id))}):
        yield
