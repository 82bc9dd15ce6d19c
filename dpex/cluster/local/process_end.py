"""The end of this process, which others see by file descriptors that it holds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["end_ray_after_us", "hold", "start_detached"]

# File descriptors by whose end others see that this process has ended.
_held: list[int] = []

# For a bare interpreter. When its standard input ends, its owner is about to; then it has a new
# parent, the same as all that the owner's raylet leaves behind. What it kills is younger than the
# owner, of its session and titled as Ray's (the title hides the command line); a worker or an agent
# of a living raylet has that as its parent.
_REAPER = """
import os, signal, sys, time

def parent_session_and_start(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[3]), int(fields[19])

owner, files, token = int(sys.argv[2]), os.fsencode(sys.argv[3]), sys.argv[4]
_, session, start = parent_session_and_start(owner)
sys.stdin.buffer.read()
while os.getppid() == owner:
    time.sleep(0.05)
if os.path.exists(token):
    os.unlink(token)
for pause in (0, 0.5, 1):
    time.sleep(pause)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            its_parent, its_session, its_start = parent_session_and_start(pid)
            if (its_parent, its_session) != (os.getppid(), session) or its_start < start:
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            if command.startswith(b"ray::") or files in command:
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
"""


def end_ray_after_us(session: Path, token: Path) -> None:
    """See to it that all of Ray ends when this process is killed.

    The kernel then kills what we started, and workers end with their raylet. But the raylet's two
    agents first report its death to the head, which is gone, for 100 seconds, and workers that
    are just starting try to reach it for 25 (Ray 2.60). A process that waits for our end kills
    both, and deletes the token. Where there is no /proc, they take their time.

    Args:
        session: Directory of the Ray's session.
        token: File with the token that is this Ray's alone, if it has one.
    """
    if not sys.platform.startswith("linux"):
        return
    read_end, write_end = os.pipe()
    arguments = ["dpex-reaper", str(os.getpid()), str(session), str(token)]
    start_detached([sys.executable, "-I", "-S", "-c", _REAPER, *arguments], stdin=read_end)
    os.close(read_end)
    hold(write_end)


def hold(descriptor: int) -> None:
    """Keep a file descriptor open until this process, and not its forks, ends."""
    _held.append(descriptor)


def start_detached(command: list[str], **options: Any) -> None:
    """Start a process that is not waited for and that no signal to our group or terminal meets."""
    detached = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "start_new_session": True,
    }
    process = subprocess.Popen(command, **{**detached, **options})
    process.returncode = 0  # else Python warns that it still runs when the object goes


def _let_go_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
