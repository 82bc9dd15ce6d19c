"""One copy of a dataset's large arrays for all processes of a node that have built the same ones.

Each process builds its dataset for itself; what it then holds in arrays and tensors is exchanged
for a private mapping of a file in memory, which is found by its content. So it is right whatever
the constructor does, and what a process writes to its arrays is its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from dpex.datasets.node_memory import claim, forget, job_directory, one_at_a_time
from dpex.memory import address_of, from_files
from dpex.pickling import give_back_memory

__all__ = ["forget_at_exit", "share_arrays"]

_MEMORY = "arrays"
# Mapping takes some system calls, and a file.
_LARGE_BYTES = 1 << 20

_claims: dict[str, IO[str]] = {}


@dataclass
class _Array:
    """A large array or tensor where a dataset has it.

    Attributes:
        owner: The attributes of the object that has it.
        name: Its name there.
        start: Address of the memory that it is part of.
        size: That memory's size in bytes.
        plain: Whether it is nothing but numbers in memory that is this process's own.
    """

    owner: dict[str, Any]
    name: str
    start: int
    size: int
    plain: bool

    def move(self, memory: np.ndarray[Any, Any]) -> None:
        """Have the same array on a copy of that memory."""
        old = self.owner[self.name]
        if isinstance(old, torch.Tensor):
            place = (old.storage_offset(), old.size(), old.stride())
            tensor = torch.empty(0, dtype=old.dtype)
            tensor.set_(torch.from_numpy(memory).untyped_storage(), *place)
            self.owner[self.name] = tensor
        else:
            offset = address_of(old) - self.start
            array = np.ndarray(old.shape, old.dtype, memory.data, offset, old.strides)
            array.flags.writeable = old.flags.writeable
            self.owner[self.name] = array


def share_arrays(dataset: Any, job: str) -> None:
    """Exchange a dataset's large arrays for mappings that this node's processes have in common.

    Those are arrays and CPU tensors in attributes of the dataset, or of one that it is made of. An
    array that is mapped from a file already is left as it is; so are all where there is no room.

    Args:
        dataset: Whatever a process has built.
        job: Whose processes share.
    """
    if _exchanged(dataset, job):
        # A worker keeps what it frees for its next batch.
        give_back_memory()


def _exchanged(dataset: Any, job: str) -> bool:
    """Exchange the arrays; False if there are none."""
    arrays = list(_arrays(dataset, set()))
    mapped = from_files()
    for (start, size), of_region in _by_region(arrays).items():
        if all(array.plain for array in of_region) and not mapped(start, size):
            with contextlib.suppress(OSError):
                memory = _common(_bytes_at(start, size), job)
                for array in of_region:
                    array.move(memory)
    return bool(arrays)


def _by_region(arrays: list[_Array]) -> dict[tuple[int, int], list[_Array]]:
    """Sort arrays by their memory; without what is in two that are not the same.

    Such an array would no longer be one with those that it has a part in common with.
    """
    regions: dict[tuple[int, int], list[_Array]] = {}
    for array in arrays:
        regions.setdefault((array.start, array.size), []).append(array)
    return {
        region: of_region
        for region, of_region in regions.items()
        if not any(
            other != region and other[0] < sum(region) and region[0] < sum(other)
            for other in regions
        )
    }


@functools.cache
def forget_at_exit(job: str) -> None:
    """Have a job's arrays removed from this node when this process ends, if nobody uses them."""

    @atexit.register
    def forget_arrays() -> None:
        _let_go()
        forget(_MEMORY, job)


def _arrays(holder: Any, seen: set[int]) -> Iterator[_Array]:
    """Find the large arrays of a dataset and of those that it is made of."""
    if id(holder) in seen or not hasattr(holder, "__dict__"):
        return
    seen.add(id(holder))
    owner = vars(holder)
    for name, value in list(owner.items()):
        if isinstance(value, np.ndarray):
            whole, plain = _whole_array(value)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            whole, plain = (value.data_ptr(), value.nbytes), False
            if type(value) is torch.Tensor and value.device.type == "cpu":
                whole, plain = _storage(value), _is_plain(value)
        else:
            parts = value if isinstance(value, list | tuple) else [value]
            for part in parts:
                if isinstance(part, Dataset):
                    yield from _arrays(part, seen)
            continue
        if whole[1] >= _LARGE_BYTES:
            yield _Array(owner, name, *whole, plain)


def _whole_array(array: np.ndarray[Any, Any]) -> tuple[tuple[int, int], bool]:
    """Return where the memory is that an array is part of, and whether all in it is plain."""
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    plain = type(array) is np.ndarray and whole.flags.forc and not whole.dtype.hasobject
    if isinstance(whole.base, torch.Tensor):
        return _storage(whole.base), plain and _is_plain(whole.base)
    return (address_of(whole), whole.nbytes), plain and whole.base is None


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: torch.Tensor) -> bool:
    other = tensor.requires_grad or tensor.is_shared() or tensor.is_pinned()
    return not (other or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _bytes_at(address: int, size: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _common(content: np.ndarray[Any, Any], job: str) -> np.ndarray[Any, Any]:
    """Return the same bytes, mapped privately from a file that the job's processes share.

    Raises:
        OSError: There is no room for such a file.
    """
    directory = job_directory(_MEMORY, job)
    if job not in _claims:
        _claims[job] = claim(directory)
    file = directory / xxhash.xxh3_128_hexdigest(content.data)
    with one_at_a_time(directory):
        if not file.exists():
            _write(content, file)
    with file.open("rb") as opened:
        access = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        return np.frombuffer(mmap.mmap(opened.fileno(), content.nbytes, **access), np.uint8)


def _write(content: np.ndarray[Any, Any], file: Path) -> None:
    """Write a file, whole or not at all."""
    disk = os.statvfs(file.parent)
    # Ray's object store needs the memory too.
    if content.nbytes > disk.f_bavail * disk.f_frsize // 2:
        raise OSError(errno.ENOSPC, "no room for arrays that processes share", str(file))
    partly = file.with_suffix(".partly")
    try:
        with partly.open("wb") as opened:
            opened.write(content.data)
        partly.rename(file)
    except OSError:
        partly.unlink(missing_ok=True)
        raise


def _let_go() -> None:
    while _claims:
        _claims.popitem()[1].close()


# Locks belong to the open file, which a fork shares: it would hold them while it lives.
os.register_at_fork(after_in_child=_let_go)
