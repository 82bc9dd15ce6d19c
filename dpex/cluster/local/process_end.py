"""End of this process: other processes detect it by file descriptors that this process holds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["end_ray_after_us", "hold", "start_detached"]

# Open file descriptors. When this process ends, the kernel closes them, and other processes see it.
_held: list[int] = []

# Program that runs without site-packages. Its standard input closes when its owner is about to end.
# Then it gets a new parent, and the orphans of the owner's raylet get the same new parent.
# Invariant: it kills only processes of Ray that have the same new parent, are in the owner's
# session and are not older than the owner. The workers and agents of a live raylet have that raylet
# as their parent. A worker's title, which starts with "ray::", hides its command line.
_REAPER = """
import os, shutil, signal, sys, time

def parent_session_and_start(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[3]), int(fields[19])

owner, session, start = map(int, sys.argv[2:5])
files, token = os.fsencode(sys.argv[5]), sys.argv[6]
sys.stdin.buffer.read()
while os.getppid() == owner:
    time.sleep(0.05)
if os.path.exists(token):
    os.unlink(token)
shutil.rmtree(os.path.join(os.path.dirname(token), "jobs"), ignore_errors=True)
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


def end_ray_after_us(directory: Path, token: Path) -> None:
    """Start a process that kills the rest of a local Ray when this process has been killed.

    The kernel kills the processes that this process started, and workers end with their raylet.
    But in Ray 2.60 the raylet's two agents try for 100 seconds to report its death to the head,
    which no longer exists. Workers that are starting try for 25 seconds to reach the head. The
    new process waits for the end of this process, and kills these agents and workers. It deletes
    the token and the files of the ranks' jobs. On systems other than Linux, the agents and workers
    end only after these times, and the next start of a local Ray deletes the token.

    Call this function before the token exists: then no end of this process leaves the token.

    Args:
        directory: Directory of the local Ray, from ``make_directory``.
        token: File with the local Ray's own token, if it gets one.
    """
    if not sys.platform.startswith("linux"):
        return
    # The new process could not read this after the end of this process.
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    session, start = stat[3], stat[19]
    read_end, write_end = os.pipe()
    owner = [str(os.getpid()), session, start]
    arguments = ["dpex-reaper", *owner, f"{directory}/", str(token)]
    start_detached([sys.executable, "-I", "-S", "-c", _REAPER, *arguments], stdin=read_end)
    os.close(read_end)
    hold(write_end)


def hold(descriptor: int) -> None:
    """Keep a file descriptor open until this process ends; its forks close their copies."""
    _held.append(descriptor)


def start_detached(command: list[str], **options: Any) -> None:
    """Start a process in a new session, with /dev/null as its streams, and do not wait for it.

    Signals to this process's group or terminal do not reach it.

    Args:
        command: The program and its arguments.
        **options: Arguments of ``subprocess.Popen``, which override these defaults.
    """
    detached = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "start_new_session": True,
    }
    process = subprocess.Popen(command, **{**detached, **options})
    process.returncode = 0  # else Popen's finalizer warns that it still runs


def _let_go_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
