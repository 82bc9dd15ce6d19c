"""Chunks in flight, and which of their batches to resend."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dpex.errors import ChunkLostError
from dpex.worker.map_style import Chunk

__all__ = ["ChunkInFlight", "described", "joined_streams", "lost_error"]


def described(chunk: Chunk, batch: int) -> str:
    """Describe the samples of one batch of a chunk, for error messages."""
    if chunk.stream:
        workers = chunk.run.num_workers
        return f"batch {batch // workers} of worker {batch % workers}'s stream"
    return f"dataset indices {chunk.batches[(batch - chunk.first_batch) // chunk.stride]!r}"


def lost_error(chunk: Chunk, batch: int, reason: str) -> ChunkLostError:
    """Return the error to raise in place of a batch that killed every process that made it.

    Args:
        chunk: The chunk that holds the batch.
        batch: Number of the batch.
        reason: Ray's error text.
    """
    return ChunkLostError(
        f"DataLoader worker exited unexpectedly: every worker process that was given batch "
        f"{batch} ({described(chunk, batch)}) died. Read these samples in the main "
        f"process to see why. Ray says: {reason}"
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
    """Join the chunks of each stream into one chunk; other chunks stay as they are."""
    joined: list[ChunkInFlight] = []
    streams: dict[int, int] = {}
    for sent in lost:
        chunk = sent.chunk
        place = streams.get(chunk.worker) if chunk.stream else None
        if place is None:
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
