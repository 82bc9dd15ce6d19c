"""A directory for each local Ray, closed to other users: its token and its session."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
from pathlib import Path

from dpex.cluster.local.process_end import hold
from dpex.errors import ClusterError

__all__ = ["delete_ended", "make_directory", "runtime_directory"]

_LOCK = "lock"
_NEW = "new-"
# A socket's path has 107 characters at the most. Ray adds some 70, and the directory's number 4.
_MOST_CHARACTERS = 33


def runtime_directory() -> Path:
    """A directory of this user alone, with a name short enough for the sockets of a Ray in it.

    Raises:
        ClusterError: There is one by its name that others can access.
    """
    directory = Path(tempfile.gettempdir(), f"dpex-{os.getuid()}")
    if len(str(directory)) > _MOST_CHARACTERS:
        directory = Path("/tmp", directory.name)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
        raise ClusterError(f"{directory} must be a directory that only this user can access")
    return directory


def make_directory() -> Path:
    """Make the directory of a local Ray of this process.

    Invariant: its lock is held until this process ends, however it ends. The directory has the lock
    before it has its number, so one with a number and without a lock is left over.

    Returns:
        A directory with a number as its name.

    Raises:
        ClusterError: As for ``runtime_directory``.
        OSError: It cannot be made.
    """
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=runtime_directory()))
    descriptor = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    hold(descriptor)
    for number in itertools.count():
        directory = new.with_name(str(number))
        try:
            return new.rename(directory)
        except OSError:
            if not directory.exists():
                raise
    raise AssertionError  # not reached


def delete_ended() -> None:
    """Delete the directories of this user's local Rays whose processes have ended."""
    for directory in runtime_directory().iterdir():
        if directory.name.isdecimal() and not _is_alive(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _is_alive(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
