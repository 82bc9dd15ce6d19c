"""A pool that reuses the memory of released batches for later batches."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from dpex import tuning
from dpex.wire.pickling import Bytes, own_copy

__all__ = ["MemoryPool"]


class MemoryPool:
    """A pool of memory for large arrays.

    Without the pool, the memory of a large array returns to the kernel when its batch is freed. The
    next batch then waits until the kernel has zeroed the same amount, page by page. Torch's
    allocator of pinned memory keeps freed memory for the same reason.

    The pool keeps at most ``tuning.IDLE_BYTES`` idle bytes, or one piece of memory that is larger.
    """

    def __init__(self) -> None:
        self._idle: list[Bytes] = []
        # Never block on this lock: a finalizer may run while this thread holds it, and a fork may
        # inherit it locked. If it is locked, memory is allocated or freed outside the pool.
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Number of bytes that no array uses."""
        return sum(memory.nbytes for memory in self._idle)

    def copy(self, buffer: Bytes) -> Bytes:
        """Return a copy of a flat array.

        Args:
            buffer: The array.

        Returns:
            The copy. The pool can reuse its memory when neither the copy nor a view of it exists.
        """
        if buffer.nbytes < tuning.REUSED_BYTES:
            return own_copy(buffer)
        memory = self._take(buffer.nbytes)
        if memory is None:
            memory = own_copy(buffer)
        else:
            np.copyto(memory[: buffer.nbytes], buffer)
        # Not a slice: in numpy, a view of a slice keeps the sliced array alive and not the slice.
        copy = np.frombuffer(memory.data[: buffer.nbytes], dtype=np.uint8)
        weakref.finalize(copy, self._give_back, memory).atexit = False
        return copy

    def _take(self, nbytes: int) -> Bytes | None:
        if self._lock.acquire(blocking=False):
            try:
                for place in reversed(range(len(self._idle))):
                    if nbytes <= self._idle[place].nbytes <= tuning.MOST_SPARE * nbytes:
                        return self._idle.pop(place)
            finally:
                self._lock.release()
        return None

    def _give_back(self, memory: Bytes) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._idle.append(memory)
                while len(self._idle) > 1 and self.idle_bytes > tuning.IDLE_BYTES:
                    del self._idle[0]
            finally:
                self._lock.release()
