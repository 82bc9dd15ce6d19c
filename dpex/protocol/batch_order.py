"""Which batches to request from the logical workers, and which batch to deliver next.

As in torch, batch ``k`` belongs to logical worker ``k % num_workers``. A chunk holds batches of one
logical worker. For a map-style dataset, the sampler yields the batches in order. For an
``IterableDataset``, each logical worker reads its own stream, and the order skips logical workers
whose stream has ended.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from typing import Any, Protocol

from dpex.protocol.chunk_sizes import ChunkPlanner
from dpex.protocol.chunks import Chunk, Entry, Run

__all__ = ["BatchOrder", "IndexOrder", "StreamOrder"]


class Delivered(Protocol):
    """The record of what an epoch has delivered; see ``EpochProgress``."""

    batches: int

    def deliver(self, batch: int) -> None:
        """Record a batch."""

    def begin_streams(self, workers: int) -> tuple[list[int], list[tuple[int, bytes] | None]]:
        """Return the batches that each stream has delivered, and where it resumes."""

    def deliver_stream(self, worker: int, samples: int, state: bytes | None) -> None:
        """Record a batch of a stream."""

    def end_stream(self, worker: int, state: bytes | None) -> None:
        """Record the end of a stream."""

    def finish(self) -> None:
        """Record the end of the epoch."""


class Indices(Protocol):
    """The indices of each batch; see ``IndexIterator``."""

    position: int
    epoch: Delivered

    def __next__(self) -> Any:
        """Return the indices of the next batch."""

    def next_request(self) -> Any:
        """Return what every batch of a stream requests."""


class BatchOrder(abc.ABC):
    """Requests for the batches of one epoch.

    Args:
        indices: Iterator that yields the indices of each batch.
        planner: Planner of the chunk sizes.
    """

    def __init__(self, indices: Indices, planner: ChunkPlanner) -> None:
        self._indices = indices
        self._planner = planner
        self.delivered = 0
        """Number of batches of the epoch that this process has delivered."""

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """Number of batches that are requested but not delivered."""

    @property
    @abc.abstractmethod
    def next_batch(self) -> int | None:
        """Number of the next batch to deliver, or None at the end of the epoch."""

    @abc.abstractmethod
    def fill(self, send: Callable[[Chunk], None]) -> None:
        """Request as many batches ahead as torch does.

        Args:
            send: Called with each chunk.
        """

    @abc.abstractmethod
    def prefetch_chunk(self, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> bool:
        """Request one chunk more than torch would, if costs allow it.

        Args:
            send: Called with the chunk.
            enough: Called after each batch. If it returns True, this call draws nothing more.

        Returns:
            False if nothing more can be requested ahead now: at the end of the epoch, or if the
            window of batches in flight is full.
        """

    @abc.abstractmethod
    def deliver(self, entry: Entry) -> None:
        """Record that a batch, or an error in its place, is delivered."""

    def choose(self, made: Collection[int], *, in_order: bool) -> int | None:
        """Return the number of the batch to deliver now, or None if it has not arrived.

        Args:
            made: Numbers of the batches that have arrived.
            in_order: Whether only the next batch in order may be delivered.
        """
        if not made:
            return None
        if in_order:
            return self.next_batch if self.next_batch in made else None
        return min(made)

    def finish(self) -> None:
        """Record that the epoch has been delivered to its end."""
        self._indices.epoch.finish()

    def end_stream(self, batch: int, state: bytes | None = None) -> None:
        """Record the end of a stream.

        Args:
            batch: Number that the next batch of the stream would have.
            state: The packed state of the stream, if it has one.
        """
        raise AssertionError(batch)


class _OpenChunk:
    """Batches of one logical worker that are drawn but not sent.

    Attributes:
        size: Number of batches that complete the chunk.
        first_batch: Number of the first batch.
        batches: Indices of each batch.
        positions: Position in the epoch of each batch's first sample.
    """

    __slots__ = ("batches", "first_batch", "positions", "size")

    def __init__(self, size: int, first_batch: int) -> None:
        self.size = size
        self.first_batch = first_batch
        self.batches: list[Any] = []
        self.positions: list[int] = []


class IndexOrder(BatchOrder):
    """Requests for the batches of a sampler.

    Invariant: after ``fill``, every batch that torch would have requested has been sent.

    Args:
        run: Iteration that the chunks belong to.
        length: Number of batches that the sampler yields, or None if unknown.
        patient: Whether the batches of a chunk may arrive together, after each logical worker's
            first chunk and before the last batches.
    """

    def __init__(
        self,
        indices: Indices,
        planner: ChunkPlanner,
        *,
        run: Run,
        length: int | None,
        patient: bool,
    ) -> None:
        super().__init__(indices, planner)
        self._run = run
        self._length = length
        self._patient = patient
        self._first = self._drawn = indices.epoch.batches
        self._exhausted = False
        self._open: dict[int, _OpenChunk] = {}

    @property
    def in_flight(self) -> int:
        """Number of batches that are requested but not delivered."""
        return self._drawn - self._first - self.delivered

    @property
    def next_batch(self) -> int | None:
        """Number of the next batch to deliver, or None at the end of the epoch."""
        over = self._exhausted and not self.in_flight
        return None if over else self._first + self.delivered

    @property
    def _remaining(self) -> int | None:
        """Number of batches that the sampler has left, or None if unknown."""
        return None if self._length is None else max(1, self._length - self._drawn)

    def fill(self, send: Callable[[Chunk], None]) -> None:
        """Draw and send as many batches ahead as torch does."""
        most = self._planner.guaranteed
        while not self._exhausted and self.in_flight < most:
            self._draw(send)
        end = self._first + self.delivered + most
        if self._exhausted or any(chunk.first_batch < end for chunk in self._open.values()):
            self._send_open(send)

    def prefetch_chunk(self, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> bool:
        """Draw one chunk of batches more than torch would, if costs allow it."""
        sent = self._planner.chunks_sent
        while self._planner.chunks_sent == sent:
            # Invariant: the sampler ends no sooner than in torch, because at its end it may draw
            # from a generator.
            if self._exhausted or self._remaining == 1:
                self._send_open(send)
                return False
            if self.in_flight >= self._planner.window:
                return False
            self._draw(send)
            if enough():
                break
        return True

    def _draw(self, send: Callable[[Chunk], None]) -> None:
        """Draw the indices of the next batch, and send its chunk if the chunk is complete.

        Args:
            send: Called with the chunk.
        """
        remaining = self._remaining
        try:
            indices = next(self._indices)
        except StopIteration:
            self._exhausted = True
            return
        except BaseException:
            self._send_open(send)  # the batches drawn before the error are delivered
            raise
        worker = self._drawn % self._run.num_workers
        chunk = self._open.get(worker)
        if chunk is None:
            size = self._planner.size(remaining=remaining, open_chunks=len(self._open))
            chunk = self._open[worker] = _OpenChunk(size, self._drawn)
        chunk.batches.append(indices)
        chunk.positions.append(self._indices.position)
        self._drawn += 1
        if len(chunk.batches) >= chunk.size:
            self._send(self._open.pop(worker), send)

    def _send_open(self, send: Callable[[Chunk], None]) -> None:
        """Send all chunks that are not sent, in the order of their first batches."""
        while self._open:
            first = min(self._open, key=lambda worker: self._open[worker].first_batch)
            self._send(self._open.pop(first), send)

    def _send(self, chunk: _OpenChunk, send: Callable[[Chunk], None]) -> None:
        patient = self._patient and self._planner.past_first_chunks and not self._is_near_end(chunk)
        self._planner.count_sent()
        send(
            Chunk(self._run, 0, chunk.first_batch, chunk.batches, chunk.positions, patient=patient)
        )

    def _is_near_end(self, chunk: _OpenChunk) -> bool:
        """Return whether the epoch's last batch is drawn only after a batch of the chunk has come.

        The last batch is drawn as late as in torch. Until then, logical workers have nothing to do.
        """
        if self._length is None:
            return False
        last = chunk.first_batch + (len(chunk.batches) - 1) * self._run.num_workers
        return last + self._planner.guaranteed >= self._length - 1

    def deliver(self, entry: Entry) -> None:
        """Record that a batch, or an error in its place, is delivered."""
        self._indices.epoch.deliver(entry.batch - self._first)
        self.delivered += 1


class StreamOrder(BatchOrder):
    """Requests for the batches of streams, one stream for each logical worker.

    Args:
        run: Iteration that the chunks belong to.
    """

    def __init__(
        self,
        indices: Indices,
        planner: ChunkPlanner,
        *,
        run: Run,
    ) -> None:
        super().__init__(indices, planner)
        self._run = run
        self._workers = run.num_workers
        # Every batch has the same request: one None for each sample in the batch.
        self._request = indices.next_request()
        epoch, workers = indices.epoch, run.num_workers
        self._delivered, self._begins = epoch.begin_streams(workers)
        self._requested = list(self._delivered)
        self._ends: list[int | None] = [None] * self._workers

    @property
    def in_flight(self) -> int:
        """Number of batches that are requested but not delivered."""
        return sum(map(self._ahead, self._open))

    def _ahead(self, worker: int) -> int:
        return self._requested[worker] - self._delivered[worker]

    @property
    def _open(self) -> list[int]:
        """Logical workers whose streams may have further batches to deliver."""
        known = zip(self._ends, self._delivered, strict=True)
        return [w for w, (end, done) in enumerate(known) if end is None or done < end]

    @property
    def next_batch(self) -> int | None:
        """Number of the next batch to deliver, or None at the end of the epoch."""
        return min(self._following, default=None)

    @property
    def _following(self) -> list[int]:
        """Number of the next batch of each stream that may have one."""
        return [self._delivered[w] * self._workers + w for w in self._open]

    def fill(self, send: Callable[[Chunk], None]) -> None:
        """Request as many batches of every logical worker as torch does."""
        most = max(1, self._planner.guaranteed // self._workers)
        while (worker := self._least_asked(most, 1)) is not None:
            size = self._planner.size(remaining=None)
            self._ask(worker, min(size, most - self._ahead(worker)), send)

    def prefetch_chunk(self, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> bool:
        """Request one chunk more of one logical worker than torch would, if costs allow it."""
        del enough  # a request for a stream draws no indices
        size = self._planner.size(remaining=None)
        worker = self._least_asked(max(1, self._planner.window // self._workers), size)
        if worker is None:
            return False
        self._ask(worker, size, send)
        return True

    def _least_asked(self, most: int, size: int) -> int | None:
        """Return the logical worker with the fewest requested batches, of those with capacity.

        Args:
            most: Maximum number of batches in flight for each logical worker.
            size: Number of batches to request.

        Returns:
            The logical worker, or None if all streams have ended or none has the capacity.
        """
        may = (
            (self._requested[w], w)
            for w, end in enumerate(self._ends)
            if end is None and self._ahead(w) + size <= most
        )
        return min(may, default=(0, None))[1]

    def _ask(self, worker: int, size: int, send: Callable[[Chunk], None]) -> None:
        first = self._requested[worker] * self._workers + worker
        self._requested[worker] += size
        self._planner.count_sent()
        requests, begin = [self._request] * size, self._begins[worker]
        send(Chunk(self._run, 0, first, requests, [0] * size, stream=True, begin=begin))

    def choose(self, made: Collection[int], *, in_order: bool) -> int | None:
        """Return the number of the batch to deliver now; each stream stays in order."""
        if in_order:
            return super().choose(made, in_order=True)
        return min((batch for batch in self._following if batch in made), default=None)

    def deliver(self, entry: Entry) -> None:
        """Record that a batch, or an error in its place, is delivered."""
        worker = entry.batch % self._workers
        self._delivered[worker] += 1
        self._indices.epoch.deliver_stream(worker, entry.samples, entry.state)
        self.delivered += 1

    def end_stream(self, batch: int, state: bytes | None = None) -> None:
        """Record the end of a stream.

        Args:
            batch: Number that the next batch of the stream would have.
            state: The packed state of the stream, if it has one.
        """
        end, worker = divmod(batch, self._workers)
        self._indices.epoch.end_stream(worker, state)
        known = self._ends[worker]
        self._ends[worker] = end if known is None else min(known, end)
