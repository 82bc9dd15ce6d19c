"""Pickles that refer to the file of mapped memory and do not hold the memory's content.

The memory of a tensor or array may be mapped from a file, or shared by processes. Then the pickle
holds the file's identity and the memory's offset in it. The process that unpickles maps the same
file.

- ``Readers`` describes the processes that unpickle.
- ``Mappings.reduce`` returns the reduction of an object, or None if the pickle holds its content.
- ``Mappings.copied`` lists the objects in shared memory that the readers get as copies.

On a system without ``/proc`` the pickle holds the content of all memory.
"""

from __future__ import annotations

import bisect
import contextlib
import copyreg
import ctypes
import functools
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context as multiprocessing_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dpex import tuning
from dpex.wire.machine import mounts
from dpex.wire.mapped_files import (
    MappedFile,
    MappedStorage,
    rebuild_arena,
    rebuild_array,
    rebuild_arrow_buffer,
    rebuild_ctypes,
    rebuild_mmap,
    rebuild_semaphore,
    rebuild_shared_memory,
    rebuild_storage,
    rebuild_tensor,
    set_attributes,
)
from dpex.wire.memory_map import SEGMENT_NAME, Span, address_of, spans
from dpex.wire.shared_views import bounds_of

__all__ = ["Mappings", "Readers", "UnsharedMemoryError"]

_DELETED = " (deleted)"
# Paths of named shared memory, which only this node has: torch, multiprocessing, semaphores.
_NAMED_MEMORY = ("/dev/shm/torch_", "/dev/shm/psm_", "/dev/shm/pym-", "/dev/shm/sem.")
# The files of Ray's object store, whose objects never change: in memory, or unlinked on disk.
_OBJECT_STORE = "plasma"
_SEMAPHORE_BYTES = ctypes.sizeof(ctypes.c_void_p) * 4

# Descriptors that this process keeps open so that other processes can map the same memory.
_opened: dict[tuple[str, int], int] = {}


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


@dataclass(frozen=True)
class _Place:
    """The location of a file that this process has mapped, for other processes.

    Attributes:
        path: The file's path; None if it has no name.
        descriptor: A descriptor of the file in this process; None if it has none.
        status: Device and inode as ``stat`` returns them; None if the file cannot be opened.
        size: The file's size in bytes.
    """

    path: str | None
    descriptor: int | None
    status: tuple[int, int] | None
    size: int

    @property
    def reachable(self) -> bool:
        """Whether readers on this node can map the file."""
        return self.path is not None or self.descriptor is not None


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
        self._places: dict[tuple[str, int], _Place] = {}
        self._files: dict[tuple[Any, ...], MappedFile] = {}
        self._storages: dict[tuple[int, int], MappedStorage] = {}
        self._anonymous: dict[int, int] | None = None
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
        mapped = {span.file for span in found}
        for file in [file for file in _opened if file not in mapped]:
            descriptor = _opened.pop(file, None)
            if descriptor is not None:
                os.close(descriptor)
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
        large = span.end - span.start >= tuning.MAPPED_BYTES
        if not span.shared and (not large or self._is_changed(span)):
            return None
        place = self._place(span)
        reachable = place.reachable
        if not self._readers.same_host:
            reachable = place.path is not None and not place.path.startswith(_NAMED_MEMORY)
            if not writes and not large:
                return None
        offset = address - span.start + span.offset
        if not reachable or offset + size > place.size:
            if writes:
                self._refuse(obj, writeable=writeable)
            return None
        self._used.add(span)
        return self._file(span, place), offset

    def _refuse(self, obj: Any, *, writeable: bool) -> None:
        epoch = any(obj is epoch for epoch in self._epochs)
        if epoch and self._readers.read_once:
            return
        if not writeable:
            self.copied.append(obj)
        elif epoch:
            raise UnsharedMemoryError(
                "set_epoch() cannot reach persistent workers on other nodes. Pass "
                "persistent_workers=False: each iteration then reads the epoch as it is at iter()"
            )
        elif self._readers.same_host:
            raise UnsharedMemoryError(
                "its shared memory has no name and no descriptor, so workers cannot map it. Create "
                "it with multiprocessing.get_context('spawn'), or use workers that are forks of "
                "this process (head_address='processes')"
            )
        else:
            raise UnsharedMemoryError(
                "its memory is shared between processes of this machine, but workers may run on "
                "other nodes and would write to copies. Use a memory-mapped file that every node "
                "has (numpy.memmap), or workers on this machine (head_address='processes')"
            )

    def _file(self, span: Span, place: _Place) -> MappedFile:
        key = (span.file, span.shared, span.writable)
        if key not in self._files:
            self._files[key] = MappedFile(
                path=place.path,
                pid=os.getpid(),
                descriptor=place.descriptor,
                status=place.status,
                file=span.file,
                size=place.size,
                shared=span.shared,
                writable=span.writable,
                host=mounts(),
            )
        return self._files[key]

    def _is_changed(self, span: Span) -> bool:
        """Return whether this process has written to a private mapping."""
        if self._anonymous is None:
            try:
                self._anonymous = _anonymous_bytes()
            except OSError:  # unknown: pickle the content
                return True
        return any(
            size and span.start <= start < span.end for start, size in self._anonymous.items()
        )

    def _place(self, span: Span) -> _Place:
        if span.file not in self._places:
            self._places[span.file] = self._look_for(span)
        return self._places[span.file]

    def _look_for(self, span: Span, path: str | None = None) -> _Place:
        if path is None and not span.path.endswith(_DELETED):
            path = span.path
        found = _status_of(path, span) if path else None
        if found is not None:
            status = found.st_dev, found.st_ino
            # Include a descriptor: another file may have the path when a reader opens it.
            return _Place(path, self._open_files.get(status), status, found.st_size)
        descriptor = self._descriptor_of(span)
        if descriptor is not None:
            found = os.fstat(descriptor)
            return _Place(None, descriptor, (found.st_dev, found.st_ino), found.st_size)
        return _Place(None, None, None, 0)

    @functools.cached_property
    def _open_files(self) -> dict[tuple[int, int], int]:
        return _open_files()

    def _descriptor_of(self, span: Span) -> int | None:
        """Return a descriptor of an unnamed file that this process has mapped, or None."""
        if span.file in _opened:
            return _opened[span.file]
        descriptor = self._open_files.get(_as_stat(span))
        if descriptor is not None or not span.shared:
            return descriptor
        with contextlib.suppress(OSError):  # map_files needs a privilege
            name = f"/proc/self/map_files/{span.start:x}-{span.end:x}"
            descriptor = os.open(name, os.O_RDWR if span.writable else os.O_RDONLY)
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) == _as_stat(span):
                _opened[span.file] = descriptor
                return descriptor
            os.close(descriptor)
        return None

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
        mapped = self._storage(tensor, tensor.untyped_storage())
        if mapped is None:
            return None
        return rebuild_tensor, (
            mapped,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )

    def _storage(self, obj: Any, storage: torch.UntypedStorage) -> MappedStorage | None:
        address, size = storage.data_ptr(), storage.nbytes()
        if (address, size) in self._storages:
            return self._storages[address, size]
        by_torch = storage.is_shared()
        if by_torch and self._span(address, size) is None:
            self._forget_spans()  # share_memory_() was called after _spans was read
        found = self._find(obj, address, size, writeable=True)
        if found is None:
            return None
        mapped = self._storages[address, size] = MappedStorage(*found, size, by_torch=by_torch)
        return mapped

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        mapped = self._storage(storage, storage) if storage.device.type == "cpu" else None
        return None if mapped is None else (rebuild_storage, (mapped,))

    def _reduce_arrow_buffer(self, buffer: Any) -> Any:
        if not buffer.is_cpu:
            return None
        found = self._find(buffer, buffer.address, buffer.size, writeable=buffer.is_mutable)
        return None if found is None else (rebuild_arrow_buffer, (*found, buffer.size))

    def _reduce_ctypes(self, obj: Any) -> Any:
        size = ctypes.sizeof(obj)
        found = self._find(obj, ctypes.addressof(obj), size, writeable=True)
        if found is None or not found[0].writable:
            return None
        element: Any = type(obj)
        lengths: list[int] = []
        while issubclass(element, ctypes.Array):
            lengths.insert(0, element._length_)
            element = element._type_
        return rebuild_ctypes, (element, tuple(lengths), *found)

    def _reduce_mmap(self, mapping: mmap.mmap) -> Any:
        try:
            memory = np.frombuffer(mapping, np.uint8)
        except (ValueError, BufferError):  # it is closed
            return None
        found = self._find(mapping, address_of(memory), memory.nbytes, writeable=True)
        if found is None or (found[0].descriptor is None and found[0].path is None):
            return None
        return rebuild_mmap, (*found, memory.nbytes, mapping.tell())

    def _reduce_shared_memory(self, shared: Any) -> Any:
        if shared.buf is None:
            return None
        address = address_of(np.frombuffer(shared.buf, np.uint8))
        found = self._find(shared, address, shared.size, writeable=True)
        if found is None or found[1]:
            return None
        # _name includes the leading slash, which the property ``name`` omits.
        return rebuild_shared_memory, (type(shared), shared._name, found[0], shared.size)

    def _reduce_arena(self, arena: Any) -> Any:
        address = address_of(np.frombuffer(arena.buffer, np.uint8))
        found = self._find(arena, address, arena.size, writeable=True)
        return None if found is None else (rebuild_arena, (type(arena), *found, arena.size))

    def _reduce_semaphore(self, lock: Any) -> Any:
        handle = lock._semlock.handle
        span, name = self._span(handle, _SEMAPHORE_BYTES), lock._semlock.name
        if span is not None and name is not None:
            # The mapping has the name that the C library gave the file at first, and has removed.
            path = f"/dev/shm/sem.{name.removeprefix('/')}"
            self._places.setdefault(span.file, self._look_for(span, path))
        found = self._find(lock, handle, _SEMAPHORE_BYTES, writeable=True)
        if found is None:
            return None
        return rebuild_semaphore, (type(lock), *found, lock._semlock.kind, lock._semlock.maxvalue)

    def _reduce_condition(self, condition: Any) -> Any:
        if not self._spans:
            return None
        before: Any = multiprocessing_context.get_spawning_popen()
        # Condition.__getstate__ raises unless multiprocessing is spawning a process.
        multiprocessing_context.set_spawning_popen(before or cast(Any, self))
        try:
            state = condition.__getstate__()
        finally:
            multiprocessing_context.set_spawning_popen(before)
        return copyreg.__newobj__, (type(condition),), state  # type: ignore[attr-defined]

    def _reduce_synchronized(self, synchronized: Any) -> Any:
        from multiprocessing import sharedctypes

        if not self._spans:
            return None
        return sharedctypes.synchronized, (synchronized.get_obj(), synchronized.get_lock())

    def _note_epoch(self, stream: Any) -> None:
        """Record the epoch of a Hugging Face stream, which is in shared memory."""
        self._epochs.append(getattr(stream, "_epoch", None))


_REDUCERS: dict[str, Callable[[Mappings, Any], Any]] = {
    "_ctypes._CData": Mappings._reduce_ctypes,
    "datasets.iterable_dataset.IterableDataset": Mappings._note_epoch,
    "mmap.mmap": Mappings._reduce_mmap,
    "multiprocessing.heap.Arena": Mappings._reduce_arena,
    "multiprocessing.shared_memory.SharedMemory": Mappings._reduce_shared_memory,
    "multiprocessing.sharedctypes.SynchronizedBase": Mappings._reduce_synchronized,
    "multiprocessing.synchronize.Condition": Mappings._reduce_condition,
    "multiprocessing.synchronize.SemLock": Mappings._reduce_semaphore,
    "pyarrow.lib.Buffer": Mappings._reduce_arrow_buffer,
    "torch.storage.UntypedStorage": Mappings._reduce_storage,
}


def _is_foreign(span: Span) -> bool:
    """Return whether a mapping belongs to Ray, to a device such as a GPU, or is a segment.

    A segment is shared memory only for dpex. For the user, it is a batch's own memory.
    """
    if span.path.startswith(f"/memfd:{SEGMENT_NAME}"):
        return True
    if span.path.startswith("/dev/") and not span.path.startswith("/dev/shm/"):
        # CUDA's pinned memory and anonymous shared memory have the same path, /dev/zero.
        return not span.path.startswith("/dev/zero") or torch.cuda.is_initialized()
    return Path(span.path).name.startswith(_OBJECT_STORE) and (
        span.path.startswith("/dev/shm/") or span.path.endswith(_DELETED)
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


def _anonymous_bytes() -> dict[int, int]:
    """Return the number of anonymous bytes, in memory or swapped, of each mapping by address."""
    sizes: dict[int, int] = {}
    start = 0
    for line in Path("/proc/self/smaps").read_bytes().splitlines():
        name, _, value = line.partition(b":")
        if name in {b"Anonymous", b"Swap"}:
            sizes[start] = sizes.get(start, 0) + int(value.split()[0])
        elif b"-" in line.partition(b" ")[0]:
            start = int(line.partition(b"-")[0], 16)
    return sizes


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


def _open_files() -> dict[tuple[int, int], int]:
    """Return this process's lowest descriptor of each file, by device and inode."""
    found: dict[tuple[int, int], int] = {}
    for name in sorted(map(int, os.listdir("/proc/self/fd"))):  # noqa: PTH208 - only names
        with contextlib.suppress(OSError):
            status = os.fstat(name)
            found.setdefault((status.st_dev, status.st_ino), name)
    return found
