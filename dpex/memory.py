"""What this process's memory is mapped from, as Linux tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Span", "address_of", "from_files", "shared_memory", "spans"]


@dataclass(frozen=True)
class Span:
    """One mapping: a line of ``/proc/self/maps``.

    Attributes:
        start: Its first address.
        end: The address behind its last.
        shared: Whether what is written to it is seen by whoever else maps it.
        offset: Where in the file it begins, in bytes.
        device: Of the file, ``"major:minor"``, both hexadecimal.
        inode: Of the file; 0 if there is none.
    """

    start: int
    end: int
    shared: bool
    offset: int
    device: str
    inode: int


def spans() -> list[Span]:
    """Read the mappings of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, offset, device, inode, *_ = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        shared = permissions.endswith("s")
        found.append(Span(start, end, shared, int(offset, 16), device, int(inode)))
    return found


def address_of(array: Any) -> int:
    """Return where a numpy array's memory begins."""
    return int(array.__array_interface__["data"][0])


def from_files() -> Callable[[int, int], bool]:
    """Read which memory of this process is mapped from files, or from other shared memory.

    Returns:
        A function that tells it of a place: its address, and its size in bytes.
    """
    mapped = [span for span in spans() if span.inode]
    return lambda start, size: any(s.start < start + size and start < s.end for s in mapped)


def shared_memory() -> Callable[[Any], bool]:
    """Read which memory this process shares with whom it was forked from, also for writing.

    Returns:
        A function that tells it of an array.
    """
    shared = [span for span in spans() if span.shared]

    def is_shared(array: Any) -> bool:
        start = address_of(array)
        return any(span.start < start + array.nbytes and start < span.end for span in shared)

    return is_shared
