"""Memory of batches that are gone, for those to come."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from dpex.wire.pickling import Bytes, own_copy

__all__ = ["MemoryPool"]

# malloc has lists of its own for what is smaller.
_LEAST_BYTES = 1 << 20
# Memory may be larger than what is put there, by this factor.
_MOST_SPARE = 1.25


class MemoryPool:
    """Lends memory to arrays, and has it back when nobody holds them any more.

    Without it a large array's memory goes back to the kernel with its batch, and the next batch
    waits until as much has been filled with zeros, page by page. Torch's allocator of pinned memory
    keeps what it has for the same reason.

    Args:
        most_bytes: How much it keeps that nobody uses; one piece of any size it always keeps.
    """

    def __init__(self, most_bytes: int = 128 << 20) -> None:
        self._most_bytes = most_bytes
        self._idle: list[Bytes] = []
        # Nobody waits for it: an array may go wherever the garbage collector runs, in here as well,
        # and a fork may find it taken for good. Memory is fresh then, or goes back to the kernel.
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody uses."""
        return sum(memory.nbytes for memory in self._idle)

    def copy(self, buffer: Bytes) -> Bytes:
        """Copy an array.

        Args:
            buffer: The array, flat.

        Returns:
            The copy. Once neither it nor a view of it is left, its memory serves again.
        """
        if buffer.nbytes < _LEAST_BYTES:
            return own_copy(buffer)
        memory = self._take(buffer.nbytes)
        if memory is None:
            memory = own_copy(buffer)
        else:
            np.copyto(memory[: buffer.nbytes], buffer)
        # Not a slice: a view of a slice holds, in numpy, what was sliced and not the slice.
        lent = np.frombuffer(memory.data[: buffer.nbytes], dtype=np.uint8)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent

    def _take(self, nbytes: int) -> Bytes | None:
        if self._lock.acquire(blocking=False):
            try:
                for place in reversed(range(len(self._idle))):
                    if nbytes <= self._idle[place].nbytes <= _MOST_SPARE * nbytes:
                        return self._idle.pop(place)
            finally:
                self._lock.release()
        return None

    def _give_back(self, memory: Bytes) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._idle.append(memory)
                while len(self._idle) > 1 and self.idle_bytes > self._most_bytes:
                    del self._idle[0]
            finally:
                self._lock.release()
