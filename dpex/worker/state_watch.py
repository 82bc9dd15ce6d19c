"""Whether making batches changes the copy that they are made on."""

from __future__ import annotations

import time
from typing import Any

from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import dump

__all__ = ["StateWatch"]

# Pickling and hashing as much takes some tens of milliseconds. A larger copy stays bound.
_MOST_STREAM_BYTES = 4 << 20
_MOST_BYTES = 64 << 20
# Once its loader is released, a copy is looked at when it has made this many times the batches that
# it had made at the last look, or when that look took this share of the time since.
_BATCHES_FACTOR = 4
_LOOKING_SHARE = 0.003


class StateWatch:
    """Looks whether making batches changes a copy.

    A change shows in the copy's pickle. State that the pickle leaves out does not show: globals of
    a module, and what ``__getstate__`` drops.

    Args:
        dataset: The copy's dataset.
        collate_fn: The copy's ``collate_fn``.
        stream_bytes: Size of the pickle stream that the copy was made from.
        all_bytes: The same with its buffers.

    Attributes:
        seen_unchanged: Whether the last look found the copy as it was made.
    """

    def __init__(self, dataset: Any, collate_fn: Any, stream_bytes: int, all_bytes: int) -> None:
        self._state = (dataset, collate_fn)
        self._batches = 0
        watchable = stream_bytes <= _MOST_STREAM_BYTES and all_bytes <= _MOST_BYTES
        self._digest = self._take() if watchable else None
        # At its first batch.
        self._next_batches = 1
        self._next_look = 0.0
        self.seen_unchanged = self._digest is not None

    def _take(self) -> str | None:
        started = time.perf_counter()
        try:
            # What other processes share is no worker's own state, so its content does not count.
            return dump(self._state, "state", Readers(same_host=True)).digest
        except Exception:  # an open file, say, which no other process can have
            return None
        finally:
            self._looked_batches = self._batches
            ended = time.perf_counter()
            self._next_look = ended + (ended - started) / _LOOKING_SHARE
            self._next_batches = self._batches * _BATCHES_FACTOR

    def made_batch(self) -> bool:
        """Count a batch of the copy.

        Returns:
            Whether to look now.
        """
        self._batches += 1
        return self._batches >= self._next_batches or time.perf_counter() >= self._next_look

    def look(self) -> bool:
        """Compare the copy with what it was.

        Returns:
            Whether it is unchanged; False also if dpex cannot watch it.
        """
        if self.seen_unchanged and self._batches > self._looked_batches:
            self.seen_unchanged = self._take() == self._digest
        return self.seen_unchanged
