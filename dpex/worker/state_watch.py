"""Detection of changes to a copy of the dataset while batches are made on it."""

from __future__ import annotations

import time
from typing import Any

from dpex import tuning
from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import dump

__all__ = ["StateWatch"]


class StateWatch:
    """Repeated comparison of a dataset copy with its original state.

    The comparison uses the copy's pickle. It misses state that the pickle leaves out: globals of
    a module, and attributes that ``__getstate__`` drops.

    Args:
        dataset: The copy's dataset.
        collate_fn: The copy's ``collate_fn``.
        stream_bytes: Size of the pickle stream that the copy was made from.
        all_bytes: Size of that stream with its buffers.

    Attributes:
        seen_unchanged: Whether the last comparison found no change.
    """

    def __init__(self, dataset: Any, collate_fn: Any, stream_bytes: int, all_bytes: int) -> None:
        self._state = (dataset, collate_fn)
        self._batches = 0
        small = stream_bytes <= tuning.WATCHED_PICKLE_BYTES and all_bytes <= tuning.WATCHED_BYTES
        self._digest = self._take() if small else None
        # The first comparison comes after the first batch.
        self._next_batches = 1
        self._next_look = 0.0
        self.seen_unchanged = self._digest is not None

    def _take(self) -> str | None:
        started = time.perf_counter()
        try:
            # Shared memory is not the state of one worker, so the digest leaves out its content.
            return dump(self._state, "state", Readers(same_host=True)).digest
        except Exception:  # for example, an open file cannot be pickled
            return None
        finally:
            self._looked_batches = self._batches
            ended = time.perf_counter()
            self._next_look = ended + (ended - started) / tuning.COMPARING_SHARE
            self._next_batches = self._batches * tuning.COMPARED_AGAIN

    def made_batch(self) -> bool:
        """Count a batch of the copy.

        Returns:
            Whether the next comparison is due.
        """
        self._batches += 1
        return self._batches >= self._next_batches or time.perf_counter() >= self._next_look

    def look(self) -> bool:
        """Compare the copy with its original state, if it has made a batch since the last time.

        Returns:
            Whether the copy is unchanged; False also if dpex cannot compare it.
        """
        if self.seen_unchanged and self._batches > self._looked_batches:
            self.seen_unchanged = self._take() == self._digest
        return self.seen_unchanged
