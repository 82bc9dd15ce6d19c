"""Which batches to ask the workers for, and which one the training loop gets next.

As in torch, batch ``k`` belongs to logical worker ``k % num_workers``, and a chunk holds batches of
one logical worker. Of a dataset with indices the sampler gives the batches, in their order. Every
logical worker reads a stream for itself, and the order passes over workers whose stream has ended.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from dpex.training.chunk_sizes import ChunkPlanner
from dpex.wire.block_format import Entry
from dpex.worker.logical_worker import Run
from dpex.worker.map_style import Chunk

if TYPE_CHECKING:
    from dpex.training.index_iterator import IndexIterator

__all__ = ["Demand", "IndexDemand", "StreamDemand"]


class Demand(abc.ABC):
    """What one epoch asks for.

    Args:
        indices: Yields what a batch is asked for with.
        planner: Sizes the chunks.
    """

    def __init__(self, indices: IndexIterator, planner: ChunkPlanner) -> None:
        self._indices = indices
        self._planner = planner
        self.delivered = 0
        """Batches delivered in this process."""

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """Batches asked for and not yet delivered."""

    @property
    @abc.abstractmethod
    def next_batch(self) -> int | None:
        """Number of the batch whose turn it is; None once there is none."""

    @abc.abstractmethod
    def fill(self, send: Callable[[Chunk], None]) -> None:
        """Ask as far ahead as torch does.

        Args:
            send: Takes the chunks.
        """

    @abc.abstractmethod
    def ask_ahead(self, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> bool:
        """Ask for one chunk more than torch would, if costs allow it.

        Args:
            send: Takes the chunk.
            enough: Asked after each batch; once it says so, nothing more is drawn now.

        Returns:
            Whether there is still something to ask for.
        """

    @abc.abstractmethod
    def deliver(self, entry: Entry) -> None:
        """Take note that a batch is handed out, or an error in its place."""

    def choose(self, made: Collection[int], *, in_order: bool) -> int | None:
        """Return the batch to hand out now, if any of those made is one.

        Args:
            made: Numbers of the batches that are there.
            in_order: Whether it must be the next one.
        """
        if not made:
            return None
        if in_order:
            return self.next_batch if self.next_batch in made else None
        return min(made)

    def finish(self) -> None:
        """Take note that the epoch has been delivered to its end."""
        self._indices.epoch.finish()

    def end_stream(self, batch: int, state: bytes | None = None) -> None:
        """Record a stream's end.

        Args:
            batch: The number that its next batch would have.
            state: The packed state of the stream, if it has one.
        """
        raise AssertionError(batch)


class _OpenChunk:
    """Batches of one logical worker that are drawn, and not sent yet.

    Attributes:
        size: With how many batches it is sent.
        first_batch: The number of its first batch.
        batches: The indices of each.
        positions: The place in the epoch of each one's first sample.
    """

    __slots__ = ("batches", "first_batch", "positions", "size")

    def __init__(self, size: int, first_batch: int) -> None:
        self.size = size
        self.first_batch = first_batch
        self.batches: list[Any] = []
        self.positions: list[int] = []


class IndexDemand(Demand):
    """The batches of a sampler.

    Invariant: after ``fill`` every batch within torch's run-ahead has been sent.

    Args:
        run: What the chunks belong to.
        length: How many batches the sampler yields, where it says so.
        patient: Whether chunks' batches may come together, once all tasks have had one.
    """

    def __init__(
        self,
        indices: IndexIterator,
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
        """Batches asked for and not yet delivered."""
        return self._drawn - self._first - self.delivered

    @property
    def next_batch(self) -> int | None:
        """Number of the batch whose turn it is; None once there is none."""
        over = self._exhausted and not self.in_flight
        return None if over else self._first + self.delivered

    @property
    def _remaining(self) -> int | None:
        """How many batches the sampler has left, where it says so."""
        return None if self._length is None else max(1, self._length - self._drawn)

    def fill(self, send: Callable[[Chunk], None]) -> None:
        """Draw as far ahead as torch does."""
        most = self._planner.guaranteed
        while not self._exhausted and self.in_flight < most:
            self._draw(send)
        end = self._first + self.delivered + most
        if self._exhausted or any(chunk.first_batch < end for chunk in self._open.values()):
            self._send_open(send)

    def ask_ahead(self, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> bool:
        """Draw a chunk's worth of batches more than torch would, if costs allow it."""
        sent = self._planner.chunks_issued
        while self._planner.chunks_issued == sent:
            # The end of the epoch is reached no sooner than in torch: a sampler may draw there.
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
        """Draw the next batch's indices, and send its worker's chunk if that is whole then.

        Args:
            send: Takes the chunk.
        """
        remaining = self._remaining
        try:
            indices = next(self._indices)
        except StopIteration:
            self._exhausted = True
            return
        except BaseException:
            self._send_open(send)  # what was drawn before is delivered all the same
            raise
        worker = self._drawn % self._run.num_workers
        chunk = self._open.get(worker)
        if chunk is None:
            size = self._planner.size(remaining=remaining)
            chunk = self._open[worker] = _OpenChunk(size, self._drawn)
        chunk.batches.append(indices)
        chunk.positions.append(self._indices.position)
        self._drawn += 1
        if len(chunk.batches) >= chunk.size:
            self._send(self._open.pop(worker), send)

    def _send_open(self, send: Callable[[Chunk], None]) -> None:
        """Send what has been drawn."""
        while self._open:
            first = min(self._open, key=lambda worker: self._open[worker].first_batch)
            self._send(self._open.pop(first), send)

    def _send(self, chunk: _OpenChunk, send: Callable[[Chunk], None]) -> None:
        patient = self._patient and self._planner.settled
        self._planner.issued()
        send(
            Chunk(self._run, 0, chunk.first_batch, chunk.batches, chunk.positions, patient=patient)
        )

    def deliver(self, entry: Entry) -> None:
        """Take note that a batch is handed out, or an error in its place."""
        self._indices.epoch.deliver(entry.batch - self._first)
        self.delivered += 1


class StreamDemand(Demand):
    """The batches of as many streams as there are workers.

    Args:
        run: What the chunks belong to.
    """

    def __init__(
        self,
        indices: IndexIterator,
        planner: ChunkPlanner,
        *,
        run: Run,
    ) -> None:
        super().__init__(indices, planner)
        self._run = run
        self._workers = run.num_workers
        # One batch is asked for like the other: with as many indices as it is to have samples.
        self._request = indices.request
        epoch, workers = indices.epoch, run.num_workers
        self._handed_out, self._begins = epoch.begin_streams(workers, indices.unread)
        self._asked = list(self._handed_out)
        self._ends: list[int | None] = [None] * self._workers

    @property
    def in_flight(self) -> int:
        """Batches asked for and not yet delivered."""
        return sum(map(self._ahead, self._open))

    def _ahead(self, worker: int) -> int:
        return self._asked[worker] - self._handed_out[worker]

    @property
    def _open(self) -> list[int]:
        """The workers whose streams have more."""
        known = zip(self._ends, self._handed_out, strict=True)
        return [w for w, (end, done) in enumerate(known) if end is None or done < end]

    @property
    def next_batch(self) -> int | None:
        """Number of the batch whose turn it is; None once there is none."""
        numbers = (self._handed_out[w] * self._workers + w for w in self._open)
        return min(numbers, default=None)

    def fill(self, send: Callable[[Chunk], None]) -> None:
        """Ask every worker for as many batches as torch does."""
        most = max(1, self._planner.guaranteed // self._workers)
        while (worker := self._least_asked(most, 1)) is not None:
            size = self._planner.size(remaining=None)
            self._ask(worker, min(size, most - self._ahead(worker)), send)

    def ask_ahead(self, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> bool:
        """Ask one worker for more than torch would, if costs allow it."""
        del enough  # nothing is drawn here
        size = self._planner.size(remaining=None)
        worker = self._least_asked(max(1, self._planner.window // self._workers), size)
        if worker is None:
            return False
        self._ask(worker, size, send)
        return True

    def _least_asked(self, most: int, size: int) -> int | None:
        """Return the worker whose turn comes first, of those that may be asked for a chunk."""
        may = (
            (self._asked[w], w)
            for w, end in enumerate(self._ends)
            if end is None and self._ahead(w) + size <= most
        )
        return min(may, default=(0, None))[1]

    def _ask(self, worker: int, size: int, send: Callable[[Chunk], None]) -> None:
        first = self._asked[worker] * self._workers + worker
        self._asked[worker] += size
        self._planner.issued()
        requests, begin = [self._request] * size, self._begins[worker]
        send(Chunk(self._run, 0, first, requests, [0] * size, stream=True, begin=begin))

    def deliver(self, entry: Entry) -> None:
        """Take note that a batch is handed out, or an error in its place."""
        worker = entry.batch % self._workers
        self._handed_out[worker] += 1
        self._indices.epoch.deliver_stream(worker, entry.samples, entry.state)
        self.delivered += 1

    def end_stream(self, batch: int, state: bytes | None = None) -> None:
        """Record a stream's end.

        Args:
            batch: The number that its next batch would have.
            state: The packed state of the stream, if it has one.
        """
        end, worker = divmod(batch, self._workers)
        self._indices.epoch.end_stream(worker, state)
        known = self._ends[worker]
        self._ends[worker] = end if known is None else min(known, end)
