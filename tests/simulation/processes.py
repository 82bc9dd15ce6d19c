"""The carrier of worker processes of one machine, on virtual time.

Each logical worker has one process at a time. ``ProcessWorld`` plays the same training loops as
``World``, with the faults that processes of one machine have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dpex import tuning
from dpex.protocol import chunks as messages
from dpex.protocol.chunks import AssignedChunk, Chunk, Entry, Part, PickledChunk
from dpex.protocol.loss_causes import Loss, lost_block
from dpex.protocol.sent_chunks import Attempt
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
from dpex.protocol.worker_queue import WorkerQueue
from simulation.loader import BATCH_BYTES, Loader, TrainingLoop
from simulation.machines import StoredBlock
from simulation.plan import Fault, Plan
from simulation.schedule import World

if TYPE_CHECKING:
    from dpex.protocol.recovery import Recovery

__all__ = ["ProcessWorld"]

MOST_SILENCE_S = 6.0
START_S = 0.05
MESSAGE_S = 0.002
# Share of the chunks that a process gets only when it has nothing else to do.
LARGE_SHARE = 0.1
_FIRST = Attempt()
# The faults of a cluster for which this carrier has another one.
_FAULTS = {Fault.SILENCE: Fault.SILENCE, Fault.STORE: Fault.STORE, Fault.FULL: Fault.STORE}


class Payload:
    """A chunk in place of its pickle, and the size of that.

    Attributes:
        chunk: The chunk.
    """

    def __init__(self, chunk: Chunk, size_bytes: int) -> None:
        self.chunk = chunk
        self._size_bytes = size_bytes

    def __len__(self) -> int:
        return self._size_bytes


class Pipe:
    """One direction of a connection: messages arrive in the order in which they were sent."""

    def __init__(self, world: ProcessWorld, receive: Callable[[Any], None]) -> None:
        self._world = world
        self._receive = receive
        self._messages: deque[Any] = deque()
        self._last_at = 0.0

    def send(self, message: Any) -> None:
        """Send a message."""
        clock = self._world.clock
        at = max(self._last_at, clock.now + MESSAGE_S * self._world.draw())
        self._last_at = at
        self._messages.append(message)
        clock.after(at - clock.now, self._arrive)

    def _arrive(self) -> None:
        if self._messages:
            self._receive(self._messages.popleft())

    def drain(self) -> None:
        """Receive at once what was sent before the sender died."""
        while self._messages:
            self._receive(self._messages.popleft())


class Process:
    """A worker process.

    Attributes:
        worker: Number of its logical worker.
        alive: Whether it runs.
        silent_until: The time until which it does nothing.
        to_training: What it sends.
        to_process: What it receives.
    """

    def __init__(self, world: ProcessWorld, worker: int, receive: Callable[[Any], None]) -> None:
        self._world = world
        self.worker = worker
        self.alive = True
        self.silent_until = 0.0
        self.to_training = Pipe(world, receive)
        self.to_process = Pipe(world, self._take)
        self._inbox: deque[AssignedChunk] = deque()
        self._ended = 0
        self._asked = False
        self._waits = False
        self._chunk: Chunk | None = None
        self._assigned: AssignedChunk | None = None
        self._entries: list[Entry] = []
        self._batch = 0
        self._seconds = 0.0
        self._loop = WorkerLoop(serves_one=True)
        self._steps = self._loop.run()
        world.clock.after(START_S * world.draw(), self._start)

    def _start(self) -> None:
        if self.alive:
            self.to_training.send("started")
            self._advance(None)

    def _take(self, message: AssignedChunk | int) -> None:
        """Receive a chunk, or the number of an iteration that has ended."""
        if not self.alive:
            return
        if isinstance(message, int):
            self._ended = message
            return
        self._inbox.append(message)
        if len(self._inbox) > 1:
            self._world.fail(f"process {self.worker} gets a chunk that it has not requested")
        if self._waits:
            self._waits = False
            self._advance(self._inbox.popleft())

    def _advance(self, value: Any) -> None:
        """Perform the steps of the loop until one of them takes time."""
        world = self._world
        if not self.alive:
            return
        if self.silent_until > world.clock.now:
            world.clock.after(self.silent_until - world.clock.now, self._advance, value)
            return
        if value is _READ:
            value = self._read()
            if not self.alive:
                return
        while True:
            step = self._steps.send(value)
            value = None
            match step:
                case NextBatch():
                    if self._begins_batch():
                        return
                case Send():
                    self._send_block()
                    value = world.clock.now
                case Ask():
                    self._ask()
                case NextChunk():
                    if not self._inbox:
                        self._waits = True
                        return
                    value = self._inbox.popleft()
                case Open(assigned):
                    value = self._open(assigned)
                case EndChunk():
                    self.to_training.send("chunk ended")

    def _ask(self) -> None:
        if self._asked:
            self.to_training.send("asks")
        self._asked = True  # the start of the process is the first request

    def _open(self, assigned: AssignedChunk) -> tuple[Chunk, float] | None:
        if assigned.iteration <= self._ended:
            self.to_training.send("chunk ended")
            return None
        payload: Any = assigned.payload
        chunk = payload.chunk
        self._chunk, self._assigned, self._batch, self._entries = chunk, assigned, 0, []
        self._world.copies.open(self, chunk, assigned)
        return chunk, self._world.clock.now

    def _begins_batch(self) -> bool:
        chunk = self._chunk
        assert chunk is not None
        assert self._assigned is not None
        stream_ended = bool(self._entries) and self._entries[-1].outcome == "end"
        over = self._batch == len(chunk.batches) or stream_ended
        if over or self._assigned.iteration <= self._ended:
            return False
        world = self._world
        self._seconds = world.batch_seconds()
        early = self._batch == len(chunk.batches) - 1 and self._loop.asks_early
        if early and not chunk.stream and world.draw() < 0.5:
            world.clock.after(0.7 * self._seconds, self._ask_early)
        world.clock.after(self._seconds, self._advance, _READ)
        return True

    def _ask_early(self) -> None:
        silent = self.silent_until > self._world.clock.now
        if self.alive and not silent and self._loop.ask_early() is not None:
            self._ask()

    def _read(self) -> MadeBatch | None:
        """Make the present batch."""
        chunk, world = self._chunk, self._world
        assert chunk is not None
        assert self._assigned is not None
        if self._assigned.iteration <= self._ended:
            return None
        batch = chunk.first_batch + self._batch * chunk.stride
        number = batch if chunk.stream else chunk.batches[self._batch][0]
        self._batch += 1
        plan = world.plan
        streams = plan.streams
        exists = streams is None or batch // chunk.stride < streams[chunk.worker]
        if number in plan.deadly and exists:
            world.budgets.die(chunk)
            world.die(self)
            return None
        world.copies.make(self, chunk, batch // chunk.stride)
        if not exists:
            assert streams is not None
            entry = Entry(batch, None, "end", state=b"%d" % streams[chunk.worker])
        elif chunk.stream:
            count = batch // chunk.stride
            entry = Entry(batch, (chunk.worker, count), samples=1, state=b"%d" % (count + 1))
        else:
            entry = Entry(batch, (number, 0))
        self._entries.append(entry)
        size = BATCH_BYTES * len(self._entries)
        return MadeBatch(world.clock.now, self._seconds, size, size, entry.outcome == "end")

    def _send_block(self) -> None:
        chunk, entries = self._chunk, self._entries
        assert chunk is not None
        self._entries = entries[-1:] if entries[-1].outcome == "end" else []
        part = Part(chunk.run.key, chunk.number, tuple([entry.batch for entry in entries]))
        self.to_training.send(StoredBlock(part, entries, self._seconds))


_READ = object()


class Copies:
    """The dataset copies of the logical workers, against those of torch's workers.

    Invariant: a logical worker makes its batches in order on one copy. If the copy is lost with
    its process, the next chunk is told that the state starts again, exactly once.
    """

    def __init__(self, world: ProcessWorld) -> None:
        self._world = world
        self._process: dict[int, Process] = {}
        # For each process, the last batch that it has made: its run, and its number.
        self._last: dict[Process, tuple[str, int]] = {}
        self._resent: set[tuple[str, int]] = set()
        self._sent: dict[str, set[int]] = {}

    def send(self, chunk: Chunk) -> None:
        """Note a chunk that is sent, and whether a batch of it was sent before."""
        sent = self._sent.setdefault(chunk.run.key, set())
        if not sent.isdisjoint(chunk.numbers):
            self._resent.add((chunk.run.key, chunk.number))
        sent.update(chunk.numbers)

    def begin(self) -> None:
        """Note that all processes are new, as torch's are: no state is lost."""
        self._process.clear()

    def open(self, process: Process, chunk: Chunk, assigned: AssignedChunk) -> None:
        """Check whether the first chunk of a process says that the state starts again."""
        if chunk.worker != process.worker:
            self._world.fail(f"process {process.worker} has a chunk of worker {chunk.worker}")
        before = self._process.get(process.worker)
        self._process[process.worker] = process
        lost = before is not None and before is not process
        if assigned.restarted and not (lost or (before is None and process.worker in self.heirs)):
            self._world.fail(f"a restart of logical worker {process.worker} has lost no state")
        if lost and not assigned.restarted:
            self._world.fail(f"nothing reports that the state of worker {process.worker} is lost")
        self.heirs.discard(process.worker)

    @property
    def heirs(self) -> set[int]:
        """The logical workers whose process died with a chunk that it had not opened."""
        return self._world.heirs

    def make(self, process: Process, chunk: Chunk, index: int) -> None:
        """Check that a batch follows the last batch of its process."""
        last = self._last.get(process)
        self._last[process] = chunk.run.key, index
        if (chunk.run.key, chunk.number) in self._resent or last is None:
            return
        run, before = last
        streams = self._world.plan.streams
        if streams is not None and index > streams[chunk.worker]:
            return  # a stream may be asked for batches after its end
        if run == chunk.run.key and index != before + 1 and not self._resent:
            self._world.fail(f"worker {process.worker} makes batch {index} after batch {before}")


class Worker:
    """A logical worker as the training process sees it: its queue, and its present process."""

    def __init__(self, carrier: ProcessLoader, number: int) -> None:
        self._carrier = carrier
        self._world = carrier.world
        self.number = number
        self.queue = WorkerQueue()
        self.process = Process(self._world, number, self._take)
        self._world.processes.append(self.process)

    def advance(self) -> None:
        """Send the process its next chunk, if it has requested one."""
        assigned = self.queue.next()
        if assigned is not None:
            self.process.to_process.send(assigned)

    def _take(self, message: Any) -> None:
        if isinstance(message, StoredBlock):
            self._carrier.take_block(message)
            return
        if message == "started":
            self.queue.note_start()
        elif message == "asks":
            self.queue.note_request()
        else:
            self.queue.note_chunk_ended()
        self.advance()

    def replace(self) -> None:
        """Take what the dead process had sent, and start another process."""
        if self._carrier.closed:
            return
        if self.process.alive:
            return
        self.process.to_training.drain()
        had = self.queue.at_work
        loss = self.queue.note_death("killed")
        if had:
            self._world.heirs.add(self.number)
        self.process = Process(self._world, self.number, self._take)
        self._world.processes.append(self.process)
        self.advance()
        if loss is not None:
            self._carrier.add(loss)


class ProcessLoader(Loader):
    """A loader's worker processes, and the carrier of its epochs.

    Attributes:
        world: The world.
        closed: Whether the processes have ended.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__(loop)
        assert isinstance(loop.world, ProcessWorld)
        self.world: ProcessWorld = loop.world
        self.closed = True
        self._workers: list[Worker] = []
        self._key = ""
        self._news: deque[StoredBlock | Loss] = deque()

    def open(self, run: messages.Run) -> None:
        """Begin an iteration, on new processes unless they persist."""
        self._key = run.key
        self._news.clear()
        if self.closed:
            self.closed = False
            self.world.copies.begin()
            self._workers = [Worker(self, w) for w in range(self.world.plan.workers)]
        for worker in self._workers:
            worker.queue.begin()

    def send(self, chunks: Sequence[Chunk], attempt: Attempt, *, one_by_one: bool) -> None:
        """Send chunks."""
        fed = {}
        for chunk in chunks:
            large = self.world.draw() < LARGE_SHARE
            payload: Any = Payload(chunk, tuning.EARLY_CHUNK_BYTES + large)
            part = Part(chunk.run.key, chunk.number)
            self.world.budgets.send(chunk)
            self.world.copies.send(chunk)
            worker = fed[chunk.worker] = self._workers[chunk.worker]
            resent = attempt != _FIRST
            worker.queue.feed(PickledChunk(payload, chunk.worker, part, attempt.alone, resent))
        for worker in fed.values():
            worker.advance()

    def take_block(self, block: StoredBlock) -> None:
        """Decode a block, unless its memory is lost."""
        if block.block.run != self._key:
            return
        if self.world.losses and self.world.invariants.may_lose(block.block, "block", 1):
            self.world.losses -= 1
            self.add(lost_block("its memory is lost", block.block))
        else:
            self.add(block)

    def add(self, news: StoredBlock | Loss) -> None:
        """Add a block or a loss for the training loop."""
        self._news.append(news)
        self.world.training.wake()

    def end(self) -> None:
        """End the iteration, and its processes unless they persist."""
        for worker in self._workers:
            worker.queue.end()
            worker.process.to_process.send(worker.queue.iteration)
        if not self.world.plan.persistent:
            self.close()

    def close(self) -> None:
        """End the processes."""
        self.closed = True
        self._key = ""
        for worker in self._workers:
            worker.process.alive = False
        self._workers = []

    def take(self) -> StoredBlock | Loss | None:
        """Return the next news."""
        news = self._news.popleft() if self._news else None
        if isinstance(news, Loss):
            self.world.budgets.lose(news)
        return news

    def has_news(self) -> bool:
        """Return whether there is news."""
        return bool(self._news)

    ended = False
    replaceable = False

    def lost_with_node(self) -> bool:
        """Return False: this machine is the only node."""
        return False

    def note_recovery(self, plan: Recovery) -> None:
        """Note that batches are resent."""
        self.world.log("recovers", plan.cause.name, plan.retries)

    @property
    def workers(self) -> list[Worker]:
        """The logical workers, if there are processes."""
        return self._workers


class ProcessWorld(World):
    """One schedule on worker processes of one machine.

    Attributes:
        processes: All processes.
        losses: How many of the next blocks cannot be read.
        heirs: Logical workers whose processes died with a chunk.
    """

    carrier = "processes"

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        super().__init__(seed, plan)
        # What only clusters have.
        self.plan.unstorable = self.plan.vanishing = frozenset()
        self.plan.hopeless = False
        self.processes: list[Process] = []
        self.losses = 0
        self.heirs: set[int] = set()
        self.copies = Copies(self)

    def make_loader(self, loop: TrainingLoop) -> Loader:
        """Return a new loader."""
        self._loader = ProcessLoader(loop)
        return self._loader

    def happen(self, fault: Fault) -> None:
        """Cause a fault now, if there is something that it can affect."""
        alive = [worker for worker in self._loader.workers if worker.process.alive]
        if not alive:
            return
        process = alive[int(self.draw() * len(alive))].process
        kind = _FAULTS.get(fault, Fault.DEATH)
        self.log("fault", kind.name)
        if kind is Fault.DEATH:
            self.die(process)
        elif kind is Fault.SILENCE:
            process.silent_until = self.clock.now + MOST_SILENCE_S * self.draw()
            self.faults.calm_at = max(self.faults.calm_at, process.silent_until)
        else:
            self.losses += 1

    def die(self, process: Process) -> None:
        """End a process; the training process replaces it a little later."""
        process.alive = False
        self.log("dies", process.worker)
        for worker in self._loader.workers:
            if worker.process is process:
                self.clock.after(MESSAGE_S * self.draw(), worker.replace)
