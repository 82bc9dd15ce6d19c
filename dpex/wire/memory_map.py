"""What this process's memory is mapped from, as Linux tells it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Span", "address_of", "from_files", "shared_memory", "spans"]

# Bounds, permissions, offset, device, inode and path.
_LINE = re.compile(r"^(\w+)-(\w+) .(.).(.) (\w+) ([\w:]+) (\d+) *(.*)$", re.ASCII | re.MULTILINE)


class Span(NamedTuple):
    """One mapping: a line of ``/proc/self/maps``.

    Attributes:
        start: Its first address.
        end: The address behind its last.
        writable: Whether the process may write to it.
        shared: Whether what is written to it is seen by whoever else maps it.
        offset: Where in the file it begins, in bytes.
        device: Of the file, ``"major:minor"``, both hexadecimal.
        inode: Of the file; 0 if there is none.
        path: Of the file, with ``" (deleted)"`` behind it if it has no name any more.
    """

    start: int
    end: int
    writable: bool
    shared: bool
    offset: int
    device: str
    inode: int
    path: str

    @property
    def file(self) -> tuple[str, int]:
        """The file's identity."""
        return self.device, self.inode


def spans(pid: int | None = None) -> list[Span]:
    """Read the mappings of a process, in the order of their addresses.

    Args:
        pid: The process; by default this one.

    Raises:
        OSError: There is no ``/proc``, or no such process, or it belongs to another user.
    """
    text = os.fsdecode(Path("/proc", str(pid or "self"), "maps").read_bytes())
    return [
        Span(
            int(start, 16),
            int(end, 16),
            writable == "w",
            shared == "s",
            int(offset, 16),
            device,
            int(inode),
            path.replace("\\012", "\n"),
        )
        for start, end, writable, shared, offset, device, inode, path in _LINE.findall(text)
    ]


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
