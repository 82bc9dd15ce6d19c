"""Copy-on-write mappings of Ray's object store, for arrays that a worker may write to."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpex import tuning
from dpex.compat.private_names import private_ray_allowed
from dpex.wire.memory_map import address_of, spans

__all__ = ["private_mappings"]


def private_mappings(
    views: Sequence[np.ndarray[Any, Any]],
) -> list[np.ndarray[Any, Any] | None]:
    """Map views of one stored object a second time, as copy-on-write memory.

    Ray's object store is an unnamed file in memory, which the node's raylet has open. A private
    mapping of the file takes memory only for the pages that the worker process changes.

    Args:
        views: Flat uint8 arrays.

    Returns:
        For each view, a writable array of the same bytes. None if the view has less than 1 MB
        or the object store cannot be mapped: the caller must copy it.
    """
    large = [view for view in views if view.nbytes >= tuning.LARGE_ARRAY_BYTES]
    if not large or not private_ray_allowed():
        return [None] * len(views)
    start = min(map(address_of, large))
    end = max(address_of(view) + view.nbytes for view in large)
    try:
        open_files = Path("/proc", os.environ["RAY_RAYLET_PID"], "fd")
        # One mapping serves all views, because every mapping keeps a file open.
        copy = _map_again(start, end, open_files)
    except (OSError, ValueError, StopIteration, KeyError):
        return [None] * len(views)
    copy.sources = large
    memory = np.frombuffer(copy, np.uint8)[copy.offset :]
    return [
        memory[address_of(view) - start :][: view.nbytes]
        if view.nbytes >= tuning.LARGE_ARRAY_BYTES
        else None
        for view in views
    ]


class _PrivateMapping(mmap.mmap):
    """A private mapping of the object store.

    Invariant: Ray does not reuse the mapped memory while ``sources`` exist.

    Attributes:
        sources: Views of the stored object.
        offset: Offset of the first view in the mapping, in bytes.
    """

    sources: list[np.ndarray[Any, Any]]
    offset: int


def _map_again(start: int, end: int, open_files: Path) -> _PrivateMapping:
    span = next(span for span in spans() if span.start <= start and end <= span.end)
    major, minor = (int(number, 16) for number in span.device.split(":"))
    file = next(
        path
        for path in open_files.iterdir()
        if (status := path.stat()).st_ino == span.inode
        and status.st_dev == os.makedev(major, minor)
    )
    position = span.offset + start - span.start
    page = position - position % mmap.ALLOCATIONGRANULARITY
    descriptor = os.open(file, os.O_RDONLY)
    try:
        mapping = _PrivateMapping(
            descriptor,
            position - page + end - start,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=page,
        )
    finally:
        os.close(descriptor)
    mapping.offset = position - page
    return mapping
