"""Cores and memory that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dpex import tuning

__all__ = [
    "IdleCores",
    "free_cores",
    "free_memory",
    "ranks_here",
    "usable_cores",
    "usable_memory",
]

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def usable_cores(process: int = 0) -> int:
    """Return the number of cores that CPU affinity and cgroup quotas leave to this process.

    Args:
        process: Process whose CPU affinity counts; 0 for this process.
    """
    try:
        cores = len(os.sched_getaffinity(process))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
    files = [[group / "cpu.max"] for group in _own_groups()]
    # The last files belong to cgroup version 1.
    for names in (*files, [_GROUPS / "cpu" / f"cpu.cfs_{n}_us" for n in ("quota", "period")]):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            quota, period = " ".join(file.read_text() for file in names).split()
            if int(quota) > 0:  # version 1 has -1 if there is no limit
                cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def free_cores() -> int:
    """Return this rank's share of the machine's usable cores, at least 1.

    A launcher may bind each rank to other cores. Then only the launcher, which is the parent
    process, may use the cores of all ranks.
    """
    own = usable_cores()
    with contextlib.suppress(ProcessLookupError):
        everyones = max(own, usable_cores(os.getppid()))
        return max(1, min(own, everyones // max(1, _local_ranks() or 1)))
    return own


def _local_ranks() -> int | None:
    """Return the number of ranks on this machine, or ``None`` if the launcher does not set it."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not number and "LOCAL_RANK" in os.environ:
        number = os.environ.get("LOCAL_SIZE", "")  # set by DeepSpeed's launcher
    return int(number) if number.isdecimal() else None


def ranks_here() -> int:
    """Return the number of ranks on this machine, or in all if the launcher does not say more."""
    ranks = _local_ranks()
    if ranks is not None:
        return ranks
    if world := os.environ.get("WORLD_SIZE"):
        return int(world) if world.isdecimal() else 1
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return 1


def usable_memory() -> int:
    """Return the bytes of memory that the machine and the cgroup limits allow this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # The last file belongs to cgroup version 1.
    files = [group / "memory.max" for group in _own_groups()]
    for file in (*files, _GROUPS / "memory" / "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits)


def free_memory() -> int:
    """Return the bytes of usable memory that are free or hold only cached files.

    Ray does not start if its object store would take all of them.
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
    """Yield the control groups of this process, from the innermost to the root.

    In a container the root is the container's group.
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
    """Read a file of lines with a name, a number and an optional unit."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


class IdleCores:
    """Measurement of the machine's idle processor time.

    Source:
        ``/proc/stat``, whose fourth and fifth numbers count idle time. If the file does not exist,
        every processor counts as idle.
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
        """Return whether at least half a processor was idle in the last measured span."""
        now, idle_s = self._read()
        before, idle_before_s = self._before
        if math.isinf(idle_s):
            return True
        if now - before >= tuning.CORES_SPAN_S:
            self._idle = idle_s - idle_before_s >= (now - before) / 2
            self._before = now, idle_s
        return self._idle
