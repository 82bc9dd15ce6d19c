"""Chunks in flight: which batches were sent and have not arrived."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dpex.errors import BatchLostError
from dpex.wire.block_format import Entry
from dpex.wire.loss_causes import Loss
from dpex.worker.logical_worker import Run
from dpex.worker.map_style import Chunk

__all__ = ["ChunkInFlight", "InFlight", "described", "joined_streams", "lost_error"]


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


class ChunkInFlight:
    """A chunk in flight, and its batches that have not arrived.

    Attributes:
        chunk: The chunk as it was sent.
        alone: Whether its task makes no other chunk, because a task that had it died.
        tries: How often it was sent alone, if it was.
        missing: Numbers of the batches that have not arrived.
    """

    __slots__ = ("alone", "chunk", "missing", "tries")

    def __init__(self, chunk: Chunk, alone: bool, tries: int) -> None:
        self.chunk = chunk
        self.alone = alone
        self.tries = tries
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


def joined_streams(lost: Iterable[ChunkInFlight]) -> list[ChunkInFlight]:
    """Join adjoining chunks of each stream into one chunk; other chunks stay as they are."""
    joined: list[ChunkInFlight] = []
    streams: dict[int, int] = {}
    for sent in lost:
        chunk = sent.chunk
        place = streams.get(chunk.worker) if chunk.stream else None
        # A chunk between them may have arrived.
        if place is None or joined[place].chunk.numbers.stop != chunk.first_batch:
            streams[chunk.worker] = len(joined)
            joined.append(sent)
            continue
        before = joined[place]
        batches = [*before.chunk.batches, *chunk.batches]
        positions = [*before.chunk.positions, *chunk.positions]
        whole = replace(before.chunk, batches=batches, positions=positions)
        joined[place] = ChunkInFlight(whole, before.alone, before.tries)
        joined[place].missing = before.missing | sent.missing
    return joined


class InFlight:
    """The chunks of a run that are in flight.

    Invariants:

    - Every chunk in here misses at least one batch.
    - A batch is missing from at most one chunk, and it arrives once: a second arrival is dropped.
    - ``draining`` is true from the first error until no chunk is in flight. Meanwhile nothing new
      is sent, because a new chunk would hide which chunks are lost.

    Attributes:
        sent: Number of chunks sent in this run.
        losses: Losses that the pipeline has reported since all chunks last arrived.
        draining: Whether nothing new may be sent.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.losses: list[Loss] = []
        self.draining = False
        self._sent_before_losses = 0
        self._chunks: dict[int, ChunkInFlight] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def numbered(self, chunks: Iterable[Chunk], run: Run) -> list[Chunk]:
        """Return chunks with the run and the numbers that they have if they are sent next."""
        return [replace(chunk, run=run, number=n) for n, chunk in enumerate(chunks, self.sent)]

    def add(self, chunks: Iterable[Chunk], *, alone: bool, tries: int) -> None:
        """Record chunks as sent.

        Args:
            chunks: The chunks, numbered from ``sent``.
            alone: Whether each has a task that makes no other chunk.
            tries: How often each was sent alone, if it was.
        """
        for chunk in chunks:
            self._chunks[chunk.number] = ChunkInFlight(chunk, alone, tries)
            self.sent += 1

    def arrive(self, number: int, entries: Iterable[Entry]) -> list[Entry] | None:
        """Record batches as arrived.

        Args:
            number: Number of their chunk.
            entries: The batches. An entry with the outcome ``"end"`` means that the chunk has no
                later batch. Batches before it may arrive after it, because blocks may overtake one
                another.

        Returns:
            The entries that arrive for the first time; None if the chunk is not in flight.
        """
        chunk = self._chunks.get(number)
        if chunk is None:
            return None
        new = []
        for entry in entries:
            if entry.outcome == "end":
                chunk.missing = {batch for batch in chunk.missing if batch < entry.batch}
                new.append(entry)
            elif entry.batch in chunk.missing:
                chunk.missing.discard(entry.batch)
                new.append(entry)
        if not chunk.missing:
            del self._chunks[number]
        return new

    def note_losses(self, losses: list[Loss]) -> None:
        """Record losses; send nothing until their chunks are known."""
        if losses:
            self.losses.extend(losses)
            self._sent_before_losses = self.sent
            self.draining = True

    def lost(self, quiet_at: int) -> bool:
        """Return whether the chunks in flight are lost.

        Args:
            quiet_at: Number of chunks whose tasks are done and whose blocks have all been read.
        """
        return bool(self._chunks) and quiet_at >= self.sent

    def settle(self) -> None:
        """Stop draining if nothing is in flight; forget losses that later chunks have survived."""
        if not self._chunks:
            self.draining = False
            if self.sent > self._sent_before_losses:
                self.losses = []

    def take(self) -> list[ChunkInFlight]:
        """Return all chunks in flight and forget them."""
        taken, self._chunks = list(self._chunks.values()), {}
        return taken

    def begin_run(self) -> None:
        """Start to count for another run, in which nothing has been sent."""
        self.sent = 0
        self.draining = False
        self.losses = []

    def holding(self, batch: int | None) -> ChunkInFlight | None:
        """Return the chunk that a batch is missing from, or None."""
        return next((c for c in self._chunks.values() if batch in c.missing), None)
