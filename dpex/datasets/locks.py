"""Locks between the threads of a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable

__all__ = ["lock_for"]

_locks: dict[Hashable, threading.RLock] = {}
# A fork has no other threads, and so none that could release a lock of its parent.
os.register_at_fork(after_in_child=_locks.clear)


def lock_for(key: Hashable) -> threading.RLock:
    """Return the lock of this process for a key.

    Each dataset has a separate lock. A dataset's code may wait for threads that read another one,
    so a common lock could deadlock.
    """
    return _locks.setdefault(key, threading.RLock())
