"""The loop of a worker process: it asks for a chunk, makes its batches, and sends them in blocks.

The loop is a generator. Each of its steps is something that a carrier does for it: a Ray task
(``worker/task.py``), a process of this machine (``carriers/processes/worker_process.py``), or a
simulation. The answer to a step comes with its time.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Chunk

__all__ = [
    "Ask",
    "EndChunk",
    "MadeBatch",
    "NextBatch",
    "NextChunk",
    "Open",
    "Send",
    "Step",
    "WorkerLoop",
    "next_step",
]


@dataclass(frozen=True, slots=True)
class Ask:
    """Step: send the request for the next chunk, and do not wait for the answer.

    Attributes:
        place: How many chunks the task has made.
        made: How many blocks it has made of these chunks, or is about to make.
        unchanged: Whether the last batch left its dataset copy unchanged; None if not known.
        early: Whether the task still makes samples of its last chunk; ``EndChunk`` or ``Send``
            reports their end.
    """

    place: int
    made: int
    unchanged: bool | None
    early: bool = False


@dataclass(frozen=True, slots=True)
class NextChunk:
    """Step: wait for the answer to the request; None ends the loop."""


@dataclass(frozen=True, slots=True)
class Open:
    """Step: begin a chunk, and answer with it and the time; with None if it is not wanted any more.

    Attributes:
        assigned: The chunk. The carrier passes its ``skipped_blocks`` on first, and waits for the
            end of the processes in ``replaced``.
    """

    assigned: AssignedChunk


@dataclass(frozen=True, slots=True)
class NextBatch:
    """Step: make the next batch of the chunk, add it to the block, and answer with ``MadeBatch``.

    The answer None ends the chunk: it has no further batch, or it is not wanted any more.
    """


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """The answer to ``NextBatch``.

    Attributes:
        now: The time.
        seconds: How long the batch took.
        batch_bytes: Size of the batches in the block.
        inline_bytes: The same without the tensors in segments.
        ended: Whether the stream has ended in place of the batch.
    """

    now: float
    seconds: float
    batch_bytes: int
    inline_bytes: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Step: send the block, and answer with the time.

    Attributes:
        finished: As for ``EndChunk``.
    """

    finished: int | None


@dataclass(frozen=True, slots=True)
class EndChunk:
    """Step: end the work on the chunk.

    Attributes:
        finished: The ``place`` of the early request since which the last sample has been made.
            Until this is reported, no task gets a chunk of the logical worker. None if there is
            nothing to report.
    """

    finished: int | None


Step = Ask | NextChunk | Open | NextBatch | Send | EndChunk


def next_step(steps: Generator[Step, Any, None], answer: Any) -> Step | None:
    """Return the next step of ``WorkerLoop.run``, or None at its end."""
    try:
        return steps.send(answer)
    except StopIteration:
        return None


_NEXT_CHUNK = NextChunk()
_NEXT_BATCH = NextBatch()


class _Request(enum.Enum):
    """The state of the request for the next chunk.

    ::

           the last batch is made, or the chunk has ended
    NONE ─────────────────────────────────────────────────> SENT ──> NONE
      │                                                      ▲    the answer
      │ the last samples are being made                      │
      └─────────────────────────────> EARLY ─────────────────┘
                                          the end of the samples is reported
    """

    NONE = "no request is pending"
    EARLY = "a request is pending, and the task still makes samples"
    SENT = "a request is pending"


class WorkerLoop:
    """The loop of one task.

    Args:
        serves_one: Whether all chunks belong to one logical worker. If a chunk that is cancelled
            says that the state of its logical worker starts again, the next chunk says it then.

    Attributes:
        place: How many chunks the task has been given.
        made: How many blocks it has made.
    """

    def __init__(self, *, serves_one: bool = False) -> None:
        self.place = self.made = 0
        self._serves_one = serves_one
        self._request = _Request.NONE
        # How many blocks the task will have made at the end of a chunk in which it asked early.
        self._made_then = 0
        self._unchanged: bool | None = None
        self._binding = Binding.RELEASED

    @property
    def asks_early(self) -> bool:
        """Whether the request need not wait until the last batch is compared with its copy."""
        return self._binding is not Binding.WATCHED

    def ask_early(self) -> Ask | None:
        """Return the request to send while the last samples of a chunk are made, if none is sent.

        Invariant: only the block with the last batch is still to be made.
        """
        return self._ask(coming=1, early=True)

    def note_state(self, unchanged: bool) -> bool:
        """Record whether a batch left its dataset copy unchanged.

        Returns:
            Whether the carrier reports a change at once. For a watched logical worker, the next
            request reports it, because the scheduler needs it to choose the next chunk.
        """
        if self._binding is Binding.WATCHED:
            self._unchanged = unchanged
            return False
        return not unchanged

    def run(self) -> Generator[Step, Any, None]:
        """Yield the steps of the task, until its lease ends."""
        restarts = False
        while True:
            if (ask := self._ask()) is not None:
                yield ask
            assigned: AssignedChunk | None = yield _NEXT_CHUNK
            self._request = _Request.NONE
            if assigned is None:
                return
            self.place, self._binding = assigned.place + 1, assigned.binding
            self.made += assigned.skipped_blocks
            if restarts:
                assigned = replace(assigned, restarted=True)
            opened: tuple[Chunk, float] | None = yield Open(assigned)
            restarts = self._serves_one and opened is None and assigned.restarted
            if opened is not None:
                yield from self._make(assigned, *opened)
                yield EndChunk(self._finished(chunk_ended=True))

    def _ask(self, coming: int = 0, *, early: bool = False) -> Ask | None:
        """Return the next request, or None if one is pending.

        Args:
            coming: Number of blocks of the current chunk that the task still has to make.
            early: As for ``Ask``.
        """
        if self._request is not _Request.NONE:
            return None
        self._request = _Request.EARLY if early else _Request.SENT
        self._made_then = self.made + coming
        unchanged, self._unchanged = self._unchanged, None
        return Ask(self.place, self._made_then, unchanged, early)

    def _finished(self, *, chunk_ended: bool = False) -> int | None:
        """Return the value of ``finished`` for the next step, and report an early request once."""
        if self._request is not _Request.EARLY or not (chunk_ended or self.made >= self._made_then):
            return None
        # A block that the request has announced counts even if its chunk was cancelled. Otherwise
        # the scheduler would not count the first block of the next chunk.
        self.made = self._made_then
        self._request = _Request.SENT
        return self.place

    def _make(
        self, assigned: AssignedChunk, chunk: Chunk, now: float
    ) -> Generator[Step, Any, None]:
        """Make the batches of a chunk; send each block as soon as it is long enough."""
        opened, left = now, len(chunk.batches)
        if (
            assigned.again
        ):  # each batch is sent at once, so it survives another death of the process
            long_block_s = long_batch_s = 0.0
        elif chunk.patient:
            long_block_s = long_batch_s = tuning.PATIENT_S
        else:
            long_block_s = tuning.BLOCK_S
            long_batch_s = 0.0 if left <= tuning.SHORT_CHUNK else tuning.LONG_BATCH_S
        while True:
            batch: MadeBatch | None = yield _NEXT_BATCH
            if batch is None:
                return
            left -= 1
            # Tensors in segments do not make a block longer. But only a patient loop waits for it.
            block_bytes = batch.inline_bytes if chunk.patient else batch.batch_bytes
            full = block_bytes >= tuning.BLOCK_BYTES or batch.now - opened >= long_block_s
            last = left == 0 or batch.ended
            if not (last or full or batch.seconds >= long_batch_s):
                continue
            # The answer comes while the carrier stores the block.
            if last and (ask := self._ask(coming=1)) is not None:
                yield ask
            self.made += 1
            opened = yield Send(self._finished())
