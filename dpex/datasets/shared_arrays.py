"""One copy of a dataset's large arrays for all processes of a node that built the same arrays.

Each process builds its dataset, and then replaces large arrays and tensors with private mappings
of files in memory. A digest of the content names each file. Writes stay private to a process.

Sharing is opt-in: other references to an array, in a list or in a thread, keep the old array.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from dpex import tuning
from dpex.datasets.node_memory import job_directory, one_at_a_time
from dpex.wire.memory_map import address_of, memory_in
from dpex.wire.pickling import give_back_memory

__all__ = ["MEMORY", "share_arrays"]

logger = logging.getLogger("dpex")

MEMORY = "arrays"
"""The ``kind`` of a job's arrays in ``node_memory``."""
# Each shared region keeps a file open.
_MOST_REGIONS = 64


@dataclass(frozen=True)
class _Array:
    """An array or tensor that is an attribute of a dataset.

    Attributes:
        owner: The ``__dict__`` of the object that has the attribute.
        name: Name of the attribute.
        start: Address of the memory region that contains the array.
        size: Size of that region in bytes.
        plain: Whether the array contains only numbers, in memory that this process owns.
    """

    owner: dict[str, Any]
    name: str
    start: int
    size: int
    plain: bool

    def on(self, memory: np.ndarray[Any, Any]) -> Any:
        """Return the same array as a view of ``memory``, a copy of its region."""
        old = self.owner[self.name]
        if isinstance(old, torch.Tensor):
            place = (old.storage_offset(), old.size(), old.stride())
            tensor = torch.empty(0, dtype=old.dtype, device="cpu")
            return tensor.set_(torch.from_numpy(memory).untyped_storage(), *place)
        offset = address_of(old) - self.start
        array = np.ndarray(old.shape, old.dtype, memory.data, offset, old.strides)
        array.flags.writeable = old.flags.writeable
        return array


def share_arrays(dataset: Any, job: str) -> None:
    """Replace a dataset's large arrays with mappings that the processes of a node share.

    These are numpy arrays and CPU tensors in attributes of the dataset, or of datasets in its
    attributes. An array that is already mapped from a file stays as it is. If there is no space for
    an array, it and the smaller arrays stay as they are, and dpex logs a warning.

    Args:
        dataset: The dataset that this process has built.
        job: Name of the job whose processes share the arrays.
    """
    try:
        exchanged = _exchange(dataset, job)
    except Exception as error:
        # Sharing only saves memory: the dataset is correct without it.
        logger.warning(
            "arrays are not shared on this node, so each process keeps a copy: %s: %s",
            type(error).__name__,
            error,
        )
        return
    if exchanged:
        # Otherwise a worker process keeps the freed memory for its next batch.
        give_back_memory()


def _exchange(dataset: Any, job: str) -> bool:
    """Replace the arrays; return False if there are none."""
    regions = _regions(list(_arrays(dataset, set())))
    if not regions:
        return False
    directory = job_directory(MEMORY, job)
    # Arrays in mapped files and in shared memory stay where they are.
    mapped = memory_in(lambda span: span.inode)
    for arrays in regions:
        start, size = arrays[0].start, arrays[0].size
        if all(array.plain for array in arrays) and not mapped(start, size):
            common = _common(_bytes_at(start, size), directory)
            moved = [(array, array.on(common)) for array in arrays]
            for array, new in moved:
                array.owner[array.name] = new
    return True


def _regions(arrays: list[_Array]) -> list[list[_Array]]:
    """Group arrays by memory region; return the largest regions, largest first.

    Regions that overlap in part are left out: replacing them would separate arrays that share
    memory.
    """
    clusters: list[list[_Array]] = []
    end = 0
    for array in sorted(arrays, key=lambda array: array.start):
        if array.start >= end:
            clusters.append([])
        clusters[-1].append(array)
        end = max(end, array.start + array.size)
    same = (c for c in clusters if len({(array.start, array.size) for array in c}) == 1)
    large = [cluster for cluster in same if cluster[0].size >= tuning.LARGE_ARRAY_BYTES]
    return sorted(large, key=lambda cluster: -cluster[0].size)[:_MOST_REGIONS]


def _arrays(holder: Any, seen: set[int]) -> Iterator[_Array]:
    """Yield the arrays and CPU tensors of a dataset and of the datasets in its attributes."""
    if id(holder) in seen or not hasattr(holder, "__dict__"):
        return
    seen.add(id(holder))
    owner = vars(holder)
    for name, value in list(owner.items()):
        if isinstance(value, np.ndarray):
            place, plain = _place_of_array(value)
            yield _Array(owner, name, *place, plain)
        elif type(value) is torch.Tensor and value.device.type == "cpu":
            if value.layout is torch.strided and not value.is_nested:
                yield _Array(owner, name, *_place(value), _is_plain(value))
        else:
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, Dataset):
                    yield from _arrays(part, seen)


def _place_of_array(array: np.ndarray[Any, Any]) -> tuple[tuple[int, int], bool]:
    """Return the address and size of an array's region, and whether the array is plain."""
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    plain = type(array) is np.ndarray and whole.flags.forc and not whole.dtype.hasobject
    if type(whole.base) is torch.Tensor:
        return _place(whole.base), plain and _is_plain(whole.base)
    return (address_of(whole), whole.nbytes), plain and whole.base is None


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    # Call is_pinned() only if CUDA is initialized: it would initialize CUDA, or fail in a fork.
    pinned = torch.cuda.is_initialized() and tensor.is_pinned()
    return not (pinned or tensor.__dict__)


def _bytes_at(address: int, size: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _common(content: np.ndarray[Any, Any], directory: Path) -> np.ndarray[Any, Any]:
    """Return the same bytes as a private mapping of a file that the job's processes share.

    Raises:
        OSError: There is no space for the file, or another thread changes the bytes meanwhile.
    """
    file = directory / xxhash.xxh3_128_hexdigest(content.data)
    if not file.exists():
        with one_at_a_time(directory):
            if not file.exists():
                _write(content, file)
    with file.open("rb") as opened:
        access = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        return np.frombuffer(mmap.mmap(opened.fileno(), content.nbytes, **access), np.uint8)


def _write(content: np.ndarray[Any, Any], file: Path) -> None:
    """Write a file atomically."""
    disk = os.statvfs(file.parent)
    taken = sum(other.stat().st_size for other in file.parent.iterdir())
    # Use at most half of the free memory: Ray's object store needs it too.
    if taken + content.nbytes > (taken + disk.f_bavail * disk.f_frsize) // 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.parent))
    partly = file.with_suffix(".partly")
    try:
        with partly.open("w+b") as opened:
            opened.write(content.data)
            opened.seek(0)
            # The content must match the file's name: a thread of the dataset may change the array.
            if hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest() != file.name:
                raise OSError(errno.EAGAIN, "an array was changed while it was copied")
        partly.rename(file)
    finally:
        partly.unlink(missing_ok=True)
