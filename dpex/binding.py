"""When a logical worker needs a worker process of its own.

torch makes all batches of a logical worker in one process, on one copy of the dataset. That matters
only if the copy changes: a counter, a generator, an open file. An unchanged copy serves any logical
worker as well as a new one does.

The rule: a loader with a ``worker_init_fn`` is bound. Any other is watched: dataset and
``collate_fn`` are pickled after each batch. It is released if the first batch of each logical
worker has left the bytes as they were, and bound as soon as one has not. So no number of
processors, and no time, decides which.
"""

from __future__ import annotations

import enum
import time
from typing import Any

from dpex.mappings import Readers
from dpex.pickling import dump

__all__ = ["Binding", "StateWatch"]

# Pickling and hashing as much takes some tens of milliseconds. A larger copy stays bound.
_MOST_STREAM_BYTES = 4 << 20
_MOST_BYTES = 64 << 20
# Once its loader is released, a copy is looked at when it has made this many times the batches that
# it had made at the last look, or when that look took this share of the time since.
_BATCHES_FACTOR = 4
_LOOKING_SHARE = 0.003


class Binding(enum.Enum):
    """Which worker processes may make a logical worker's batches."""

    ALWAYS = "always"
    """The one that made its first batch."""

    WATCHED = "watched"
    """The one that made the batch before; any process, if that has left its copy unchanged."""

    RELEASED = "released"
    """Any process, on a copy that all logical workers share there."""

    @property
    def bound(self) -> bool:
        """Whether each logical worker has a process and a copy of its own."""
        return self is not Binding.RELEASED


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
