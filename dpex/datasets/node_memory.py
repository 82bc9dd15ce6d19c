"""Directories in a node's memory that the processes of a job share, removed when the job ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import xxhash

from dpex.private_directory import make_private

__all__ = [
    "claim",
    "forget",
    "job_directory",
    "job_name",
    "memory",
    "one_at_a_time",
]

_PROCESS = uuid.uuid4().hex
_IN_USE = "in-use"
# At the end of a job, `forget` waits at most this long for worker processes to release its memory.
_LET_GO_S = 3.0

_swept: set[tuple[int, Path]] = set()
_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def job_name() -> str:
    """Return the name of this process's job; processes with the same name share a node's memory.

    The ranks of a job have the same name. Without ranks, only forks of this process share it.

    Returns:
        32 hexadecimal digits.
    """
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    ranks = " ".join(filter(None, map(os.environ.get, names)))
    # Interned: pickle writes one object once, but two equal strings twice.
    return sys.intern(xxhash.xxh3_128_hexdigest(ranks.encode())) if ranks else _PROCESS


def memory(kind: str) -> Path:
    """Return the directory in this node's memory that contains the directories of a user's jobs.

    Args:
        kind: Name of the kind of data that the jobs keep there.
    """
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"dpex-{kind}-{os.getuid()}"


def job_directory(kind: str, job: str) -> Path:
    """Return a job's directory in memory, and remove the directories of jobs that have ended.

    Args:
        kind: Name of the kind of data that the job keeps.
        job: Name of the job.

    Raises:
        PermissionError: The parent directory belongs to another user, or others can access it.
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
    """Create a directory and claim it: no process removes it while the returned file is open.

    A fork of this process does not inherit the claim.
    """
    while True:
        make_private(directory, readable=True)
        try:
            in_use = (directory / _IN_USE).open("w")
        except FileNotFoundError:  # another process found the directory unused and removed it
            continue
        fcntl.flock(in_use, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if (directory / _IN_USE).stat().st_ino == os.fstat(in_use.fileno()).st_ino:
                _held.add(in_use)
                return in_use
        in_use.close()


def _let_go_in_fork() -> None:
    # flock() locks belong to the open file, which a fork shares: it would keep the lock.
    for in_use in _held:
        in_use.close()


os.register_at_fork(after_in_child=_let_go_in_fork)


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory; other callers of this function wait."""
    with (directory / "opening").open("w") as opening:
        fcntl.flock(opening, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing is not enough: a fork may have the file open
            fcntl.flock(opening, fcntl.LOCK_UN)


def forget(kind: str, job: str) -> None:
    """Remove a job's directory in memory, unless another process still uses it."""
    directory = memory(kind) / job
    deadline = time.monotonic() + _LET_GO_S
    with contextlib.suppress(OSError):
        while directory.exists() and time.monotonic() < deadline:
            _remove_unused(directory)
            time.sleep(0.02)


def _remove_unused(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / _IN_USE).open("w") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
