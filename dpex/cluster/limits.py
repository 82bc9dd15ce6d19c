"""What this process may use of its host: cores and memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_memory", "usable_cores", "usable_memory"]

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


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
