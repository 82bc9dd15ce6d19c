"""The memory mappings of a process, as Linux lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["SEGMENT_NAME", "Span", "address_of", "memory_in", "spans"]

SEGMENT_NAME = "dpex-segment-"
"""Start of the names of segments; ``Span.path`` begins with ``/memfd:`` and the name."""

# Fields of a line: bounds, permissions, offset, device, inode and path.
_LINE = re.compile(r"^(\w+)-(\w+) .(.).(.) (\w+) ([\w:]+) (\d+) *(.*)$", re.ASCII | re.MULTILINE)


class Span(NamedTuple):
    """One mapping: a line of ``/proc/self/maps``.

    Attributes:
        start: Its first address.
        end: The address after its last byte.
        writable: Whether the process may write to it.
        shared: Whether other processes that map the same memory see writes to it.
        offset: Its offset in the file, in bytes.
        device: Device of the file, as ``"major:minor"``, both hexadecimal.
        inode: Inode of the file; 0 if there is no file.
        path: Path of the file, followed by ``" (deleted)"`` if the file is unlinked.
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
        """The identity of the file: its device and inode."""
        return self.device, self.inode


def spans() -> list[Span]:
    """Return the mappings of this process, in the order of their addresses.

    Raises:
        OSError: The system has no ``/proc``.
    """
    text = os.fsdecode(Path("/proc/self/maps").read_bytes())
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
    """Return the address of a numpy array's first element."""
    return int(array.__array_interface__["data"][0])


def memory_in(counts: Callable[[Span], Any]) -> Callable[[int, int], bool]:
    """Return a test for memory of this process in some of its mappings.

    Args:
        counts: Function that returns whether a mapping counts.

    Returns:
        A function of an address and a size in bytes. It returns whether any byte of this memory
        was in a mapping that counts when ``memory_in`` was called.
    """
    found = [span for span in spans() if counts(span)]
    return lambda start, size: any(s.start < start + size and start < s.end for s in found)
