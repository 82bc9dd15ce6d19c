"""The Ray job of this process, and its objects, which its forks must not use."""

from __future__ import annotations

import os

from dpex.errors import ClusterError

__all__ = ["FORKED", "OwnProcess", "ray_job"]

FORKED = (
    "this process was forked from one connected to Ray, and Ray does not survive a fork: start it "
    "with the 'spawn' or 'forkserver' method instead, or run the loader's workers without Ray: "
    "head_address='processes'"
)
"""Message of the error for a fork of a process that is connected to Ray."""


class OwnProcess:
    """Base class of objects that only the process can use that created them."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that created the object."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Check that this process created the object.

        Raises:
            ClusterError: It is a fork of that process.
        """
        if self.forked:
            raise ClusterError(FORKED)


def ray_job() -> tuple[str, str]:
    """Return the address of the cluster that this process is connected to, and its job's ID."""
    import ray

    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())
