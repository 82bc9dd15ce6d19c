"""Pickles that refer to the file of mapped memory and do not hold the memory's content.

The memory of a tensor or array may be mapped from a file. Then the pickle holds the file's path and
the memory's offset in it. The process that unpickles maps the same file. Memory that this process
shares with others without such a file, as ``share_memory_()`` and multiprocessing do, cannot reach
the processes of a Ray.

- ``Readers`` describes the processes that unpickle.
- ``Mappings.reduce`` returns the reduction of an object, or None if the pickle holds its content.
- ``Mappings.copied`` lists the objects in shared memory that the readers get as copies.

On a system without ``/proc`` the pickle holds the content of all memory.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpex import tuning
from dpex.wire.machine import machine
from dpex.wire.mapped_files import (
    MappedFile,
    rebuild_array,
    rebuild_arrow_buffer,
    rebuild_mmap,
    rebuild_storage,
    rebuild_tensor,
    set_attributes,
)
from dpex.wire.memory_map import SEGMENT_NAME, Span, address_of, spans
from dpex.wire.shared_views import bounds_of

__all__ = ["Mappings", "Readers", "UnsharedMemoryError"]

_DELETED = " (deleted)"
_SHARED_MEMORY = "/dev/shm/"
# Files of shared memory that torch and multiprocessing delete with their last process.
_NAMED_MEMORY = tuple(_SHARED_MEMORY + name for name in ("torch_", "psm_", "pym-", "sem."))
# The files of Ray's object store, whose objects never change: in memory, or unlinked on disk.
_OBJECT_STORE = "plasma"


class UnsharedMemoryError(RuntimeError):
    """Raised if the readers cannot share memory that this process shares for writing."""


@dataclass(frozen=True)
class Readers:
    """The processes that will unpickle.

    Attributes:
        same_host: Whether all of them run on this node.
        read_once: Whether they unpickle again for every iteration.
    """

    same_host: bool
    read_once: bool = True


class Mappings:
    """The mappings of this process that one pickle refers to.

    Args:
        readers: The processes that will unpickle.

    Attributes:
        copied: Objects in shared memory that the readers get as copies.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self.copied: list[Any] = []
        self._used: set[Span] = set()
        self._statuses: dict[tuple[str, int], os.stat_result | None] = {}
        self._files: dict[tuple[Any, ...], MappedFile] = {}
        self._written: list[int] | None = None
        # Shared epoch tensors. Only the training process writes to them, between iterations.
        self._epochs: list[Any] = []
        self._reducers: dict[type, Callable[[Any], Any] | None] = {}

    def reduce(self, obj: Any) -> Any:
        """Return an object's reduction as ``__reduce__`` does, or None to pickle its content.

        Raises:
            UnsharedMemoryError: The object is writable, and the readers would get a copy.
        """
        kind = type(obj)
        if kind not in self._reducers:
            self._reducers[kind] = self._reducer_of(kind)
        reducer = self._reducers[kind]
        return None if reducer is None else reducer(obj)

    @property
    def hold(self) -> bool:
        """Whether the mappings that the pickle refers to still exist."""
        if not self._used:
            return True
        now = {(span.file, span.start): span.end for span in _merged(spans())}
        return all(now.get((s.file, s.start), 0) >= s.end for s in self._used)

    def _reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        if kind in {np.ndarray, np.memmap, np.recarray}:
            return self._reduce_array
        if kind is torch.Tensor:
            return self._reduce_tensor
        for base in kind.__mro__:
            reducer = _REDUCERS.get(f"{base.__module__}.{base.__qualname__}")
            if reducer is not None:
                return lambda obj: reducer(self, obj)
        return None

    # --- memory ---------------------------------------------------------------------------------

    @functools.cached_property
    def _spans(self) -> list[Span]:
        try:
            found = spans()
        except OSError:  # a system without /proc
            found = []
        return _merged(found)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [span.start for span in self._spans]

    def _forget_spans(self) -> None:
        for name in ("_spans", "_starts"):
            vars(self).pop(name, None)

    def _span(self, address: int, size: int) -> Span | None:
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0 or self._spans[number].end < address + size:
            return None
        return self._spans[number]

    def _find(
        self, obj: Any, address: int, size: int, *, writeable: bool
    ) -> tuple[MappedFile, int] | None:
        """Return the file that memory is mapped from, and the memory's offset in the file.

        Args:
            obj: The object that uses the memory.
            address: Start address of the memory.
            size: Its size in bytes.
            writeable: Whether the user can write to the memory through ``obj``.

        Returns:
            None if the pickle must hold the content of ``obj``.

        Raises:
            UnsharedMemoryError: The readers can neither map the memory nor use a copy.
        """
        span = self._span(address, size)
        if span is None or not size or _is_foreign(span):
            return None
        writes = span.shared and span.writable
        large = span.end - span.start >= tuning.LARGE_ARRAY_BYTES
        if not span.shared and (not large or self._is_changed(span)):
            return None
        if not (self._readers.same_host or writes or large):
            return None
        status, offset = self._status(span), address - span.start + span.offset
        if status is None or offset + size > status.st_size:
            if writes:
                self._refuse(obj, writeable=writeable)
            return None
        self._used.add(span)
        return self._file(span, status), offset

    def _refuse(self, obj: Any, *, writeable: bool) -> None:
        epoch = any(obj is epoch for epoch in self._epochs)
        if epoch and self._readers.read_once:
            return
        if not writeable:
            self.copied.append(obj)
        elif epoch:
            raise UnsharedMemoryError(
                "set_epoch() cannot reach persistent workers on a Ray. Pass "
                "persistent_workers=False: each iteration then reads the epoch as it is at iter()"
            )
        else:
            raise UnsharedMemoryError(
                "its memory is shared with other processes, and workers on a Ray would write to "
                "copies. Use a memory-mapped file that every node has (numpy.memmap), or workers "
                "that are forks of this process (head_address='processes')"
            )

    def _file(self, span: Span, status: os.stat_result) -> MappedFile:
        key = (span.file, span.shared, span.writable)
        if key not in self._files:
            self._files[key] = MappedFile(
                path=span.path,
                pid=os.getpid(),
                status=(status.st_dev, status.st_ino),
                size=status.st_size,
                shared=span.shared,
                writable=span.writable,
                host=machine(),
            )
        return self._files[key]

    def _is_changed(self, span: Span) -> bool:
        """Return whether this process has written to a private mapping."""
        if self._written is None:
            try:
                self._written = _written_mappings()
            except OSError:  # unknown: pickle the content
                return True
        first = bisect.bisect_left(self._written, span.start)
        return first < len(self._written) and self._written[first] < span.end

    def _status(self, span: Span) -> os.stat_result | None:
        """Return the status of a mapped file; None if no other process can open it by its path."""
        if span.file not in self._statuses:
            named = not span.path.endswith(_DELETED) and not span.path.startswith(_NAMED_MEMORY)
            self._statuses[span.file] = _status_of(span.path, span) if named else None
        return self._statuses[span.file]

    # --- kinds of objects -----------------------------------------------------------------------

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        bounds = bounds_of(array)
        if array.dtype.hasobject or bounds is None or self._span(address_of(array), 1) is None:
            return None
        low, high = bounds
        found = self._find(array, low, high - low, writeable=array.flags.writeable)
        if found is None:
            return None
        file, offset = found
        arguments = (
            type(array).__name__,
            file,
            offset + address_of(array) - low,
            array.dtype,
            array.shape,
            array.strides,
            array.flags.writeable,
        )
        # A memmap and a recarray have attributes: numpy's own, and those that the user has set.
        attributes = {n: v for n, v in getattr(array, "__dict__", {}).items() if n != "_mmap"}
        return rebuild_array, arguments, attributes or None, None, None, set_attributes

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
            return None
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not tensor.is_leaf:
            return None
        storage = tensor.untyped_storage()
        if self._find_storage(tensor, storage) is None:
            return None
        return rebuild_tensor, (
            storage,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )

    def _find_storage(
        self, obj: Any, storage: torch.UntypedStorage
    ) -> tuple[MappedFile, int] | None:
        address, size = storage.data_ptr(), storage.nbytes()
        if storage.is_shared() and self._span(address, size) is None:
            self._forget_spans()  # share_memory_() was called after _spans was read
        return self._find(obj, address, size, writeable=True)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        found = self._find_storage(storage, storage) if storage.device.type == "cpu" else None
        return None if found is None else (rebuild_storage, (*found, storage.nbytes()))

    def _reduce_arrow_buffer(self, buffer: Any) -> Any:
        if not buffer.is_cpu:
            return None
        found = self._find(buffer, buffer.address, buffer.size, writeable=buffer.is_mutable)
        return None if found is None else (rebuild_arrow_buffer, (*found, buffer.size))

    def _refuse_ctypes(self, obj: Any) -> None:
        self._find(obj, ctypes.addressof(obj), ctypes.sizeof(obj), writeable=True)

    def _refuse_shared(self, obj: Any) -> None:
        """Refuse an object of multiprocessing that is nothing but shared memory."""
        if self._spans:
            self._refuse(obj, writeable=True)

    def _reduce_mmap(self, mapping: mmap.mmap) -> Any:
        try:
            memory = np.frombuffer(mapping, np.uint8)
        except (ValueError, BufferError):  # it is closed
            return None
        found = self._find(mapping, address_of(memory), memory.nbytes, writeable=True)
        if found is None:
            return None
        return rebuild_mmap, (*found, memory.nbytes, mapping.tell())

    def _note_epoch(self, stream: Any) -> None:
        """Record the epoch of a Hugging Face stream, which is in shared memory."""
        self._epochs.append(getattr(stream, "_epoch", None))


_REDUCERS: dict[str, Callable[[Mappings, Any], Any]] = {
    "_ctypes._CData": Mappings._refuse_ctypes,
    "datasets.iterable_dataset.IterableDataset": Mappings._note_epoch,
    "mmap.mmap": Mappings._reduce_mmap,
    "multiprocessing.shared_memory.SharedMemory": Mappings._refuse_shared,
    "multiprocessing.sharedctypes.SynchronizedBase": Mappings._refuse_shared,
    "multiprocessing.synchronize.Condition": Mappings._refuse_shared,
    "multiprocessing.synchronize.SemLock": Mappings._refuse_shared,
    "pyarrow.lib.Buffer": Mappings._reduce_arrow_buffer,
    "torch.storage.UntypedStorage": Mappings._reduce_storage,
}


def _is_foreign(span: Span) -> bool:
    """Return whether a mapping belongs to Ray, to a device such as a GPU, or is a segment.

    A segment is shared memory only for dpex. For the user, it is a batch's own memory.
    """
    if span.path.startswith(f"/memfd:{SEGMENT_NAME}"):
        return True
    if span.path.startswith("/dev/") and not span.path.startswith(_SHARED_MEMORY):
        # CUDA's pinned memory and anonymous shared memory have the same path, /dev/zero.
        return not span.path.startswith("/dev/zero") or torch.cuda.is_initialized()
    return Path(span.path).name.startswith(_OBJECT_STORE) and (
        span.path.startswith(_SHARED_MEMORY) or span.path.endswith(_DELETED)
    )


def _merged(found: list[Span]) -> list[Span]:
    """Join adjacent mappings of one file, and omit memory without a file."""
    merged: list[Span] = []
    for span in found:
        if not span.inode:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.file, last.shared, last.writable) == (span.file, span.shared, span.writable)
            and last.end == span.start
            and last.offset + last.end - last.start == span.offset
        ):
            merged[-1] = last._replace(end=span.end)
        else:
            merged.append(span)
    return merged


def _written_mappings() -> list[int]:
    """Return the addresses of the mappings that have anonymous bytes, in memory or swapped."""
    written: list[int] = []
    start = 0
    for line in Path("/proc/self/smaps").read_bytes().splitlines():
        name, _, value = line.partition(b":")
        if name in {b"Anonymous", b"Swap"}:
            if int(value.split()[0]):
                written.append(start)
        elif b"-" in line.partition(b" ")[0]:
            start = int(line.partition(b"-")[0], 16)
    return written


def _status_of(path: str, span: Span) -> os.stat_result | None:
    """Return the status of the file at a path, or None if it is not the mapped file."""
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):
            return None
        if (found.st_dev, found.st_ino) == _as_stat(span):
            return found
        # On some file systems /proc/self/maps and stat() report different devices.
        with (
            Path(path).open("rb") as file,
            mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ) as mapping,
        ):
            address = address_of(np.frombuffer(mapping, np.uint8))
            again = next(s for s in spans() if s.start <= address < s.end)
            return os.fstat(file.fileno()) if again.file == span.file else None
    except (OSError, ValueError, BufferError):
        return None


def _as_stat(span: Span) -> tuple[int, int]:
    """Return a file's device and inode as ``stat`` returns them on most file systems."""
    major, minor = (int(number, 16) for number in span.device.split(":"))
    return os.makedev(major, minor), span.inode
