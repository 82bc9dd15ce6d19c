"""The chunks of one logical worker that has a process of its own.

Invariant: the process makes the chunks in the order in which they were fed. A chunk that is sent
again after a loss comes before the chunks that follow it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, PickledChunk, insert_in_turn
from dpex.protocol.loss_causes import Loss, LossCause

__all__ = ["WorkerQueue"]


class WorkerQueue:
    """The chunks of a logical worker: those that its process has, and those that wait.

    A chunk takes this way::

        feed          next                              note_chunk_ended
        ────> WAITING ────> GIVEN: at most two chunks ──────────────────> done
                 ▲            │
                 └────────────┘ note_death

    The process requests a chunk when it starts, and again while it makes the last samples of each
    chunk. So the next chunk is there when it needs one.

    Attributes:
        iteration: Number of the present iteration, from 1.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self._open = False
        self._waiting: deque[PickledChunk] = deque()
        # The chunks that the process has, each with its iteration. It makes the first one.
        self._given: deque[tuple[PickledChunk, int]] = deque()
        # How many chunks the present process has been given.
        self._place = 0
        self._requested = True
        # Whether the process reads what it is sent, because it has nothing else to do.
        self._reads = False
        # Whether an earlier process has had a chunk, so the state of the worker starts again.
        self._restarted = False

    @property
    def at_work(self) -> bool:
        """Whether the process makes a chunk."""
        return bool(self._given)

    def begin(self) -> None:
        """Start an iteration."""
        self.iteration += 1
        self._open = True

    def end(self) -> None:
        """End the iteration: no further chunk of it is made."""
        self._open = False
        self._waiting.clear()

    def feed(self, chunk: PickledChunk) -> None:
        """Add a chunk: after the others, or if it is resent, before new ones."""
        insert_in_turn(self._waiting, chunk)

    def next(self) -> AssignedChunk | None:
        """Return the chunk to send to the process now, or None.

        A large chunk waits until the process reads. Otherwise the sender could wait for a process
        that waits for the sender to take its batches.
        """
        if not (self._requested and self._waiting):
            return None
        chunk = self._waiting[0]
        if not self._reads and len(chunk.payload) > tuning.EARLY_CHUNK_BYTES:
            return None
        self._waiting.popleft()
        self._given.append((chunk, self.iteration))
        self._requested = self._reads = False
        self._place += 1
        restarted, self._restarted = self._restarted, False
        return AssignedChunk(
            chunk.payload,
            self._place - 1,
            Binding.ALWAYS,
            again=chunk.deaths > 0,
            restarted=restarted,
            iteration=self.iteration,
        )

    def note_start(self) -> None:
        """Record that a new process runs, and reads its first chunk."""
        self._reads = not self._given

    def note_request(self) -> None:
        """Record that the process requests its next chunk."""
        self._requested = True

    def note_chunk_ended(self) -> None:
        """Record that the process makes its chunk no more: it is made, or nothing waits for it."""
        self._given.popleft()
        self._reads = not self._given

    def note_death(self, how: str) -> Loss | None:
        """Record that the process has died, and that another one starts in its place.

        Args:
            how: How it died, for error messages.

        Returns:
            The loss of the chunk that it made, if processes have died too often on that chunk.
        """
        given = [chunk for chunk, iteration in self._given if iteration == self.iteration]
        self._restarted = self._restarted or self._place > 0
        self._given.clear()
        self._place, self._requested, self._reads = 0, True, False
        if not (self._open and given):
            return None
        loss = None
        deadly = replace(given[0], deaths=given[0].deaths + 1)
        if deadly.deaths >= tuning.MAX_DEATHS:
            text = f"{deadly.deaths} worker processes died in a row. Of the last one: {how}"
            loss = Loss(LossCause.TASK, text, deadly.part)
            del given[0]
        else:
            given[0] = deadly
        self._waiting.extendleft(reversed(given))
        return loss
