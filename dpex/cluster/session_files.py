"""Delete the session directories of local Rays whose processes have ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from dpex.cluster.embedded import hold

__all__ = ["delete_ended", "mark_alive"]

_LOCK = "dpex.lock"
# Ray makes the directory a moment before dpex can lock it.
_MOST_START_S = 3600.0


def mark_alive(session: Path) -> None:
    """Hold a lock in a session's directory until this process has ended, however it ends.

    Args:
        session: The directory.
    """
    descriptor = os.open(session / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    hold(descriptor)


def delete_ended(sessions: Path) -> None:
    """Delete the directories that no living process has marked.

    Args:
        sessions: Directory that has those of the local Rays of this user, and no others.
    """
    for session in sessions.glob("session_2*"):
        if not _is_alive(session):
            shutil.rmtree(session, ignore_errors=True)


def _is_alive(session: Path) -> bool:
    try:
        descriptor = os.open(session / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its Ray is about to start, or has failed to
        return time.time() - session.stat().st_mtime < _MOST_START_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
