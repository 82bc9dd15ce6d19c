"""Files that another process has mapped, mapped again in this process."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import stat
import sys
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from dpex.errors import NodeDataError
from dpex.wire.machine import machine
from dpex.wire.memory_map import address_of

__all__ = [
    "MappedFile",
    "rebuild_array",
    "rebuild_arrow_buffer",
    "rebuild_mmap",
    "rebuild_storage",
    "rebuild_tensor",
    "set_attributes",
]


@dataclass(kw_only=True, eq=False)
class MappedFile:
    """A file that one process has mapped, and that the unpickling process maps too.

    A pickle holds one ``MappedFile`` for each file and kind of mapping (shared, writable). All
    views of the file share its mapping.

    Attributes:
        path: The file's path.
        pid: ID of the process that has mapped it.
        status: Device and inode as ``stat`` returns them.
        size: The file's size in bytes.
        shared: Whether other processes see writes to the mapping.
        writable: Whether the process may write to the mapping.
        host: ``machine()`` of that process.
    """

    path: str
    pid: int
    status: tuple[int, int]
    size: int
    shared: bool
    writable: bool
    host: str
    # The mapping, and its start address.
    _mapped: tuple[Any, int] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mapped": None}

    def _open(self) -> int:
        """Return a descriptor of the file.

        Raises:
            NodeDataError: The file cannot be opened here, or another file has its path.
        """
        same_host = bool(self.host) and self.host == machine()
        writes = self.shared and self.writable
        try:
            descriptor = os.open(self.path, os.O_RDWR if writes else os.O_RDONLY)
        except OSError as error:
            raise self._unmapped(str(error.strerror)) from error
        found = os.fstat(descriptor)
        if same_host and (found.st_dev, found.st_ino) != self.status:
            problem = "another file is at its path"
        elif not stat.S_ISREG(found.st_mode):
            problem = "it is not a regular file here"
        elif found.st_size < self.size or (not same_host and found.st_size != self.size):
            problem = f"the file here has {found.st_size:,} bytes"
        else:
            return descriptor
        os.close(descriptor)
        raise self._unmapped(problem)

    def _unmapped(self, problem: str) -> NodeDataError:
        return NodeDataError(
            f"{self.path!r} cannot be mapped on node {socket.gethostname()} by process "
            f"{os.getpid()}: {problem}. Process {self.pid} has mapped it with {self.size:,} bytes, "
            "and every node needs the same file at the same path. Copy it there, or read it into "
            "memory (numpy.array(...), tensor.clone()), which sends its content"
        )

    def _map(self) -> tuple[Any, int]:
        if self._mapped is None:
            memory = self.map_part(0, 0)
            self._mapped = memory, address_of(np.frombuffer(memory, np.uint8))
        return self._mapped

    def map_part(self, offset: int, size: int) -> mmap.mmap:
        """Return a new mapping of a part of the file.

        Args:
            offset: Offset of the part in the file; a multiple of the page size.
            size: Size of the part in bytes; 0 for the rest of the file.
        """
        options: dict[str, Any] = {"offset": offset}
        if sys.version_info >= (3, 13):
            options["trackfd"] = False  # otherwise every mapping keeps a descriptor open
        if not self.writable:
            options["access"] = mmap.ACCESS_READ
        elif self.shared:
            options["access"] = mmap.ACCESS_WRITE
        else:
            # The kernel must not reserve memory for a private mapping of a large file.
            options["flags"] = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            options["prot"] = mmap.PROT_READ | mmap.PROT_WRITE
        descriptor = self._open()
        try:
            return mmap.mmap(descriptor, size, **options)
        finally:
            os.close(descriptor)

    @property
    def buffer(self) -> Any:
        """The mapping of the whole file, as an object that supports the buffer protocol."""
        return self._map()[0]

    def address(self, offset: int) -> int:
        """Return the address of the byte at an offset in the file."""
        return self._map()[1] + offset

    def memory(self, offset: int, size: int) -> Any:
        """Return a part of the file as a buffer that keeps the mapping alive.

        The buffer is marked as writable even if the memory is read-only, because torch has no
        read-only tensors.
        """
        part: Any = (ctypes.c_uint8 * size).from_address(self.address(offset))
        part.mapping = self.buffer
        return part


def rebuild_storage(file: MappedFile, offset: int, size: int) -> torch.UntypedStorage:
    """Return a torch storage in mapped memory."""
    return torch.frombuffer(file.memory(offset, size), dtype=torch.uint8).untyped_storage()


def rebuild_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return a view of a mapped storage."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    tensor = empty.set_(storage, offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_array(
    kind: str,
    file: MappedFile | np.ndarray[Any, Any],
    offset: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writeable: bool,
) -> np.ndarray[Any, Any]:
    """Return a numpy array in mapped memory, or in memory of another array.

    Args:
        kind: The name of its type in ``numpy``.
        file: The file that holds its elements, or the bytes of the other array.
        offset: Offset of its first element there.
        dtype: Its dtype.
        shape: Its shape.
        strides: Its strides.
        writeable: Whether it is writeable.
    """
    memory = file.buffer if isinstance(file, MappedFile) else file
    # ``kind`` is a name because cloudpickle pickles the class numpy.recarray by value.
    array: Any = np.ndarray.__new__(getattr(np, kind), shape, dtype, memory, offset, strides)
    if not writeable:
        array.flags.writeable = False
    if kind == "memmap":
        array._mmap = memory
    return cast("np.ndarray[Any, Any]", array)


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes of an object that is in a pickle, without a call of its class."""
    vars(obj).update(attributes)


def rebuild_arrow_buffer(file: MappedFile, offset: int, size: int) -> Any:
    """Return a ``pyarrow.Buffer`` in mapped memory."""
    import pyarrow as pa

    return pa.foreign_buffer(file.address(offset), size, base=file.memory(offset, size))


def rebuild_mmap(file: MappedFile, offset: int, size: int, position: int) -> mmap.mmap:
    """Return a ``mmap.mmap`` of a part of a file, with a file position."""
    mapping = file.map_part(offset, size)
    mapping.seek(position)
    return mapping
