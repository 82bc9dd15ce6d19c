"""The training process: a training loop, the loader's pipelines, and what arrives of each run."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dpex import tuning
from dpex.errors import BatchLostError
from dpex.protocol import chunks as messages
from dpex.protocol.batch_order import BatchOrder, IndexOrder, StreamOrder
from dpex.protocol.chunk_sizes import ChunkPlanner
from dpex.protocol.chunks import Chunk, Entry, Part, PickledChunk
from dpex.protocol.delivery import Delivery, Pause, Wait
from dpex.protocol.loss_causes import Loss, lost_block
from dpex.protocol.recovery import Recovery
from dpex.protocol.sent_chunks import Attempt
from simulation.machines import StoredBlock
from simulation.pipelines import Pipeline
from simulation.plan import EndOfEpoch, Epoch

if TYPE_CHECKING:
    from simulation.schedule import World

__all__ = ["Loader", "Progress", "Run", "TrainingLoop"]

BATCH_BYTES = 1 << 20
LEAST_EVENTS = 200
# Share of the waits for a batch that an interrupt ends.
INTERRUPTED_SHARE = 0.01


class Progress:
    """How far an epoch has been delivered; a copy of it is a state.

    Attributes:
        batches: Number of batches delivered before the first one that is not.
        ahead: The batches delivered after that one.
        streams: Number of delivered batches of each stream.
        states: The state of each stream after these batches.
        finished: Whether the epoch has been delivered to its end.
        numbers: The number in the epoch of each batch that was drawn.
    """

    __slots__ = ("ahead", "batches", "finished", "numbers", "states", "streams")

    def __init__(self, state: Progress | None = None) -> None:
        self.batches = state.batches if state else 0
        self.ahead = set(state.ahead) if state else set()
        self.streams = list(state.streams) if state and state.streams else None
        self.states = list(state.states) if state and state.streams else []
        self.finished = False
        self.numbers: list[int] = []

    def deliver(self, count: int) -> None:
        """Record the delivery of a batch of a map-style dataset."""
        self.ahead.add(self.numbers[count])
        while self.batches in self.ahead:
            self.ahead.discard(self.batches)
            self.batches += 1

    def begin_streams(self, workers: int) -> tuple[list[int], list[tuple[int, bytes] | None]]:
        """Begin the streams, or resume them."""
        if self.streams is None:
            self.streams, self.states = [0] * workers, [b""] * workers
        begins = [(int(state), state) if state else None for state in self.states]
        return list(self.streams), begins

    def deliver_stream(self, worker: int, samples: int, state: bytes | None) -> None:
        """Record the delivery of a batch of a stream."""
        assert self.streams is not None
        self.streams[worker] += 1
        if state is not None:
            self.states[worker] = state

    def end_stream(self, worker: int, state: bytes | None) -> None:
        """Record the end of a stream."""

    def finish(self) -> None:
        """Record the end of the epoch."""
        self.finished = True


class Indices:
    """The index iterator of one epoch, whose batches have one sample each.

    Attributes:
        position: Position in the epoch of the last batch that was drawn.
    """

    __slots__ = ("_length", "_next", "epoch", "position")

    unread = 0

    def __init__(self, progress: Progress, length: int) -> None:
        self.epoch = progress
        self._next = progress.batches
        self._length = length
        self.position = -1

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> list[int]:
        progress = self.epoch
        while self._next in progress.ahead:
            self._next += 1
        if self._next >= self._length:
            raise StopIteration
        number = self._next
        self._next += 1
        progress.numbers.append(number)
        self.position = number
        return [number]

    def next_request(self) -> None:
        """Return the request for any batch of a stream."""


class Run:
    """One run on a pipeline, as the training process sees it.

    Attributes:
        key: Identity of the run.
        version: Number of the dataset version that it reads.
        pipeline: The pipeline that serves it; None until that is known.
        ended: Whether the training process has ended it.
        over: Whether nothing more arrives.
        follows: Whether an earlier run has read the same dataset version.
        news: The blocks and losses that have arrived.
        arrived_at: When the last of them arrived.
    """

    def __init__(self, loop: TrainingLoop, loader: Loader, key: str, version: int) -> None:
        self._loop = loop
        self._loader = loader
        self._world = loop.world
        self._world.note_run(key, loop.iteration)
        self.key = key
        self.version = version
        self.pipeline: Pipeline | None = None
        self.ended = self.over = self.follows = False
        self.news: deque[StoredBlock | Loss] = deque()
        self.began_at = self.arrived_at = self._world.clock.now
        self._fed = 0
        self._unsent: list[tuple[Any, ...]] = []

    def note_begun(self, pipeline: Pipeline, begun: bool) -> None:
        """Learn whether a pipeline serves the run."""
        if self.ended:
            return
        if not begun:
            self._loader.drop(pipeline)
            self._loader.open_new(self)
            return
        pipeline_ready = self._loader.ready
        pipeline_ready.add(pipeline)
        self.pipeline = pipeline
        send = self._world.network.send
        send(None, pipeline.ask_for_news, self)
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            send(None, pipeline.feed, self, *message)

    def feed(
        self, chunks: Sequence[Chunk], alone: bool, resent: bool, limits: tuple[int, int, bool]
    ) -> None:
        """Send chunks."""
        pickled = []
        for chunk in chunks:
            key, number = chunk.run.key, chunk.number
            self._world.log("sends", key, number, list(chunk.numbers), alone, resent)
            self._world.budgets.send(chunk)
            self._world.states.send(self.version, chunk, alone=alone, single=limits[2])
            payload: Any = chunk
            pickled.append(PickledChunk(payload, chunk.worker, Part(key, number), alone, resent))
        message = self._fed, pickled, limits
        self._fed += len(pickled)
        if self.pipeline is None:
            self._unsent.append(message)
        else:
            self._world.network.send(None, self.pipeline.feed, self, *message)

    def take_news(self, blocks: list[StoredBlock], losses: list[Loss], over: bool) -> None:
        """Receive news, and read the blocks that nodes store."""
        if any(block.node is not None for block in blocks):
            delay_s = self._world.plan.fetch_s * self._world.draw()
            self._world.clock.after(delay_s, self._read, blocks, losses, over)
        else:
            self._read(blocks, losses, over)

    def _read(self, blocks: list[StoredBlock], losses: list[Loss], over: bool) -> None:
        world = self._world
        for block in blocks:
            if block.node is not None:
                block.node.stored.pop(block, None)
            if self.ended:
                continue
            if block.lost:
                self.news.append(lost_block("its node lost it", block.block))
            else:
                self.news.append(block)
        if self.ended:
            return
        if world.network.repeats and blocks and not blocks[0].lost:
            world.network.repeats -= 1
            self.news.append(blocks[0])
        self.news.extend(losses)
        self.over = self.over or over
        self.arrived_at = world.clock.now
        if not over and self.pipeline is not None:
            world.network.send(None, self.pipeline.ask_for_news, self)
        self._loop.wake()

    def end(self) -> None:
        """End the run, finished or not."""
        if not self.ended:
            self.ended = True
            for pipeline in self._loader.pipelines:
                if pipeline.reserved is self:
                    self._world.network.send(None, pipeline.cancel, self)


class Loader:
    """A loader's pipelines, and the carrier of its epochs.

    Attributes:
        pipelines: The pipelines that are not closed.
        ready: Those that have begun their last run, as far as is known.
        run: The present run.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._world = loop.world
        self.pipelines: list[Pipeline] = []
        self.ready: set[Pipeline] = set()
        self.run: Run | None = None
        self._dropped: list[Pipeline] = []
        self._versions: set[int] = set()
        self._died_node = False
        plan = loop.world.plan
        self.planner = ChunkPlanner(
            num_workers=plan.workers,
            prefetch_factor=plan.prefetch_factor,
            prefetch_bytes=plan.prefetch_batches * BATCH_BYTES,
            claims_cpus=plan.claims_cpus,
        )
        self.version = loop.next_version()

    def open(self, run: messages.Run) -> None:
        """Begin a run on an idle pipeline, or on a new one."""
        self.run = new = Run(self._loop, self, run.key, run.dataset_version)
        new.follows = new.version in self._versions
        self._versions.add(new.version)
        chosen = None
        for pipeline in list(self.pipelines):
            if chosen is None and pipeline in self.ready:
                chosen = pipeline
                self.ready.discard(pipeline)
                pipeline.reserved = new
                self._world.network.send(None, pipeline.begin, new)
            else:
                self.drop(pipeline)
        if chosen is None:
            self.open_new(new)

    def open_new(self, run: Run) -> None:
        """Begin a run on a new pipeline."""
        world = self._world
        world.clock.after(0.001 + 0.01 * world.draw(), self._create, run)

    def _create(self, run: Run) -> None:
        if run.ended:
            return
        world = self._world
        for other in self._dropped:  # the pipeline actor gets these calls in order
            other.close()
        self._dropped.clear()
        if run.follows:  # dpex warns that the workers' state is lost
            world.states.forget(run.version)
        pipeline = Pipeline(world, len(world.pipelines), run)
        pipeline.earlier = [other for other in world.pipelines if other.has_tasks]
        pipeline.reserved = run
        world.pipelines.append(pipeline)
        self.pipelines.append(pipeline)
        run.note_begun(pipeline, True)
        if world.plan.hopeless:
            pipeline.break_down()

    def drop(self, pipeline: Pipeline) -> None:
        """Close a pipeline."""
        if pipeline in self.pipelines:
            self.pipelines.remove(pipeline)
            self.ready.discard(pipeline)
            self._dropped.append(pipeline)
            self._world.network.send(None, pipeline.close)

    def close(self) -> None:
        """Close the loader."""
        if self.run is not None:
            self.run.end()
        for pipeline in list(self.pipelines):
            self.drop(pipeline)

    # --- the carrier of a delivery ----------------------------------------------------------------

    alive = True
    replaceable = True

    def wait_until_open(self) -> None:
        """Return at once, because the run keeps chunks that are sent before it is open."""

    def send(self, chunks: Sequence[Chunk], attempt: Attempt, *, one_by_one: bool) -> None:
        """Send chunks."""
        self._opened.feed(
            chunks,
            attempt.alone,
            attempt != _FIRST,
            (self.planner.parallel, self.planner.free_cores, one_by_one),
        )

    @property
    def _opened(self) -> Run:
        assert self.run is not None
        return self.run

    def end(self) -> None:
        """End the run, if there is one."""
        if self.run is not None:
            self.run.end()

    def take(self) -> StoredBlock | Loss | None:
        """Return the next news."""
        run = self._opened
        news = run.news.popleft() if run.news else None
        if isinstance(news, Loss) and news.part is not None and news.part.run == run.key:
            self._world.budgets.lose(news)
        return news

    def has_news(self) -> bool:
        """Return whether there is news."""
        run = self._opened
        return bool(run.news) or run.over

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        run = self._opened
        return run.over and not run.news

    def lost_with_node(self) -> bool:
        """Return whether a node has died, and nothing has come for a while since."""
        run, died_at = self._opened, self._world.cluster.died_at
        quiet_s = self._world.clock.now - max(died_at, run.arrived_at)
        if died_at < run.began_at or quiet_s < tuning.NODE_REPLACED_S + self.planner.batch_s:
            return False
        if run.pipeline is not None:
            self.ready.discard(run.pipeline)
        self._died_node = True
        return True

    def failure(self) -> None:
        """Return the error that ended the run: there is none here."""

    def waiting_text(self) -> str:
        """Return why the next batch is late."""
        return "late"

    def name_dead_nodes(self) -> None:
        """Log nothing, because the history records the deaths of nodes."""

    def note_block(self, arrived: StoredBlock, *, new: bool) -> None:
        """Count the costs of a block."""
        self._world.budgets.arrive()
        if new:
            batches, seconds = len(arrived.batches), arrived.seconds
            self.planner.observe(
                batches=batches,
                seconds=seconds,
                cpu_seconds=seconds,
                size_bytes=batches * BATCH_BYTES,
            )

    def note_late(self, waited_s: float) -> None:
        """Note that no batch has come for a while."""
        self._world.log("late", waited_s)

    def note_recovery(self, plan: Recovery) -> None:
        """Note that batches are resent."""
        self._world.log("recovers", plan.cause.name, plan.retries)

    def note_new_run(self, failure: BaseException | None, resent: int) -> None:
        """Note that a new run replaces a lost one."""
        self._world.log("new run", resent)
        self._world.budgets.new_run(counts=not self._died_node)
        self._died_node = False

    def leave_out(self, entry: Entry) -> None:
        """Count nothing, because simulated samples can always be read."""


_FIRST = Attempt()


class TrainingLoop:
    """The training loop, which reads epochs as the plan says.

    Attributes:
        world: The world.
        over: Whether it has read all epochs and closed its loader.
        delivered_at: When the last batch was delivered, or the last epoch began.
        iteration: Number of the present iteration.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.over = False
        self.delivered_at = 0.0
        self._versions = 0
        self.iteration = 0
        self._waits = 0
        self._waiting = self._begun = False
        self._steps = self._main()

    def next_version(self) -> int:
        """Return the number of a new dataset version."""
        self._versions += 1
        return self._versions

    # --- waiting ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with the first epoch."""
        self._advance()

    def wake(self) -> None:
        """Continue, because there is news."""
        if self._waiting:
            self._advance(news=True)

    def _time_out(self, wait: int) -> None:
        if wait == self._waits:
            self._advance()

    def _advance(self, news: bool = False) -> None:
        """Continue until the loop waits again, without news or for a fixed time."""
        self._waiting = False
        self._waits += 1
        while True:
            try:
                step = self._steps.send(news if self._begun else None)
            except StopIteration:
                self.over = True
                return
            self._begun = True
            waits = type(step) is Wait
            if not (waits and self._loader.has_news()):
                break
            news = True
        self._waiting = waits
        self.world.clock.after(step.seconds, self._time_out, self._waits)

    # --- the loop ---------------------------------------------------------------------------------

    def _main(self) -> Generator[Wait | Pause, bool, None]:
        self._loader = loader = self.world.make_loader(self)
        progress = Progress()
        number = 0
        for epoch in self._epochs():
            yield from self._read(loader, epoch, progress, number)
            if epoch.end is EndOfEpoch.RESUME and not progress.finished:
                progress = Progress(progress)
                loader.close()
                self._loader = loader = self.world.make_loader(self)
                continue
            number += 1
            progress = Progress()
            if epoch.end is EndOfEpoch.CLOSE:
                loader.close()
                self._loader = loader = self.world.make_loader(self)
        loader.close()

    def _epochs(self) -> Iterator[Epoch]:
        """Yield the planned epochs, and further ones until there have been enough events."""
        yield from self.world.plan.epochs
        while self.world.clock.events < LEAST_EVENTS:
            yield Epoch(EndOfEpoch.READ, 0)

    def _read(
        self, loader: Loader, epoch: Epoch, progress: Progress, number: int
    ) -> Generator[Wait | Pause, bool, None]:
        world, plan = self.world, self.world.plan
        if not plan.persistent:
            loader.version = self.next_version()
        self.iteration += 1
        run = messages.Run(
            f"run {self.iteration}", "loader", 7, number, plan.workers, loader.version, None
        )
        loader.planner.begin(free_cores=plan.free_cores)
        indices: Any = Indices(progress, plan.length)
        order: BatchOrder
        if plan.streams is not None:
            order = StreamOrder(indices, loader.planner, run=run)
        else:
            length = plan.length if plan.knows_length else None
            order = IndexOrder(indices, loader.planner, run=run, length=length, patient=True)
        first = progress.batches
        world.log("epoch", number, run.key, loader.version, first, list(progress.streams or ()))
        world.invariants.begin_epoch(order, loader.planner)
        world.budgets.begin()
        world.states.begin(self.iteration, self._ranges(progress, first))
        self.delivered_at = world.clock.now
        delivery = Delivery(
            run, order, loader, lambda: world.clock.now, in_order=plan.in_order, timeout_s=0.0
        )
        delivery.fill()
        read = 0
        while epoch.end is EndOfEpoch.READ or read < epoch.reads:
            try:
                entry = yield from self._next(delivery)
            except BatchLostError as error:
                if world.failure is not None:
                    raise world.failure from error
                world.log("fails", str(error))
                world.budgets.fail(delivery)
                break
            if entry is None:
                break
            read += 1
            self.delivered_at = world.clock.now
            what = entry.batch
            if plan.streams is None:
                what = progress.numbers[entry.batch - first]
            world.deliver(number, run.dataset_version, entry, what)
            if plan.step_s:
                yield world.pause(plan.step_s)
        world.log("leaves", number, epoch.end.name, progress.finished)
        if progress.finished:
            world.states.finish(self.iteration, run.dataset_version)
        delivery.end()

    def _ranges(self, progress: Progress, first: int) -> list[tuple[int, int]]:
        """Return the numbers of the first and the last batch of each logical worker."""
        plan = self.world.plan
        if plan.streams is not None:
            return list(zip(progress.streams or (), plan.streams, strict=True))
        last = plan.length - len(progress.ahead) - 1
        return [
            (-(-max(0, first - worker) // plan.workers), (last - worker) // plan.workers)
            for worker in range(plan.workers)
        ]

    def _next(self, delivery: Delivery[StoredBlock]) -> Generator[Wait | Pause, bool, Entry | None]:
        """Return the next batch. Interrupts come during waits, and the loop continues."""
        steps, news = delivery.next_entry(), None
        while True:
            try:
                step = steps.send(news)  # type: ignore[arg-type]
            except StopIteration as end:
                entry: Entry | None = end.value
                return entry
            if self.world.draw() < INTERRUPTED_SHARE and type(step) is Wait:
                steps.close()
                steps, news = delivery.next_entry(), None
            else:
                news = yield step
