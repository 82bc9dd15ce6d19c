"""The lease of one task: the time for which the task asks for chunks."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Part, PickledChunk

__all__ = ["DeadlyChunkError", "LeaseState", "TaskLease"]


# Invariant: a task that asks for its next chunk has stored all blocks of the chunks before its last
# chunk. So a restarted task repeats at most this many chunks.
_KEPT_CHUNKS = 2


class DeadlyChunkError(Exception):
    """The worker process of a chunk has died too often.

    Attributes:
        parts: The chunks that the process may have had to make.
    """

    def __init__(self, text: str, parts: Iterable[Part]) -> None:
        super().__init__(text)
        self.parts = list(parts)


class LeaseState(enum.Enum):
    """The state of a task lease.

    Each arrow is a method of ``TaskLease``. ``ask`` requests the next chunk::

                            give
          ask ──> WAITING ────────> WORKING ──> ask
                     │                │
                     │ end            │ end: the chunk kills its processes
                     ▼                │
                   ENDED <────────────┘
                  ▲     │
              ask │     │ repeat: Ray needs output again of a task that had ended
                  │     ▼
                 REPEATING

    Ray also restarts a task whose process has died. If its lease has not ended, ``repeat`` leads to
    ``WORKING``. A chunk that kills its processes also ends a lease that repeats.
    """

    WAITING = "the task waits for a chunk or for the next iteration"
    WORKING = "the task makes a chunk"
    ENDED = "the task gets no more chunks"
    REPEATING = "the lease has ended, and the restarted task makes a chunk again"


@dataclass
class TaskLease:
    """The lease of one task.

    Attributes:
        name: The task's ID, which does not change if Ray restarts the task.
        attempt: Name of the task's process, which changes if Ray restarts the task.
        began: When the task first asked.
        state: The state of the lease.
        waiting: Whether the task waits for a chunk or for the next iteration.
        busy: Whether the task has a chunk, and has not requested the next one.
        ended: Whether the task gets no more chunks.
        given: How many chunks the task got in all; 0 if it must repeat none of them.
        run: Number of the iteration in which it got the last chunk.
        alone: Whether the lease may contain no chunk but the last chunk.
        last_worker: The logical worker of the last chunk.
        runs: The logical worker of the chunk that the task's process makes now; None if it makes
            none.
        making: The logical worker of the chunk before, if the task asked before its last sample of
            that chunk, and may still make that sample; else None.
        repeats: The logical worker of a chunk that a restarted task has to repeat, but must not
            repeat yet; else None.
        workers: The logical workers that are bound to the task's process.
        restarted: Those of them whose state starts again in this process, because it was in another
            one. Their next chunk says so.
        fresh: Those of them of which no batch has been made, as far as is known.
        made: How many blocks the process had made at its last request, or was about to finish.
        unanswered: Whether the last request has no answer yet.
        answer: The last answer.
        asked_at: When the task made that request.
        changed: Called after each change of the state, or of the logical workers in ``held``.
    """

    name: str
    attempt: str
    began: float
    changed: Callable[[TaskLease], None] = field(default=lambda _: None, repr=False)
    state: LeaseState = field(init=False)
    waiting: bool = field(init=False)
    busy: bool = field(init=False)
    ended: bool = field(init=False)
    given: int = 0
    run: int = 0
    alone: bool = False
    last_worker: int = 0
    runs: int | None = None
    making: int | None = None
    repeats: int | None = None
    workers: set[int] = field(default_factory=set)
    restarted: set[int] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)
    made: int = 0
    unanswered: bool = False
    answer: AssignedChunk | None = None
    asked_at: float = 0.0
    # The places of the last request, and of the last one before which no sample is left.
    _asked: int = 0
    _finished: int = -1
    # The last chunks, for each how many blocks the task had made before it, and its iteration.
    _chunks: deque[PickledChunk] = field(default_factory=lambda: deque(maxlen=_KEPT_CHUNKS))
    _blocks: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_CHUNKS))
    _runs: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_CHUNKS))
    # Whether the last request was for a chunk to repeat.
    _repeats: bool = False
    # How often processes have died on the last chunk, or on the one before if it is being made.
    _deaths: int = 0
    # How many blocks the process will have made when it begins its chunk.
    _made_before: int = 0
    # The index in ``_chunks`` of the chunk to repeat.
    _repeated: int = 0
    # The most blocks that any process had made when it asked for its next chunk.
    _most_made: int = 0
    # The task's earlier processes. Ray may have restarted the task while one could not be reached.
    _past_attempts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._enter(LeaseState.WAITING)

    def _enter(self, state: LeaseState) -> None:
        # Plain attributes, because the scheduler reads them often.
        self.state = state
        self.waiting = state is LeaseState.WAITING
        self.busy = state is LeaseState.WORKING or state is LeaseState.REPEATING
        self.ended = state is LeaseState.ENDED or state is LeaseState.REPEATING
        self.changed(self)

    @property
    def running(self) -> set[int]:
        """The logical workers whose samples the task's process may make now."""
        return {worker for worker in (self.runs, self.making) if worker is not None}

    @property
    def held(self) -> set[int]:
        """The logical workers whose further chunks no other lease may get."""
        held = self.running if self.ended else self.running | self.workers
        if self.repeats is not None:
            held.add(self.repeats)
        if self._repeats:
            # Later chunks of these logical workers must not come before those to repeat.
            held.update(chunk.worker for chunk in list(self._chunks)[self._repeated + 1 :])
        return held

    @property
    def was_restarted(self) -> bool:
        """Whether Ray has restarted the task."""
        return bool(self._past_attempts)

    def is_past(self, attempt: str) -> bool:
        """Return whether a process is not the task's last one."""
        return attempt in self._past_attempts

    def has_asked(self, attempt: str, place: int) -> bool:
        """Return whether a process repeats its last request, because it got no answer."""
        known = self.unanswered or self.answer is not None or self.ended
        return known and attempt == self.attempt and place == self._asked

    def note_request(self, attempt: str, place: int, made: int, *, early: bool) -> bool:
        """Record that a process of the task requests its next chunk.

        Args:
            attempt: Name of the process.
            place: How many chunks the task has made.
            made: How many blocks the process has made of these chunks, or is about to finish.
            early: Whether it still makes samples of the last chunk. The report of their end may
                overtake the request.

        Returns:
            Whether the process replaces a process that had not reported the end of its samples.
        """
        replaces = attempt != self.attempt
        unfinished = replaces and bool(self.running)
        if replaces:
            self._past_attempts.add(self.attempt)
            self.attempt, self._finished = attempt, -1
            self.restarted |= self.workers
            self.fresh.clear()
        elif made > self._made_before and self.runs is not None:
            # Otherwise the chunk was cancelled before its first batch, and nothing was reported.
            self.restarted.discard(self.runs)
            self.fresh.discard(self.runs)
        self.made, self._asked, self._repeats = made, place, place < self.given
        self.making = self.runs if early and self._finished < place else None
        self.runs = self.repeats = None
        self.changed(self)
        return unfinished

    def ask(self) -> None:
        """Switch to waiting for the next chunk, unless the lease has ended."""
        self._most_made = max(self._most_made, self.made)
        self._enter(LeaseState.ENDED if self.ended else LeaseState.WAITING)

    def finish(self, place: int) -> None:
        """Record that the task has made the last sample before a request."""
        self._finished = place
        if place >= self._asked:
            self.making = None
            if self._chunks and not self._repeats:
                self._deaths = self._chunks[-1].deaths
            self.changed(self)

    def unbind(self, worker: int | None = None) -> None:
        """Bind the task's process to a logical worker no more; to none if ``worker`` is None."""
        workers = set(self.workers) if worker is None else {worker}
        self.workers -= workers
        self.restarted -= workers
        self.fresh -= workers
        self.changed(self)

    def give(self, chunk: PickledChunk, run: int) -> None:
        """Give the waiting task its next chunk, in an iteration."""
        self._chunks.append(chunk)
        self._blocks.append(self._most_made)
        self._runs.append(run)
        self.given += 1
        self.run, self.alone = run, chunk.alone
        self.last_worker = self.runs = chunk.worker
        self._made_before = self.made
        if self.making is None:  # else the chunk before may still kill the process
            self._deaths = chunk.deaths
        self._enter(LeaseState.WORKING)

    def end(self) -> None:
        """End the lease."""
        self._enter(LeaseState.ENDED)

    def last_chunk(self, binding: Binding) -> AssignedChunk:
        """Return the chunk that the task has been given.

        Args:
            binding: The binding of the chunk's logical worker.
        """
        payload, run = self._chunks[-1].payload, self._runs[-1]
        restarted = self.last_worker in self.restarted
        return AssignedChunk(payload, self.given - 1, binding, restarted=restarted, iteration=run)

    def repeat(self, place: int, binding: Binding) -> AssignedChunk:
        """Return a chunk that the lease has had before, because Ray has restarted its task.

        The task may make the chunk after ``begin_repeat``.

        Args:
            place: How many chunks the task has made since it was restarted.
            binding: The binding of the chunk's logical worker.

        Raises:
            DeadlyChunkError: The process has died too often on the chunk; the lease has ended.
        """
        self._deaths += place == 0
        if self._deaths >= tuning.MAX_DEATHS:
            text = f"its worker process died {self._deaths} times in a row. Ray's logs say why"
            error = DeadlyChunkError(text, (chunk.part for chunk in self._chunks))
            self._forget_chunks()
            self.end()
            raise error
        self._enter(LeaseState.REPEATING if self.ended else LeaseState.WORKING)
        # Invariant: ``_chunks[kept]`` is the chunk after the first ``place`` chunks. If that one
        # is discarded, the task starts at the oldest kept chunk, and the blocks before it count as
        # made.
        kept = max(0, place - self.given + len(self._chunks))
        skipped = max(0, self._blocks[kept] - self.made)
        self._blocks[kept] = max(self._blocks[kept], self.made)
        self._made_before = self.made + skipped
        self.repeats, self._repeated = self._chunks[kept].worker, kept
        self.changed(self)
        return AssignedChunk(
            self._chunks[kept].payload,
            self.given - len(self._chunks) + kept,
            binding,
            again=True,
            restarted=self.repeats in self.restarted,
            skipped_blocks=skipped,
            iteration=self._runs[kept],
        )

    def begin_repeat(self) -> None:
        """Record that the restarted task makes the chunk that it has to repeat."""
        if self.repeats is not None:  # else an earlier call of the task has done this
            self.runs, self.repeats = self.repeats, None
            self.changed(self)

    def give_back(self, run: int) -> list[PickledChunk]:
        """End the lease, which then has no chunk to repeat.

        Args:
            run: Number of the present iteration.

        Returns:
            The chunks of this iteration that the task has not repeated.
        """
        first = self._repeated if self.repeats is not None else 0
        kept = list(zip(self._chunks, self._runs, strict=True))[first:]
        self._forget_chunks()
        self.end()
        chunks = [chunk for chunk, its_run in kept if its_run == run]
        return [replace(chunk, resent=True, deaths=self._deaths) for chunk in chunks]

    def _forget_chunks(self) -> None:
        """Leave a restarted task no chunk to repeat, and no logical worker to hold."""
        for had in (self._chunks, self._runs, self._blocks):
            had.clear()
        self.given, self.repeats, self.runs, self.making = 0, None, None, None
