"""A job's directories in a node's memory, which its processes share and which go with the job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import xxhash

__all__ = [
    "claim",
    "forget",
    "job_directory",
    "job_name",
    "make_private",
    "memory",
    "one_at_a_time",
]

_PROCESS = uuid.uuid4().hex
_IN_USE = "in-use"
# How long the memory of a job that ends is waited for, that its workers let go of it.
_LET_GO_S = 3.0

_swept: set[tuple[int, Path]] = set()
_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def job_name() -> str:
    """Name what shares memory on a node: the ranks of one job, or this process alone.

    Returns:
        32 hexadecimal digits.
    """
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    ranks = " ".join(filter(None, map(os.environ.get, names)))
    # Always the same object, as a pickle of two that are equal is not that of one.
    return sys.intern(xxhash.xxh3_128_hexdigest(ranks.encode())) if ranks else _PROCESS


def memory(kind: str) -> Path:
    """Return the directory in this node's memory that has the directories of this user's jobs.

    Args:
        kind: What they keep there.
    """
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"dpex-{kind}-{os.getuid()}"


def job_directory(kind: str, job: str) -> Path:
    """Return where a job keeps something in memory, and remove what jobs have left that ended.

    Args:
        kind: What it keeps.
        job: Its name.

    Raises:
        PermissionError: What is there is another user's, or others can write to it.
    """
    base = memory(kind)
    make_private(base)
    if (os.getpid(), base / job) not in _swept:
        _swept.add((os.getpid(), base / job))
        for other in base.iterdir():
            if other.name != job:
                _remove_unused(other)
    return base / job


def claim(directory: Path) -> IO[str]:
    """Make a directory and hold it: nobody removes it as long as what is returned is open.

    A fork of this process does not hold it.
    """
    while True:
        make_private(directory)
        try:
            in_use = (directory / _IN_USE).open("w")
        except FileNotFoundError:  # removed again, by somebody who has found it unused
            continue
        fcntl.flock(in_use, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if (directory / _IN_USE).stat().st_ino == os.fstat(in_use.fileno()).st_ino:
                _held.add(in_use)
                return in_use
        in_use.close()


def _let_go_in_fork() -> None:
    # Locks belong to the open file, which a fork shares: it would hold them while it lives.
    for in_use in _held:
        in_use.close()


os.register_at_fork(after_in_child=_let_go_in_fork)


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Keep the other processes that use a directory waiting, where they use this too."""
    with (directory / "opening").open("w") as opening:
        fcntl.flock(opening, fcntl.LOCK_EX)
        try:
            yield
        finally:  # a fork may have the file open, too
            fcntl.flock(opening, fcntl.LOCK_UN)


def forget(kind: str, job: str) -> None:
    """Remove what a job keeps in memory, unless another process goes on using it."""
    directory = memory(kind) / job
    deadline = time.monotonic() + _LET_GO_S
    with contextlib.suppress(OSError):
        while directory.exists() and time.monotonic() < deadline:
            _remove_unused(directory)
            time.sleep(0.02)


def make_private(directory: Path) -> None:
    """Make a directory of this user's alone.

    Raises:
        PermissionError: There is one that is another user's, or that others can write to.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{directory} must be a directory of this user alone: what lies in it is believed"
        )


def _remove_unused(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / _IN_USE).open("w") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
