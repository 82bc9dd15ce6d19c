"""Worker processes that Ray takes for dead, and that may still run.

Ray restarts the task of such a process. Invariant: the task makes no batch while that process runs
on the same machine, because both would be the same logical worker.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from dpex import tuning

__all__ = ["process_name", "wait_for_end"]


def process_name() -> str:
    """Return a unique name of this process, in which a process of this machine can find it."""
    pid = os.getpid()
    return f"{uuid.uuid4().hex} {_machine()} {pid} {_started(pid)}"


def wait_for_end(names: Iterable[str], cancelled: Callable[[], bool]) -> None:
    """Wait until processes have ended, those of other machines and this process excepted.

    Ray kills a process before it restarts the task, or soon after. A process that runs for longer
    than torch waits for its workers is killed here.

    Args:
        names: What ``process_name`` returned in these processes.
        cancelled: Returns whether nothing waits for the end any more.
    """
    for name in names:
        _, of_machine, pid, started = name.split(" ")
        if of_machine and of_machine == _machine() and int(pid) != os.getpid():
            _wait_for_end(int(pid), started, cancelled)


def _wait_for_end(pid: int, started: str, cancelled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + tuning.END_S
    while _started(pid) == started and not cancelled():
        if time.monotonic() > deadline:
            _kill(pid, started)
        time.sleep(tuning.END_POLL_S)


def _kill(pid: int, started: str) -> None:
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)  # from now on, the id is not that of another process
        try:
            if _started(pid) == started:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


@functools.cache
def _machine() -> str:
    from dpex.wire.segments import machine

    name = machine()
    return hashlib.blake2s(name.encode(), digest_size=8).hexdigest() if name else ""


def _started(pid: int) -> str:
    """Return when a process started, in ticks since the boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
