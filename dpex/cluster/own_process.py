"""Objects of this process that its forks cannot use."""

from __future__ import annotations

import os

from dpex.errors import ClusterError

__all__ = ["OwnProcess"]


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
            raise ClusterError(
                "this process is a fork of the one that began the iteration, and the worker "
                "processes send their batches there. Call iter(loader) in this process"
            )
