"""Which batches to ask the workers for, and which one the training loop gets next.

A dataset with indices has one order for all workers, the sampler's. A stream is read by every
worker for itself: batch ``k`` of worker ``w`` has the number ``k * num_workers + w``, and the
numbers' order is torch's round, in which a worker whose stream has ended is passed over.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from dpex.chunking import ChunkPlanner
from dpex.fetch import Chunk
from dpex.frame import Entry
from dpex.worker import Run

if TYPE_CHECKING:
    from dpex.indices import IndexIterator

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
    def under_way(self) -> int:
        """Batches asked for and not yet delivered."""

    @property
    @abc.abstractmethod
    def next_batch(self) -> int | None:
        """Number of the batch whose turn it is; None once there is none."""

    @property
    @abc.abstractmethod
    def parallel(self) -> int:
        """Tasks to run at once."""

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
            enough: Asked after each batch; if it says so, the chunk has no more.

        Returns:
            Whether it did.
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

    def end_stream(self, batch: int) -> None:
        """Take note that a stream has ended before a batch."""
        raise AssertionError(batch)


class IndexDemand(Demand):
    """The batches of a sampler.

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

    @property
    def under_way(self) -> int:
        """Batches asked for and not yet delivered."""
        return self._drawn - self._first - self.delivered

    @property
    def next_batch(self) -> int | None:
        """Number of the batch whose turn it is; None once there is none."""
        over = self._exhausted and not self.under_way
        return None if over else self._first + self.delivered

    @property
    def parallel(self) -> int:
        """Tasks to run at once."""
        return self._planner.parallel

    @property
    def _remaining(self) -> int | None:
        """How many batches the sampler has left, where it says so."""
        return None if self._length is None else max(1, self._length - self._drawn)

    def fill(self, send: Callable[[Chunk], None]) -> None:
        """Draw as far ahead as torch does."""
        most = self._planner.guaranteed
        while not self._exhausted and self.under_way < most:
            size = self._planner.size(remaining=self._remaining)
            self._draw(min(size, most - self.under_way), send, lambda: False)

    def ask_ahead(self, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> bool:
        """Draw one chunk more than torch would, if costs allow it."""
        room = self._planner.window - self.under_way
        # The end of the epoch is reached no sooner than in torch: a sampler may draw there.
        remaining = self._remaining
        size = self._planner.size(remaining=remaining)
        if remaining is not None:
            size = min(size, remaining - 1)
        if self._exhausted or size < 1 or room < size:
            return False
        self._draw(size, send, enough)
        return True

    def _draw(self, size: int, send: Callable[[Chunk], None], enough: Callable[[], bool]) -> None:
        """Draw the next chunk's indices.

        Args:
            size: Batches, if the sampler has as many.
            send: Takes the chunk.
            enough: Asked after each; if it says so, the chunk has no more.
        """
        batches: list[Any] = []
        positions: list[int] = []
        try:
            while len(batches) < size:
                batches.append(next(self._indices))
                positions.append(self._indices.position)
                if enough():
                    break
        except StopIteration:
            self._exhausted = True
        finally:  # what was drawn before an error of the sampler is delivered all the same
            if batches:
                patient = self._patient and self._planner.settled
                chunk = Chunk(self._run, 0, self._drawn, batches, positions, patient=patient)
                self._drawn += len(batches)
                self._planner.issued()
                send(chunk)

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
    def under_way(self) -> int:
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

    @property
    def parallel(self) -> int:
        """Tasks to run at once: one for every stream."""
        return self._workers

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

    def end_stream(self, batch: int) -> None:
        """Take note that a stream has ended before a batch."""
        end, worker = divmod(batch, self._workers)
        known = self._ends[worker]
        self._ends[worker] = end if known is None else min(known, end)
