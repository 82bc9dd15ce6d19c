"""Chunks in flight: which batches were sent and have not arrived."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dpex.errors import BatchLostError
from dpex.protocol.chunks import Chunk, Entry, Part, Run

__all__ = ["Attempt", "SentChunk", "SentChunks", "described", "joined_streams", "lost_error"]


def described(chunk: Chunk, batch: int) -> str:
    """Describe the samples of one batch of a chunk, for error messages."""
    if chunk.stream:
        workers = chunk.run.num_workers
        return f"batch {batch // workers} of the stream of logical worker {batch % workers}"
    return f"dataset indices {chunk.batches[(batch - chunk.first_batch) // chunk.stride]!r}"


def lost_error(chunk: Chunk, batch: int, reason: str, *, store_full: bool) -> BatchLostError:
    """Return the error to raise in place of a batch that every attempt lost.

    Args:
        chunk: The chunk that holds the batch.
        batch: Number of the batch.
        reason: Text of the pipeline's reports.
        store_full: Whether Ray had no space to store the batch. If False, worker processes died.
    """
    what = f"batch {batch} ({described(chunk, batch)})"
    if store_full:
        return BatchLostError(
            f"Ray has no space for {what}: its object store and its disk are full. Free disk space "
            f"on the nodes, or make batches smaller. Reason: {reason}"
        )
    return BatchLostError(
        f"DataLoader worker exited unexpectedly: every worker process that was given {what} died. "
        "Read these samples in the training process. If that works, the workers probably lack "
        "memory: "
        f"lower num_workers, or set worker_options={{'memory': bytes}}. Reason: {reason}"
    )


@dataclass(frozen=True)
class Attempt:
    """How often and how a chunk has been sent.

    Attributes:
        alone: Whether its task makes no other chunk, because a task that had it died.
        tries: How often it was sent alone, if it was.
        lost_blocks: How often its blocks have been lost, after they were made.
        one_by_one: Whether only one task may run while it is in flight.
    """

    alone: bool = False
    tries: int = 1
    lost_blocks: int = 0
    one_by_one: bool = False


class SentChunk:
    """A chunk in flight, and its batches that have not arrived.

    Attributes:
        chunk: The chunk as it was sent.
        attempt: How it was sent.
        missing: Numbers of the batches that have not arrived.
    """

    __slots__ = ("attempt", "chunk", "missing")

    def __init__(self, chunk: Chunk, attempt: Attempt) -> None:
        self.chunk = chunk
        self.attempt = attempt
        self.missing = set(chunk.numbers)

    def rest(self, most: int = sys.maxsize) -> Iterator[Chunk]:
        """Yield chunks of the batches that have not arrived.

        Args:
            most: Maximum number of batches in each chunk.
        """
        missing = sorted(self.missing)
        stride = self.chunk.stride
        if self.chunk.stream:  # each batch starts where the batch before it ended
            most = sys.maxsize
        while missing:
            first = missing[0]
            expected = enumerate(missing)
            count = next((n for n, b in expected if b != first + n * stride), len(missing))
            count = min(count, most)
            place = (first - self.chunk.first_batch) // stride
            yield replace(
                self.chunk,
                first_batch=first,
                batches=self.chunk.batches[place : place + count],
                positions=self.chunk.positions[place : place + count],
            )
            del missing[:count]


def joined_streams(lost: Iterable[SentChunk]) -> list[SentChunk]:
    """Join adjoining chunks of each stream that were sent in the same way; leave other chunks."""
    joined: list[SentChunk] = []
    streams: dict[int, int] = {}
    for sent in lost:
        chunk = sent.chunk
        place = streams.get(chunk.worker) if chunk.stream else None
        # A chunk between them may have arrived.
        adjoins = place is not None and joined[place].chunk.numbers.stop == chunk.first_batch
        if place is None or not adjoins or joined[place].attempt != sent.attempt:
            streams[chunk.worker] = len(joined)
            joined.append(sent)
            continue
        before = joined[place]
        batches = [*before.chunk.batches, *chunk.batches]
        positions = [*before.chunk.positions, *chunk.positions]
        whole = replace(before.chunk, batches=batches, positions=positions)
        joined[place] = SentChunk(whole, before.attempt)
        joined[place].missing = before.missing | sent.missing
    return joined


class SentChunks:
    """The chunks of a run that are in flight.

    Invariants:

    - Every chunk in here misses at least one batch.
    - A batch is missing from at most one chunk, and it arrives once: a second arrival is dropped.
      So a batch may be sent again at any time, and the first chunk may still come.

    Attributes:
        sent: Number of chunks sent in this run.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._chunks: dict[int, SentChunk] = {}
        # Numbers of all chunks that were sent with ``Attempt.one_by_one``.
        self._one_by_one: list[int] = []

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def one_by_one(self) -> bool:
        """Whether only one task may run, because Ray has no space for the blocks of several."""
        return any(number in self._chunks for number in self._one_by_one)

    def numbered(self, chunks: Iterable[Chunk], run: Run) -> list[Chunk]:
        """Return chunks with the run and the numbers that they have if they are sent next."""
        return [replace(chunk, run=run, number=n) for n, chunk in enumerate(chunks, self.sent)]

    def add(self, chunks: Iterable[Chunk], attempt: Attempt) -> None:
        """Record chunks, numbered from ``sent``, as sent."""
        for chunk in chunks:
            self._chunks[chunk.number] = SentChunk(chunk, attempt)
            self._one_by_one += [chunk.number] if attempt.one_by_one else []
            self.sent += 1

    def arrive(self, number: int, entries: Iterable[Entry]) -> list[Entry] | None:
        """Record batches as arrived.

        Args:
            number: Number of their chunk.
            entries: The batches. An entry with the outcome ``"end"`` means that the stream has no
                later batch. Batches before it may arrive after it, because blocks may overtake one
                another.

        Returns:
            The entries that arrive for the first time; None if the chunk is not in flight.
        """
        sent = self._chunks.get(number)
        if sent is None:
            return None
        new = []
        for entry in entries:
            if entry.outcome == "end":
                self.end_stream(entry.batch, sent.chunk.stride)
                new.append(entry)
            elif entry.batch in sent.missing:
                sent.missing.discard(entry.batch)
                new.append(entry)
        if not sent.missing:
            self._chunks.pop(number, None)
        return new

    def end_stream(self, batch: int, workers: int) -> None:
        """Record that a stream ends.

        Args:
            batch: Number that its next batch would have.
            workers: Number of logical workers.
        """
        for number, sent in list(self._chunks.items()):
            if sent.chunk.worker == batch % workers:
                sent.missing = {missing for missing in sent.missing if missing < batch}
                if not sent.missing:
                    del self._chunks[number]

    def lose(self, part: Part) -> SentChunk | None:
        """Return what a loss leaves missing of a chunk, which is then in flight no more.

        Args:
            part: The batches that are lost.

        Returns:
            The batches, as a chunk; None if all of them have arrived or are in another chunk.
        """
        sent = self._chunks.get(part.chunk)
        if sent is None:
            return None
        lost = SentChunk(sent.chunk, sent.attempt)
        lost.missing = sent.missing.intersection(part.batches or sent.missing)
        sent.missing = sent.missing - lost.missing
        if not sent.missing:
            del self._chunks[part.chunk]
        return lost if lost.missing else None

    def take(self) -> list[SentChunk]:
        """Return all chunks in flight, and begin another run, in which nothing has been sent."""
        taken, self._chunks = list(self._chunks.values()), {}
        self.sent, self._one_by_one = 0, []
        return taken

    def holding(self, batch: int | None) -> SentChunk | None:
        """Return the chunk that a batch is missing from, or None."""
        return next((c for c in self._chunks.values() if batch in c.missing), None)
