"""Chunks and batches, as messages between processes name them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpex.protocol.binding import Binding

__all__ = [
    "ALL_ITERATIONS",
    "AssignedChunk",
    "Chunk",
    "Entry",
    "Part",
    "PickledChunk",
    "Replaced",
    "Run",
    "insert_in_turn",
]

ALL_ITERATIONS = 1 << 62
"""A larger number than that of any iteration, for what outlives them or is done with all."""


@dataclass(frozen=True)
class Run:
    """One iteration over a loader; all its chunks share these values.

    Attributes:
        key: Identity of the iteration.
        loader: Identity of the loader.
        base_seed: The number that torch draws to seed its workers.
        epoch: Number of earlier iterations with this base_seed.
        num_workers: Number of logical workers; batch k belongs to worker k mod num_workers.
        dataset_version: Number of the dataset version that it reads. Every iteration reads a new
            version unless workers are persistent.
        settings: Any of the training process, which the worker processes apply.
    """

    key: str
    loader: str
    base_seed: int
    epoch: int
    num_workers: int
    dataset_version: int
    settings: Any


@dataclass(frozen=True)
class Chunk:
    """Consecutive batches of one logical worker, made by one task.

    Attributes:
        run: The iteration that it belongs to.
        number: Its number in the iteration.
        first_batch: Number of its first batch in the epoch.
        batches: The indices of each batch, as the sampler gave them.
        positions: Position in the epoch of each batch's first sample.
        patient: Whether its batches may share longer blocks, because enough batches are in flight
            before it.
        stream: Whether its batches belong to an ``IterableDataset``.
        begin: Where the stream resumes in this epoch: the number of batches already read, and
            the packed state.
    """

    run: Run
    number: int
    first_batch: int
    batches: Sequence[Any]
    positions: Sequence[int]
    patient: bool = False
    stream: bool = False
    begin: tuple[int, bytes] | None = None

    @property
    def stride(self) -> int:
        """Difference between the numbers of successive batches."""
        return self.run.num_workers

    @property
    def numbers(self) -> range:
        """Numbers of its batches in the epoch."""
        end = self.first_batch + len(self.batches) * self.stride
        return range(self.first_batch, end, self.stride)

    @property
    def worker(self) -> int:
        """Number of the logical worker that its batches belong to."""
        return self.first_batch % self.run.num_workers


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
        deaths: How many processes of earlier leases have died on it.
    """

    payload: bytes
    worker: int
    part: Part
    alone: bool = False
    resent: bool = False
    deaths: int = 0


def insert_in_turn(waiting: deque[PickledChunk], chunk: PickledChunk) -> None:
    """Insert a chunk after all that wait; if it is resent, only after other resent chunks."""
    new = (place for place, other in enumerate(waiting) if not other.resent)
    end = len(waiting)
    waiting.insert(next(new, end) if chunk.resent else end, chunk)


@dataclass(frozen=True)
class AssignedChunk:
    """A chunk that is assigned to a task, or to a process of this machine.

    Attributes:
        payload: The pickled chunk.
        place: Number of chunks that come before it in the task lease.
        binding: The binding of its logical worker.
        again: Whether an earlier attempt of the task had the chunk and died.
        restarted: Whether the state of its logical worker starts again here, because it was in
            another process.
        skipped_blocks: Number of blocks of earlier chunks that the task need not recompute.
        replaced: Names of processes whose tasks Ray has restarted, but that may not have ended. The
            task waits for their end, because they may make batches of the same logical worker.
        iteration: Number of its iteration on the pipeline, from 1; 0 if the iteration has ended.
    """

    payload: bytes
    place: int
    binding: Binding = Binding.RELEASED
    again: bool = False
    restarted: bool = False
    skipped_blocks: int = 0
    replaced: tuple[str, ...] = ()
    iteration: int = 0


@dataclass(frozen=True)
class Replaced:
    """The answer to a process whose task has another process: it must end without returning.

    Two processes of a task may ask in another order than they started in. If Ray still waits for
    the process that gets this answer, its return would end the task; its death restarts the task.
    """


@dataclass(frozen=True)
class Entry:
    """One batch in flight, or the outcome in its place.

    Attributes:
        batch: Number of the batch in its epoch.
        value: The batch, or an ``ExceptionWrapper`` in its place. It is pickled until ``decode``
            unpickles it.
        outcome: ``"batch"`` or ``"error"``, depending on ``value``. ``"nothing"`` if all samples
            were left out. ``"end"`` if the stream ended before this batch.
        left_out: Index and error text of each sample that was left out.
        samples: Number of samples, if this is a stream's batch.
        state: Packed state of the stream after this batch, if the stream has a state.
    """

    batch: int
    value: Any
    outcome: Literal["batch", "error", "nothing", "end"] = "batch"
    left_out: tuple[tuple[Any, str], ...] = ()
    samples: int = 0
    state: bytes | None = None
