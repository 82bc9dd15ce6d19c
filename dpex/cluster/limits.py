"""What this process may use of its host: cores and memory."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["IdleCores", "free_memory", "usable_cores", "usable_memory"]

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
# Shorter spans of time say little: the kernel counts in hundredths of a second.
_SPAN_S = 0.3


def usable_cores() -> int:
    """Cores that affinity and quotas leave to this process."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
    for group in _own_groups():
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def usable_memory() -> int:
    """Bytes of memory that the host has, or that this process may take of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # The last one is version 1's.
    files = [group / "memory.max" for group in _own_groups()]
    for file in (*files, _GROUPS / "memory" / "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits)


def free_memory() -> int:
    """Bytes of it that nobody uses, but for what is kept of files.

    Ray does not start where its store would take them all.
    """
    free = [usable_memory()]
    with contextlib.suppress(OSError, KeyError):
        free.append(_numbers(_PROC / "meminfo")["MemAvailable:"] << 10)
    for group in _own_groups():
        with contextlib.suppress(OSError, ValueError, KeyError):
            limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
            kept = _numbers(group / "memory.stat")["inactive_file"]
            free.append(max(0, limit - used + kept))
    return min(free)


def _own_groups() -> Iterator[Path]:
    """Yield the control groups that this process is in, its own one first and the root last.

    In a container the root is the container's.
    """
    group = _GROUPS
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                group /= line.removeprefix("0::/")
    while group != _GROUPS:
        yield group
        group = group.parent
    yield group


def _numbers(file: Path) -> dict[str, int]:
    """Read lines of a name, a number and perhaps a unit."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


class IdleCores:
    """Measures whether the host's processors have time to spare.

    Source:
        ``/proc/stat``, whose fourth and fifth numbers count idle time. Where there is none, every
        processor counts as idle.
    """

    def __init__(self) -> None:
        self._before = self._read()
        self._idle = False

    @staticmethod
    def _read() -> tuple[float, float]:
        try:
            fields = (_PROC / "stat").read_text().partition("\n")[0].split()
            ticks = sum(map(int, fields[4:6]))
        except (OSError, ValueError):
            return time.monotonic(), math.inf
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK")

    def any(self) -> bool:
        """Return whether half a processor or more was idle in the last measured span."""
        now, idle_s = self._read()
        before, idle_before_s = self._before
        if math.isinf(idle_s):
            return True
        if now - before >= _SPAN_S:
            self._idle = idle_s - idle_before_s >= (now - before) / 2
            self._before = now, idle_s
        return self._idle
