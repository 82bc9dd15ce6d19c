"""Names of this machine, by which two processes can find each other, and starts of processes."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from pathlib import Path

__all__ = ["boot_id", "machine", "process_start", "started"]


@functools.cache
def boot_id() -> str:
    """Return the identifier of the running kernel, which each boot changes; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox, or a system without /proc
        return ""


@functools.cache
def machine() -> str:
    """Return a name of this machine, its mounts, processes and user; empty if there is none.

    Two processes with the same name can map each other's segments, see each other's ids, and see
    equal paths.
    """
    try:
        spaces = [str(Path("/proc/self/ns", kind).readlink()) for kind in ("mnt", "pid", "user")]
        shown_as = str(Path("/proc/self").readlink())
        name = " ".join([boot_id(), *spaces, str(os.getuid())])
    except OSError:
        return ""
    # In a container, /proc may show the processes of the namespace around it.
    usable = boot_id() and hasattr(os, "memfd_create") and shown_as == str(os.getpid())
    return hashlib.blake2s(name.encode(), digest_size=8).hexdigest() if usable else ""


@functools.cache
def process_start() -> float:
    """Return the start time of this process, in seconds since the epoch."""
    ticks = started(os.getpid())
    if not ticks:  # not Linux: use the time of the first call
        return time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def started(pid: int) -> str:
    """Return when a process started, in ticks since the boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
