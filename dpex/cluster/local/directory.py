"""Directories of the local Rays, closed to other users: each holds a token and a session."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from dpex.cluster.local.process_end import hold
from dpex.errors import ClusterError

__all__ = ["delete_ended", "make_directory", "runtime_directory"]

_LOCK = "lock"
_NUMBERS_LOCK = "numbers.lock"
_ENDED = "ended-"
# A socket's path has at most 107 characters. Ray adds about 70, and the directory's number adds 4.
_MOST_CHARACTERS = 33


def runtime_directory() -> Path:
    """Return a directory that only this user can access, short enough for Ray's socket paths.

    Raises:
        ClusterError: The path is no directory of this user, or other users can access it.
    """
    directory = Path(tempfile.gettempdir(), f"dpex-{os.getuid()}")
    if len(str(directory)) > _MOST_CHARACTERS:
        directory = Path("/tmp", directory.name)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
        raise ClusterError(
            f"{directory} must be a directory that you own and that no other user can access, "
            f"because it holds the token of a local Ray. Run `chmod 700 {directory}`, or set "
            "TMPDIR to another directory"
        )
    return directory


def make_directory() -> Path:
    """Create the directory of a local Ray that this process starts.

    Invariant: this process holds the directory's lock until it ends, however it ends. A directory
    gets its lock while ``_claiming`` keeps others away, so one without a lock is stale.

    Returns:
        A directory with a number as its name.

    Raises:
        ClusterError: As for ``runtime_directory``.
        OSError: The directory cannot be created.
    """
    with _claiming() as runtime:
        names = {path.name for path in runtime.iterdir()}
        number = next(str(n) for n in itertools.count() if str(n) not in names)
        directory = runtime / number
        directory.mkdir(mode=0o700)
        descriptor = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        hold(descriptor)
        return directory


def delete_ended() -> None:
    """Delete the directories of this user's local Rays whose owner processes have ended."""
    with _claiming() as runtime:
        # Their names are free from now on, so others need not wait for the deletion.
        for directory in runtime.iterdir():
            if directory.name.isdecimal() and not _is_alive(directory):
                with contextlib.suppress(OSError):  # the system has deleted old files
                    directory.rename(runtime / f"{_ENDED}{uuid.uuid4().hex}")
    for directory in runtime.glob(f"{_ENDED}*"):
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _claiming() -> Iterator[Path]:
    """Keep other processes from creating and renaming directories, and yield their parent."""
    runtime = runtime_directory()
    with (runtime / _NUMBERS_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield runtime
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for a fork that another thread has made


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
