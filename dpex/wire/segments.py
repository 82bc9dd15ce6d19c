"""Segments: memory that a worker process fills and the training process on its machine reads.

A large tensor of a batch is in a segment from the time its first sample is copied into it. The
block holds only the segment's place, and the batch in the training process is the segment's memory.
So the tensor is copied neither to the object store nor from there.

A segment is an anonymous file (``memfd_create``) of the worker process, which both processes map.
It takes no space in ``/dev/shm``. However the processes end, the kernel frees it as soon as no
process maps it any more.

The protocol hands a segment to one side at a time::

    FREE ----- begin_use ----> FILLING ----- send ----> SENT ----- view ----> MAPPED
      ^                           |                      |                      |
      |<-- the array is freed ----'                      |                      |
      |<------------------- the batch is freed ----------+----------------------'
                                                         |
    DROPPED <--------------------- the run has ended ----'

The worker process fills a segment only in FREE and FILLING. Only the training process ends the
state MAPPED, and no state but FREE leads to a new use. So a batch that the training process has
mapped never changes. If the training process will not read a batch, the worker process drops the
segment: it closes its descriptor, and never fills the memory again. A late ``view`` of a dropped
segment gets either the batch, unchanged, or ``SegmentLostError``. A pool with too many segments
also drops those in FREE and MAPPED. The training process's mapping then keeps the batch.

The first page of a segment holds four words. Each of them only rises:

========  ================  ====================================================================
word      written by        meaning
========  ================  ====================================================================
use       worker process    Number of the current use. Written in FREE, before the memory is filled.
mapped    training process  Last use that the training process has mapped. Written once per use,
                            after the mapping exists and before anything reads it.
released  training process  Last use whose batch and views are freed. Written once per use, after
                            ``mapped``. It makes the segment FREE again.
gone      both              1 if the segment will not be used again. The worker process writes it
                            when it drops the segment. The training process writes it when it
                            frees a batch that a fork of it may still read.
========  ================  ====================================================================

No step depends on two words at one instant, so the protocol needs no atomic operation on two words.
``tests/wire/test_segment_protocol.py`` runs every interleaving of the two processes' steps.

Source:
    ``memfd_create(2)``. ``proc(5)``: ``/proc/<pid>/fd/<n>`` opens a file of another process of the
    same user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpex import tuning
from dpex.log import warn
from dpex.wire.machine import machine, started
from dpex.wire.memory_map import SEGMENT_NAME, address_of
from dpex.wire.pickling import Bytes

__all__ = [
    "OWN_SEGMENTS",
    "Place",
    "SegmentLostError",
    "SegmentPool",
    "SegmentReader",
    "SegmentsUnreadableError",
    "readable_segments",
]

_USE, _MAPPED, _RELEASED, _GONE = range(4)
_HEADER_BYTES = mmap.PAGESIZE


_readable = True


def readable_segments() -> str:
    """Return ``machine()``, or an empty string if this process cannot open others' segments."""
    return machine() if _readable else ""


class SegmentLostError(Exception):
    """The process of a segment has ended or has dropped it, or its batch has been read before."""


class SegmentsUnreadableError(Exception):
    """This process cannot open the segments of a worker process that is alive."""


@dataclass(frozen=True)
class Place:
    """The place of a large tensor's bytes, in a block.

    Attributes:
        pid: The worker process.
        descriptor: Its descriptor of the segment.
        name: The segment's name, which no other segment has.
        use: Number of the use.
        start: Position of the first byte in the segment.
        nbytes: Number of bytes.
    """

    pid: int
    descriptor: int
    name: str
    use: int
    start: int
    nbytes: int


class _Segment:
    """A segment of this process.

    Attributes:
        words: The numbers in its first page.
        data: Its memory.
        start: Address of its memory.
        owner: The pipeline and the run that it was last used for.
        filling: Whether an array of this process may still write to it.
        sent: Whether a block has its place.
    """

    def __init__(self, nbytes: int) -> None:
        self._name = f"{SEGMENT_NAME}{uuid.uuid4().hex}"
        size = _HEADER_BYTES + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.ftruncate(self._descriptor, size)
        self.words, self.data = _mapped(self._descriptor, size)
        self.start = address_of(self.data)
        self.owner = ("", "")
        self.filling = self.sent = False

    @property
    def use(self) -> int:
        """Number of the current or last use."""
        return int(self.words[_USE])

    def begin_use(self, nbytes: int, owner: tuple[str, str]) -> Bytes:
        """Return its first bytes for a new use; unless it is sent, the use ends with the array."""
        self.words[_USE] += 1
        self.owner, self.filling, self.sent = owner, True, False
        memory = _part(self.data, 0, nbytes)
        weakref.finalize(memory, self._end_filling, self.use).atexit = False
        return memory

    def _end_filling(self, use: int) -> None:
        if self.use == use:
            self.filling = False

    def send(self, buffer: Bytes) -> Place:
        """Return the place of a part of its memory, which the training process may map."""
        self.sent = True
        start = address_of(buffer) - self.start
        return Place(os.getpid(), self._descriptor, self._name, self.use, start, int(buffer.nbytes))

    @property
    def is_free(self) -> bool:
        """Whether neither process uses it any more."""
        return not self.filling and (not self.sent or int(self.words[_RELEASED]) == self.use)

    @property
    def is_mapped(self) -> bool:
        """Whether the training process has mapped the batch that this process has sent."""
        return self.sent and not self.filling and int(self.words[_MAPPED]) == self.use

    @property
    def is_unread(self) -> bool:
        """Whether this process has sent the batch, and the training process has not mapped it."""
        return self.sent and not self.filling and int(self.words[_MAPPED]) != self.use


class SegmentPool:
    """The segments of a worker process.

    It is used by one thread at a time. Only ``close`` may be called by another thread.
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._owner = ("", "")
        self._usable = False
        self._lock = threading.RLock()

    def serve(self, pipeline: str, run: str, reader: str) -> SegmentPool | None:
        """Set the run that the next batches belong to.

        Args:
            pipeline: The pipeline that serves the run. The training process reads no more blocks of
                its earlier runs.
            run: Key of the run.
            reader: The training process's ``machine()``; empty if it reads no segments.

        Returns:
            This pool, or None if the training process cannot read the segments.
        """
        self._owner = (pipeline, run)
        self._usable = bool(reader) and reader == machine()
        return self if self._usable else None

    def empty(self, nbytes: int) -> Bytes | None:
        """Return memory of a segment, or None if the memory should be elsewhere.

        The segment is free again if no array uses the memory any more and it was not sent.
        """
        if not self._usable or nbytes < tuning.SEGMENT_BYTES:
            return None
        with self._lock:
            segment = self._free(nbytes)
            return segment.begin_use(nbytes, self._owner) if segment is not None else None

    def place(self, buffer: Bytes) -> Place | None:
        """Return the place of a buffer for the training process, or None if it should be copied.

        A buffer that is not in a segment yet is copied to one.
        """
        if not self._usable:
            return None
        with self._lock:
            start = address_of(buffer)
            for segment in self._segments:
                inside = segment.start <= start < segment.start + segment.data.nbytes
                if inside and segment.filling and not segment.sent:
                    return segment.send(buffer)
            free = self._free(buffer.nbytes)
            if free is None:
                return None
            copy = free.begin_use(buffer.nbytes, self._owner)
            np.copyto(copy, buffer)
            return free.send(copy)

    def _free(self, nbytes: int) -> _Segment | None:
        """Return a free segment, or None if there can be no more."""
        self._segments = [s for s in self._segments if s.filling or not s.words[_GONE]]
        self._drop([s for s in self._segments if s.is_unread and self._has_ended(s.owner)])
        free = [segment for segment in self._segments if segment.is_free]
        most = tuning.MOST_SPARE * nbytes
        found = next((s for s in reversed(free) if nbytes <= s.data.nbytes <= most), None)
        if found is not None:
            free.remove(found)
        while sum(segment.data.nbytes for segment in free) > tuning.IDLE_BYTES:
            self._drop([free.pop(0)])
        if found is not None:
            return found
        if len(self._segments) >= tuning.MOST_SEGMENTS:
            self._drop(free)
            # The training process keeps these batches, and has mapped them.
            self._drop([segment for segment in self._segments if segment.is_mapped])
        if len(self._segments) >= tuning.MOST_SEGMENTS:
            return None
        try:
            segment = _Segment(nbytes)
        except OSError:  # for example, there are too many open files
            return None
        self._segments.append(segment)
        return segment

    def _has_ended(self, owner: tuple[str, str]) -> bool:
        """Return whether the training process reads no more blocks of a pipeline's run."""
        pipeline, run = owner
        return not pipeline or (pipeline == self._owner[0] and run != self._owner[1])

    def _drop(self, segments: list[_Segment]) -> None:
        """Use segments no more. Their memory keeps its content for as long as it is mapped."""
        for segment in segments:
            segment.words[_GONE] = 1
            self._segments.remove(segment)

    def close(self, pipeline: str) -> None:
        """Drop the segments of a closed pipeline, whose blocks nobody reads any more."""
        with self._lock:
            closed = [segment for segment in self._segments if segment.owner[0] == pipeline]
            for segment in closed:
                # A segment that is still being filled is dropped or free once its array is gone.
                segment.owner = ("", "")
            self._drop([segment for segment in closed if not segment.filling])


OWN_SEGMENTS = SegmentPool()
"""The segments of this process, if it is a worker process."""


class SegmentReader:
    """The segments that the training process has mapped for one run."""

    def __init__(self) -> None:
        # By name, the oldest first. Without a lock, because a finalizer may interrupt any call:
        # each operation on the dict is atomic.
        self._idle: dict[str, _Mapping] = {}
        # Since the last trim.
        self._releases = self._released_bytes = 0
        self._open = True

    def view(self, place: Place) -> Bytes:
        """Return the bytes at a place.

        The worker process may use the segment again when neither the array nor a view of it exists.

        Raises:
            SegmentLostError: The worker process has ended or has dropped the segment, or the place
                has been read before.
            SegmentsUnreadableError: This process cannot open segments. ``readable_segments``
                returns an empty string from now on.
        """
        mapping = self._idle.pop(place.name, None) or _open_segment(place)
        if mapping.words[_MAPPED] >= place.use:
            # Its release would let the worker process fill the batch that has been read already.
            raise SegmentLostError(f"use {place.use} of {place.name} has been read already")
        mapping.words[_MAPPED] = place.use
        memory = _part(mapping.data, place.start, place.nbytes)
        reader = os.getpid(), _forks
        weakref.finalize(memory, self._release, mapping, place.use, reader).atexit = False
        return memory

    def release(self, places: Iterable[Place]) -> None:
        """Release the segments of batches that are not read."""
        for place in places:
            with contextlib.suppress(SegmentLostError):
                self.view(place)

    def _release(self, mapping: _Mapping, use: int, reader: tuple[int, int]) -> None:
        pid, forks = reader
        if pid != os.getpid():
            return
        if forks != _forks:
            # A process that was forked meanwhile may still read the batch.
            mapping.words[_GONE] = 1
            return
        mapping.words[_RELEASED] = use
        if self._open and not mapping.words[_GONE]:
            self._idle[mapping.name] = mapping
            self._releases += 1
            self._released_bytes += mapping.data.nbytes
            # The training loop waits for this, so it is not done at each release.
            if (
                self._releases > tuning.TRIM_SHARE * len(self._idle)
                or self._released_bytes > tuning.TRIM_SHARE * tuning.IDLE_MAPPED_BYTES
            ):
                self._trim()

    def _trim(self) -> None:
        """Unmap segments that their worker processes have dropped, and the oldest of too many."""
        self._releases = self._released_bytes = 0
        idle_bytes = 0
        for mapping in reversed(list(self._idle.values())):
            idle_bytes += mapping.data.nbytes
            if mapping.words[_GONE] or idle_bytes > tuning.IDLE_MAPPED_BYTES:
                self._idle.pop(mapping.name, None)

    def close(self) -> None:
        """Unmap the segments that no batch uses."""
        self._open = False
        self._idle.clear()


class _Mapping:
    """A segment of another process, as this process has mapped it.

    Attributes:
        name: Its name.
        words: The numbers in its first page.
        data: Its memory.
    """

    def __init__(self, place: Place) -> None:
        self.name = place.name
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Another process may have the same id now, or another file the same descriptor.
            if place.name not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                raise FileNotFoundError(f"{path} is not {place.name}")
            self.words, self.data = _mapped(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


def _mapped(descriptor: int, size: int) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], Bytes]:
    """Map a segment, and return the numbers in its first page and its memory."""
    # Python's mmap would keep a descriptor open for as long as the mapping.
    path = f"/proc/self/fd/{descriptor}"
    try:
        mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error
    memory = mapped.numpy()
    return memory[:_HEADER_BYTES].view(np.uint64), memory[_HEADER_BYTES:]


def _part(data: Bytes, start: int, nbytes: int) -> Bytes:
    # Not a slice: in numpy, a view of a slice keeps the sliced array alive and not the slice.
    return np.frombuffer(data.data[start : start + nbytes], np.uint8)


_mapped_now: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def _open_segment(place: Place) -> _Mapping:
    if len(_mapped_now) >= tuning.MOST_MAPPED:
        kept = OSError(f"it has mapped {tuning.MOST_MAPPED:,} batches that the program keeps")
        _stop_segments(kept)
        raise SegmentsUnreadableError(str(kept))
    try:
        mapping = _Mapping(place)
        _mapped_now.add(mapping)
        return mapping
    except FileNotFoundError as error:
        raise SegmentLostError(str(error)) from error
    except OSError as error:
        # The files of an ending process can be closed while it still seems alive.
        deadline = time.monotonic() + tuning.PROCESS_END_S
        while started(place.pid):
            if time.monotonic() > deadline:
                _stop_segments(error)
                raise SegmentsUnreadableError(str(error)) from error
            time.sleep(0.01)
        raise SegmentLostError(str(error)) from error


def _stop_segments(error: Exception) -> None:
    global _readable
    if _readable:
        _readable = False
        warn(
            "batches are copied through Ray's object store, because this process cannot map the "
            f"memory of its worker processes: {error}"
        )


_forks = 0
"""How often this process, or the processes that it is a fork of, have forked."""


def _note_fork() -> None:
    global _forks
    _forks += 1


# Counted twice, because other functions that are called before a fork may run Python code.
os.register_at_fork(before=_note_fork, after_in_parent=_note_fork)
