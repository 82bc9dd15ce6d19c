"""Objects of a process that is connected to Ray, of which its forks must not make use."""

from __future__ import annotations

import os

from dpex.errors import ClusterError

__all__ = ["FORKED", "OwnProcess"]

FORKED = (
    "this process was forked from one connected to Ray, and Ray does not survive a fork: start it "
    "with the 'spawn' or 'forkserver' method instead"
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
