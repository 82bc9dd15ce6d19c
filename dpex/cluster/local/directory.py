"""Directories of the local Rays, closed to other users: each holds a token and a session."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from dpex.errors import ClusterError
from dpex.private_directory import NotPrivate, check_way, make_private

__all__ = ["delete_ended", "make_directory", "runtime_directory"]

_LOCK = "lock"
_NUMBERS_LOCK = "numbers.lock"
_ENDED = "ended-"
_VARIABLE = "RAY_TMPDIR"
_SYSTEMS = Path("/tmp")
# Most bytes in the path of a Unix socket, and the longest path that Ray and dpex append.
_SOCKET_PATH = 107 if sys.platform.startswith("linux") else 103
_RAYS_PART = "/999/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def runtime_directory() -> Path:
    """Return the directory for the files and sockets of this user's local Rays.

    Only this user can access and replace it, and its path has no symbolic links. It is in
    RAY_TMPDIR, if that is set. Otherwise it is in TMPDIR, or in ``/tmp`` if TMPDIR has a long path
    or if other users can replace it.

    Raises:
        ClusterError: Other users can access or replace the directory, or RAY_TMPDIR is too long.
        OSError: The directory cannot be created.
    """
    name = f"dpex-{os.getuid()}"
    chosen = os.environ.get(_VARIABLE)
    base = Path(chosen or tempfile.gettempdir())
    size = len(os.fsencode(base.resolve()))
    most = _SOCKET_PATH - len(f"/{name}{_RAYS_PART}")
    if chosen and size > most:
        raise ClusterError(
            f"a local Ray did not start, because {_VARIABLE}={chosen!r} has {size} bytes. The path "
            f"of a Unix socket has at most {_SOCKET_PATH} bytes, so Ray and dpex have space for "
            f"{most}. Set a shorter {_VARIABLE}"
        )
    if not chosen and (size > most or not _is_safe(base / name)):
        base = _SYSTEMS
    try:
        return make_private(base / name, sticky=base != _SYSTEMS)
    except NotPrivate as error:
        raise ClusterError(
            "a local Ray did not start, because its token must be in a private directory. "
            f"{error} with {_VARIABLE if chosen else 'TMPDIR'}"
        ) from error


def _is_safe(directory: Path) -> bool:
    try:
        check_way(directory, sticky=True)
    except OSError:
        return False
    return True


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
        return directory  # nothing closes the descriptor but the end of this process


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
