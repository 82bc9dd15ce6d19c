"""Directories in a node's memory that the processes of a job share, removed when the job ends."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from dpex.private_directory import claim, make_private, remove_claimed, remove_unused

__all__ = [
    "at_exit",
    "job_directory",
    "job_name",
    "memory",
    "one_at_a_time",
    "use_until_exit",
]

_PROCESS = uuid.uuid4().hex
# At exit, `_forget` waits at most this long for other processes to release a job's directory.
_LET_GO_S = 3.0

# What this process calls at exit, in this order; its forks do not.
_exit_calls: dict[tuple[Callable[[Path], None], Path], None] = {}
os.register_at_fork(after_in_child=_exit_calls.clear)


# Exit handlers run in reverse order. This one is registered at import, usually before Ray's, and so
# runs when Ray's worker processes have ended and claim no directory any more.
@atexit.register
def _exit() -> None:
    for call, directory in _exit_calls:
        call(directory)


def at_exit(call: Callable[[Path], None], directory: Path) -> None:
    """Call a function once when this process exits, but not when its forks do."""
    _exit_calls[call, directory] = None


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


@functools.cache
def job_directory(kind: str, job: str) -> Path:
    """Return a job's directory in memory, and remove the directories of jobs that have ended.

    No other job removes it before this process and its forks end.

    Args:
        kind: Name of the kind of data that the job keeps.
        job: Name of the job.

    Raises:
        PermissionError: The parent directory belongs to another user, or others can access it.
    """
    base = make_private(memory(kind))
    directory = base / job
    claim(directory, shared=True)
    for other in base.iterdir():
        if other != directory:
            remove_unused(other)
    return directory


def use_until_exit(kind: str, job: str) -> None:
    """Claim a job's directory for this process and its forks; this process removes it at exit."""
    with contextlib.suppress(OSError):  # the first sample raises the error
        at_exit(_forget, job_directory(kind, job))


def _forget(directory: Path) -> None:
    """Remove a directory that this process has claimed, unless another process still uses it."""
    deadline = time.monotonic() + _LET_GO_S
    remove_claimed(directory)
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
        remove_claimed(directory)


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory; other callers of this function wait."""
    with (directory / "opening").open("w") as opening:
        fcntl.flock(opening, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing is not enough: a fork may have the file open
            fcntl.flock(opening, fcntl.LOCK_UN)
