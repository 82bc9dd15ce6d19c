"""Chunks and parts of chunks, as messages name them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Part", "PickledChunk"]


@dataclass(frozen=True)
class Part:
    """Batches of one chunk.

    Attributes:
        run: Key of the iteration that the chunk belongs to.
        chunk: Number of the chunk in its iteration.
        batches: Numbers of the batches; empty for all batches of the chunk that have not arrived.
    """

    run: str
    chunk: int
    batches: tuple[int, ...] = ()


@dataclass(frozen=True)
class PickledChunk:
    """A chunk on its way to the process that makes it.

    Attributes:
        payload: The pickled chunk.
        worker: The logical worker that its batches belong to.
        part: All its batches.
        alone: Whether its lease may contain no other chunk, because it may have killed a process.
        resent: Whether its batches were lost. The training loop needs them before later ones.
    """

    payload: bytes
    worker: int
    part: Part
    alone: bool = False
    resent: bool = False
