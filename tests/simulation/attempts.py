"""The attempts of tasks: each drives a ``WorkerLoop`` in a worker process, on virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Chunk, Entry, Part, Replaced
from dpex.protocol.worker_loop import (
    Ask,
    EndChunk,
    MadeBatch,
    NextBatch,
    NextChunk,
    Open,
    Send,
    WorkerLoop,
)
from simulation.machines import SHARED, Copy, StoredBlock, WorkerProcess

if TYPE_CHECKING:
    from simulation.pipelines import Pipeline
    from simulation.schedule import World

__all__ = ["Attempt"]

# Resumes a loop whose present batch has been read.
_READ = object()
BATCH_BYTES = 1 << 20


class Attempt:
    """One attempt of a task: the task's generator in one worker process.

    Attributes:
        name: The task's name.
        had: Dataset version and logical worker of each chunk that it was given, if it was bound.
        id: Name of the attempt.
        process: The worker process.
        again: Whether an earlier attempt had the present chunk.
        runs: The logical worker whose samples it makes now; None if it makes none.
        replaced: Whether Ray has started a further attempt of the task.
        restarted: Whether Ray has restarted the task after the death of the process.
        over: Whether it has ended, or its process has died.
        follows: Whether the task had an attempt before.
        asked_at: When it sent its last request.
        ended: Whether its lease has ended.
        waited_s: Time between its last request and the end of its lease.
    """

    __slots__ = (
        "_answers",
        "_batch",
        "_binding",
        "_blocks",
        "_chunk",
        "_done",
        "_earlier",
        "_entries",
        "_given",
        "_iteration",
        "_loop",
        "_request",
        "_restarted",
        "_seconds",
        "_steps",
        "_unconfirmed",
        "_waits_for",
        "_world",
        "again",
        "asked_at",
        "ended",
        "follows",
        "had",
        "id",
        "name",
        "over",
        "pipeline",
        "process",
        "replaced",
        "restarted",
        "runs",
        "waited_s",
        "yielded",
    )

    def __init__(
        self,
        world: World,
        pipeline: Pipeline,
        name: str,
        number: int,
        process: WorkerProcess,
        *,
        follows: bool,
    ) -> None:
        self._world = world
        self.pipeline = pipeline
        self.name = name
        self.id = f"{name} attempt {number}"
        self.again = False
        self.process = process
        process.attempt = self
        process.ended.setdefault(pipeline.number, 0)
        self.runs: int | None = None
        self.replaced = self.restarted = self.over = self.ended = False
        self.follows = follows
        self.asked_at = self.waited_s = 0.0
        self.yielded = 0
        self.had: list[tuple[int, int]] = []
        self._chunk: Chunk | None = None
        self._done = True
        self._entries: list[Entry] = []
        self._seconds = 0.0
        # Messages that the actor has not confirmed, and those of chunks before the present one.
        self._unconfirmed: set[int] = set()
        self._earlier: set[int] = set()
        self._blocks = self._request = 0
        # What the loop waits for, and the answers that have come before it waits.
        self._waits_for: Any = None
        self._answers: list[AssignedChunk | None] = []
        self._loop = WorkerLoop()
        self._steps = self._loop.run()

    def start(self) -> None:
        """Begin to drive the loop."""
        self._advance(None)

    def _later(self, delay_s: float, value: Any) -> None:
        self._world.clock.after(delay_s, self._resume, value)

    def _resume(self, value: Any) -> None:
        """Continue the loop, unless its process is dead or silent."""
        if self.over:
            return
        process, clock = self.process, self._world.clock
        if process.silent_until > clock.now:
            clock.after(process.silent_until - clock.now, self._resume, value)
            return
        if value is _READ:
            value = self._read()
            if self.over:
                return
        self._advance(value)

    def _advance(self, value: Any) -> None:
        """Perform the steps of the loop until one of them takes time."""
        send = self._steps.send
        while True:
            try:
                step = send(value)
            except StopIteration:
                self._return()
                return
            value = None
            kind = type(step)
            if kind is NextBatch:
                if not self._begin_batch():
                    continue
                return
            if kind is Send:
                self._send(step)
                value = self._world.clock.now
            elif kind is Ask:
                if self._earlier:
                    self._waits_for = step
                    return
                self._ask(step)
            elif kind is NextChunk:
                if not self._answers:
                    self._waits_for = step
                    self.pipeline.cluster.note_waiting(self)
                    return
                value = self._answers.pop()
            elif kind is Open:
                if self._must_wait(step.assigned):
                    self._waits_for = step
                    return
                value = self._open(step.assigned)
            elif kind is EndChunk and step.finished is not None:
                self._message(self.pipeline.take_finished, self, step.finished)

    def die(self) -> None:
        """End with the process."""
        self.over = True
        if self.runs is not None:
            self._world.invariants.end(self)
            self.runs = None
        self._world.states.lose(self)

    def _return(self) -> None:
        """End the task: its lease has ended."""
        if self._unconfirmed:
            self._waits_for = self._return
            return
        self.over = True
        self.process.attempt = None
        self.pipeline.cluster.note_end(self)

    # --- requests and messages --------------------------------------------------------------------

    def _ask(self, step: Ask) -> None:
        """Send a request. If the answer of the first one is lost, the process repeats it."""
        world = self._world
        self.asked_at = world.clock.now
        self._request += 1
        send, link = world.network.send, self.process.link
        if world.network.repeats:
            world.network.repeats -= 1
            send(link, self._lose_answer, step)
        else:
            send(link, self.pipeline.take_request, self, self._request, step)

    def _lose_answer(self, step: Ask) -> None:
        """Receive a request whose answer is lost, so that the process repeats it."""
        request = self._request
        self.pipeline.take_request(self, 0, step)
        if not self.over and request == self._request:
            link = self.process.link
            self._world.network.send(link, self.pipeline.take_request, self, request, step)

    def answer(self, request: int, assigned: AssignedChunk | Replaced | None) -> None:
        """Receive the answer to a request; only that to the last one counts."""
        if self.over or request != self._request:
            return
        if isinstance(assigned, Replaced):
            self._world.cluster.die(self.process)
            return
        self._answers = [assigned]
        if type(self._waits_for) is NextChunk:
            self._waits_for = None
            self._answers = []
            self.pipeline.cluster.note_resumes(self)
            self._resume(assigned)

    def _message(self, receive: Any, *content: Any) -> None:
        number = self._blocks
        self._blocks += 1
        self._unconfirmed.add(number)
        self._world.network.send(self.process.link, self._arrive, number, receive, content)

    def _arrive(self, number: int, receive: Any, content: tuple[Any, ...]) -> None:
        """Receive a message at the pipeline actor, and confirm it; later copies are dropped."""
        if number not in self._unconfirmed:
            return
        if self.process.loses and self._world.draw() < 0.5:
            return  # it was lost with the process
        self._unconfirmed.discard(number)
        self._earlier.discard(number)
        receive(*content)
        waits_for = self._waits_for
        if self.over or waits_for is None:
            return
        if type(waits_for) is Ask and not self._earlier:
            self._waits_for = None
            self._ask(waits_for)
            self._resume(None)
        elif waits_for == self._return and not self._unconfirmed:
            self._waits_for = None
            self._return()

    @property
    def chunk(self) -> Chunk:
        """The chunk that it makes."""
        assert self._chunk is not None
        return self._chunk

    # --- chunks -----------------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether nothing waits for the batches of the present chunk, as far as is known here."""
        return self._iteration <= self.process.ended[self.pipeline.number]

    def _must_wait(self, assigned: AssignedChunk) -> bool:
        """Return whether a replaced process of this machine still runs; kill it after a while."""
        self._iteration = assigned.iteration
        for attempt in assigned.replaced:
            process = self._world.cluster.process_of(attempt)
            if process is not self.process and process.alive and process.node is self.process.node:
                if self.cancelled:
                    return False
                self._world.cluster.kill_later(process)
                process.at_end.append(self._look_again)
                return True
        return False

    def _look_again(self) -> None:
        waits_for = self._waits_for
        if self.over or type(waits_for) is not Open or self._must_wait(waits_for.assigned):
            return
        self._waits_for = None
        self._world.clock.after(0.0, self._resume, self._open(waits_for.assigned))

    def _open(self, assigned: AssignedChunk) -> tuple[Chunk, float] | None:
        """Begin a chunk."""
        self._earlier = set(self._unconfirmed)
        if self.pipeline.later_stages:
            self.yielded += assigned.skipped_blocks
        self._done = True
        if self.cancelled:
            return None
        chunk: Any = assigned.payload
        if self.pipeline.numbers[chunk.run.key] <= self.process.ended[self.pipeline.number]:
            self._world.fail(f"{self.id} makes a chunk of an iteration that has ended")
        self._chunk, self._batch, self._done = chunk, 0, False
        self._binding = self._given = assigned.binding
        self._restarted, self.again = assigned.restarted, assigned.again
        self._entries, self._seconds = [], 0.0
        self._world.log("begins", self.id, chunk.number, chunk.worker, assigned.again)
        return chunk, self._world.clock.now

    def _begin_batch(self) -> bool:
        """Begin to read the next batch; return False if there is none."""
        chunk = self._chunk
        assert chunk is not None
        if self._done or self.cancelled:
            self._stop()
            return False
        if self.runs is None:
            self.runs = chunk.worker
            self._world.invariants.begin(self)
        if not chunk.stream:  # a process has its copy before it makes samples or asks early
            version, worker = chunk.run.dataset_version, chunk.worker
            if self._restarted and self._batch == 0:
                self.process.copies.pop((version, worker), None)
            self._copy((version, worker if self._binding.bound else SHARED))
        self._seconds = seconds = self._world.batch_seconds()
        early = self._batch == len(chunk.batches) - 1 and self._loop.asks_early
        if early and not chunk.stream and self._world.draw() < 0.5:
            self._world.clock.after(0.7 * seconds, self._ask_early)
        self._later(seconds, _READ)
        return True

    def _stop(self) -> None:
        self._done = True
        if self.runs is not None:
            self._world.invariants.end(self)
            self.runs = None

    def _ask_early(self) -> None:
        # The task would wait until the blocks of earlier chunks have arrived.
        if self.over or self._earlier or self.process.silent_until > self._world.clock.now:
            return
        if (step := self._loop.ask_early()) is not None:
            self._ask(step)

    def _read(self) -> Any:
        """Make the present batch."""
        chunk = self._chunk
        assert chunk is not None
        world = self._world
        plan = world.plan
        batch = chunk.first_batch + self._batch * chunk.stride
        index = self._batch
        if self.cancelled:
            self._world.states.cancel(self, chunk, self._given)
            self._stop()
            return None
        self._batch += 1
        number = batch if plan.streams is not None else chunk.batches[index][0]
        if number in plan.deadly and not self._is_past_end(chunk, batch):
            world.states.kill(chunk, batch // chunk.stride)
            if not self.replaced:
                world.budgets.die(chunk)
            world.cluster.die(self.process)
            return None
        if chunk.stream:
            entry = self._read_stream(chunk, batch)
        else:
            assert chunk.positions[index] == chunk.batches[index][0]
            entry = self._read_indices(chunk, batch, chunk.batches[index][0])
        world.invariants.make(self, chunk, batch)
        self._entries.append(entry)
        if self._batch == len(chunk.batches) or entry.outcome == "end":
            self._stop()
        size = BATCH_BYTES * len(self._entries)
        return MadeBatch(world.clock.now, self._seconds, size, size, entry.outcome == "end")

    def _is_past_end(self, chunk: Chunk, batch: int) -> bool:
        streams = self._world.plan.streams
        return streams is not None and batch // chunk.stride >= streams[chunk.worker]

    def _copy(self, slot: tuple[Any, int]) -> Copy:
        """Return the copy in a slot: an unchanged one of another slot, or a new one."""
        copies, binding = self.process.copies, self._binding
        copy = copies.get(slot)
        if copy is None:
            for other, found in list(copies.items()):
                shares = binding is Binding.WATCHED or SHARED in (slot[1], other[1])
                if shares and other[0] == slot[0] and found.watched and not found.changed:
                    copy = copies.pop(other)
                    break
        if copy is None:
            self.process.drop_copies(self.pipeline.number, other_than=slot[0])
            copy = Copy(watched=binding is not Binding.ALWAYS)
        copies[slot] = copy
        starts_again = self._restarted and self._given is Binding.ALWAYS and not self.chunk.stream
        copy.restarted = copy.restarted or starts_again
        copy.pipeline = self.pipeline.number
        return copy

    def _read_indices(self, chunk: Chunk, batch: int, number: int) -> Entry:
        version, worker, index = chunk.run.dataset_version, chunk.worker, batch // chunk.stride
        slot = (version, worker if self._binding.bound else SHARED)
        states, copy, binding = self._world.states, self._copy(slot), self._binding
        if copy.restarted and not copy.reported:
            copy.reported = True
            states.report(self, chunk)
        states.make(self, chunk, index, copy, self._given)
        changed = copy.changed
        changes = self._world.plan.keeps_state(worker, index)
        copy.changed += changes
        if binding is Binding.WATCHED or (binding is Binding.RELEASED and changes):
            states.compare(self, chunk, binding, changes=changes)
            self._note_state(not changes)
            if changes:
                self.process.copies.pop(slot)
                self.process.copies[version, worker] = copy
                self._binding = Binding.ALWAYS
        return Entry(batch, (number, changed))

    def _note_state(self, unchanged: bool) -> None:
        if self._loop.note_state(unchanged):
            self._message(self.pipeline.take_change, self.name, self.chunk.worker)

    def _read_stream(self, chunk: Chunk, batch: int) -> Entry:
        worker, number = chunk.worker, batch // chunk.stride
        assert self._world.plan.streams is not None
        length = self._world.plan.streams[worker]
        copy = self._copy((chunk.run.dataset_version, worker))
        begin = chunk.begin[0] if chunk.begin else 0
        if number <= length:
            self._world.states.make(self, chunk, number, copy, self._given)
        if copy.epoch != chunk.run.epoch or not begin <= copy.read <= number:
            copy.epoch, copy.read = chunk.run.epoch, begin
        copy.read = number + 1
        if number >= length:
            return Entry(batch, None, "end", state=b"%d" % length)
        return Entry(batch, (worker, number), samples=1, state=b"%d" % (number + 1))

    def _send(self, step: Send) -> None:
        """Send the block of the batches that have been made."""
        chunk, entries = self._chunk, self._entries
        assert chunk is not None
        self._entries = []
        part = Part(chunk.run.key, chunk.number, tuple([entry.batch for entry in entries]))
        block = StoredBlock(part, entries, self._seconds)
        pipeline = self.pipeline
        if pipeline.later_stages:
            pipeline.yield_block(self, self.yielded, block)
            self.yielded += 1
            if step.finished is not None:
                self._message(pipeline.take_finished, self, step.finished)
            return
        self._message(pipeline.take_block, block, pipeline.store(self, block), self, step.finished)
