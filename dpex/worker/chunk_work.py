"""The work of a worker process on one chunk after another."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dpex.protocol.chunks import AssignedChunk, Chunk, Entry
from dpex.protocol.worker_loop import Ask, MadeBatch, WorkerLoop
from dpex.wire.block_format import BlockWriter
from dpex.wire.timings import Costs
from dpex.worker.iterable import stream_chunk
from dpex.worker.map_style import fetch_chunk

if TYPE_CHECKING:
    from dpex.wire.segments import SegmentPool
    from dpex.worker.map_style import Job

__all__ = ["ChunkWork"]


class ChunkWork:
    """The work on one chunk after another, whose steps a ``WorkerLoop`` decides.

    Args:
        loop: The loop.
        where: Node and process, for error messages.
        make_copy: Function that returns a new copy of the job, which nothing else uses.
        ask: Function that sends a request for the next chunk.
        note_change: Function that reports a released logical worker whose batch has changed its
            copy.
        may_read_again: Whether a bound logical worker may read the samples of a batch again.

    Attributes:
        writer: The writer of the present block.
    """

    def __init__(
        self,
        loop: WorkerLoop,
        where: str,
        make_copy: Callable[[], Job],
        ask: Callable[[Ask], None],
        note_change: Callable[[int], None] = lambda _: None,
        *,
        may_read_again: bool = False,
    ) -> None:
        self._loop = loop
        self._where = where
        self._make_copy = make_copy
        self._ask = ask
        self._note_change = note_change
        self._may_read_again = may_read_again
        self.writer = BlockWriter("", 0)
        self._batches: Iterator[tuple[Entry, Costs]] = iter(())

    def batches(
        self, chunk: Chunk, assigned: AssignedChunk, cancelled: Callable[[], bool]
    ) -> Iterator[tuple[Entry, Costs]]:
        """Return the iterator of a chunk's batches, which asks for the next chunk in time."""
        if chunk.stream:
            return stream_chunk(chunk, self._make_copy, self._where, cancelled)
        return fetch_chunk(
            chunk,
            self._make_copy,
            self._where,
            cancelled,
            binding=assigned.binding,
            restarted=assigned.restarted,
            may_read_again=self._may_read_again,
            nearly_made=self._ask_early if self._loop.asks_early else None,
            seen_unchanged=functools.partial(self._note_state, chunk.worker),
        )

    def _ask_early(self) -> None:
        if (request := self._loop.ask_early()) is not None:
            self._ask(request)

    def _note_state(self, worker: int, unchanged: bool) -> None:
        if self._loop.note_state(unchanged):
            self._note_change(worker)

    def open(
        self,
        chunk: Chunk,
        assigned: AssignedChunk,
        batches: Iterator[tuple[Entry, Costs]],
        segments: SegmentPool | None,
    ) -> None:
        """Begin a chunk.

        Args:
            chunk: The chunk.
            assigned: The chunk as it was assigned.
            batches: Its batches.
            segments: Segments for tensors, if the training process reads the blocks.
        """
        earlier = Costs(retries=len(chunk.numbers) if assigned.again else 0)
        self.writer = BlockWriter(chunk.run.key, chunk.number, earlier, segments=segments)
        self._batches = batches

    def next_batch(self) -> MadeBatch | None:
        """Make the next batch and add it to the block; return None if there is none."""
        made = next(self._batches, None)
        if made is None:
            return None
        entry, costs = made
        self.writer.add(entry, costs)
        sizes = self.writer.batch_bytes, self.writer.size_bytes
        return MadeBatch(time.monotonic(), costs.seconds, *sizes, entry.outcome == "end")

    def close(self) -> None:
        """End the chunk."""
        self._batches = iter(())  # it may hold a dataset copy
