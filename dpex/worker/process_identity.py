"""Names of worker processes, by which other processes find out whether they still run.

Ray may take a process for dead that still runs, and restart its task. Invariant: the task makes no
batch while that process runs on the same machine, because both would be the same logical worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable

from dpex import tuning
from dpex.wire.machine import machine, started

__all__ = ["attempt_name", "place_of", "process_name", "process_of", "runs_here", "wait_for_end"]


@functools.cache
def process_name() -> str:
    """Return a unique name of this process, by which a process of this machine can find it."""
    pid = os.getpid()
    return f"{machine()} {pid} {started(pid)} {os.uname().nodename} {uuid.uuid4().hex}"


os.register_at_fork(after_in_child=process_name.cache_clear)


def attempt_name() -> str:
    """Return a new name for an attempt of a task in this process."""
    return f"{process_name()}/{uuid.uuid4().hex}"


def process_of(attempt: str) -> str:
    """Return the name of the process of an attempt."""
    return attempt.partition("/")[0]


def place_of(process: str) -> tuple[str, int]:
    """Return the name of the node of a process, and its ID there."""
    _, pid, _, node, _ = process.split(" ")
    return node, int(pid)


def runs_here(process: str) -> bool | None:
    """Return whether a process with this name runs; None if this machine may not be its machine."""
    of_machine, pid, start, *_ = process.split(" ")
    if not of_machine or of_machine != machine():
        return None
    return started(int(pid)) == start


def wait_for_end(attempts: Iterable[str], cancelled: Callable[[], bool]) -> None:
    """Wait until the processes of attempts have ended, unless they are on other machines.

    Ray kills a process before it restarts the task, or soon after. A process that runs for longer
    than torch waits for its workers is killed here.

    Args:
        attempts: Results of ``attempt_name``. Those of this process do not count.
        cancelled: Returns whether nothing waits for the end any more.
    """
    for attempt in attempts:
        process = process_of(attempt)
        if process != process_name() and runs_here(process):
            _, pid, start, *_ = process.split(" ")
            _wait_for_end(int(pid), start, cancelled)


def _wait_for_end(pid: int, start: str, cancelled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + tuning.END_S
    while started(pid) == start and not cancelled():
        if time.monotonic() > deadline:
            _kill(pid, start)
        time.sleep(tuning.PAUSE_S)


def _kill(pid: int, start: str) -> None:
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)  # from now on, the id is not that of another process
        try:
            if started(pid) == start:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
