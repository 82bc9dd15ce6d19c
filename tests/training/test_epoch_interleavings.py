"""Random interleavings of losses, against what an epoch has to deliver.

The epoch, its recovery and the scheduler are real. A model plays the tasks' processes and the way
of their blocks: processes die, blocks are lost, overtake one another and come twice.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from played_scheduler import PlayedScheduler

from dpex import tuning
from dpex.cluster.own_process import OwnProcess
from dpex.errors import BatchLostError
from dpex.pipeline.session import StoredJob
from dpex.protocol.batch_order import BatchOrder, IndexOrder, StreamOrder
from dpex.protocol.binding import Binding
from dpex.protocol.chunk_sizes import ChunkPlanner
from dpex.protocol.chunks import AssignedChunk, Chunk, Entry, Part, PickledChunk, Run
from dpex.protocol.loss_causes import Loss, LossCause, lost_block
from dpex.stats import Meter
from dpex.training.dataset_versions import DatasetVersions
from dpex.training.epoch import Epoch, EpochOptions, StateNotes
from dpex.wire.arrivals import Arrival
from dpex.wire.block_format import Block
from dpex.wire.timings import Costs
from dpex.worker.training_settings import Settings

WORKERS = 3
TASKS = 3
LENGTH = 48
RUN = Run("run 0", "loader", 7, 0, WORKERS, 0, Settings(".", torch.float32))
MOST_STEPS = 20_000
# Fewer deaths than kill a batch that is not deadly: so many with its chunk, and so many alone.
MOST_DEATHS = 2 * tuning.MAX_DEATHS - 1


class Indices:
    """Index iterator of a map-style dataset, or of streams."""

    position = 0
    batches = 0
    unread = None

    def __init__(self) -> None:
        self._numbers = iter(range(LENGTH))
        self.epoch = self

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return [next(self._numbers)]

    def next_request(self) -> None:
        return None

    def begin_streams(self, workers: int) -> tuple[list[int], list[None]]:
        return [0] * workers, [None] * workers

    def deliver(self, _: int) -> None: ...

    def deliver_stream(self, *_: Any) -> None: ...

    def end_stream(self, *_: Any) -> None: ...

    def finish(self) -> None: ...


@dataclass(eq=False)
class Task:
    """A task, and its present process.

    Attributes:
        name: Name of its lease.
        attempt: Name of its process.
        place: Number of chunks that the process has been given.
        made: Number of blocks that it has made.
        chunk: The chunk that it makes.
        again: Whether an earlier process had the chunk. Then each batch is sent at once.
        left: The batches that it still has to make.
        asked: Its request for the next chunk.
    """

    name: str
    attempt: str
    place: int = 0
    made: int = 0
    chunk: Chunk | None = None
    again: bool = False
    left: list[int] = field(default_factory=list)
    asked: asyncio.Future[AssignedChunk | None] | None = None


class World:
    """A pipeline, whose tasks and blocks meet faults that a seed draws.

    Args:
        seed: Draws what happens.
        deadly: The batches that kill every process.
        streams: Number of batches of each stream; None for a map-style dataset.
        binding: The binding of the logical workers.
    """

    def __init__(
        self, seed: int, deadly: set[int], streams: list[int] | None, binding: Binding
    ) -> None:
        self.draws = random.Random(seed)
        self.deadly = deadly
        self.streams = streams
        self.binding = binding
        self.loop = asyncio.new_event_loop()
        self.names = itertools.count()
        self.steps = 0
        self.deaths = 0
        self.pipelines_end = self.draws.choice([0, 0, 1])
        self.losses: Counter[tuple[LossCause, int]] = Counter()
        self.run: FakeRun

    def open(self, run: FakeRun) -> None:
        """Serve another run with new tasks."""
        self.run = run
        self.scheduler = PlayedScheduler(
            run.travels.append, num_workers=WORKERS, binding=self.binding
        )
        self.chunks: dict[int, Chunk] = {}
        self.tasks: list[Task] = []

    def feed(self, chunks: Sequence[Chunk], **how: Any) -> None:
        self.scheduler.limit(parallel=TASKS, starting=TASKS)
        self.scheduler.scheduler.one_by_one = how["one_by_one"]
        for chunk in chunks:
            self.chunks[chunk.number] = chunk
            part = Part(chunk.run.key, chunk.number)
            payload = b"%d" % chunk.number
            sent = PickledChunk(payload, chunk.worker, part, how["alone"], how["resent"])
            self.scheduler.feed(sent)

    # --- what may happen --------------------------------------------------------------------------

    def step(self) -> None:
        """Let one thing happen."""
        self.steps += 1
        assert self.steps < MOST_STEPS, "the epoch does not end"
        kind = self.draws.random()
        if self.tasks and kind < 0.75:
            self.advance(self.draws.choice(self.tasks))
        elif kind < 0.85:
            self.arrive()
        elif kind < 0.87 and self.tasks and self.deaths < MOST_DEATHS:
            self.deaths += 1
            self.die(self.draws.choice(self.tasks))
        elif kind < 0.89:
            self.lose_block()
        elif kind < 0.8905 and self.pipelines_end:
            self.pipelines_end -= 1
            self.run.broken = True
        else:
            self.start()
        self.loop.run_until_complete(asyncio.sleep(0))
        running = [task.chunk.worker for task in self.tasks if task.chunk is not None]
        assert len(running) == len(set(running)), "two processes are the same worker"

    def start(self) -> None:
        for _ in range(self.scheduler.new_tasks()):
            self.tasks.append(Task(f"task {next(self.names)}", f"{next(self.names)}"))

    def advance(self, task: Task) -> None:
        """Let a task ask, take its answer, or make a block."""
        if task.chunk is not None:
            self.make(task, task.chunk)
        elif task.asked is None:
            request = self.scheduler.next_chunk(task.name, task.place, task.made, task.attempt)
            task.asked = asyncio.ensure_future(request, loop=self.loop)
        elif task.asked.done():
            assigned, task.asked = task.asked.result(), None
            if assigned is None:
                self.tasks.remove(task)
                return
            task.place = assigned.place + 1
            task.made += assigned.skipped_blocks
            task.chunk = self.chunks[int(assigned.payload)]
            task.again, task.left = assigned.again, list(task.chunk.numbers)

    def make(self, task: Task, chunk: Chunk) -> None:
        """Make the next block of a chunk, and send it on its way."""
        size = 1 if task.again else self.draws.randint(1, 3)
        batches, task.left = task.left[:size], task.left[size:]
        entries = []
        for batch in batches:
            ended = self.streams is not None and batch // WORKERS >= self.streams[batch % WORKERS]
            entries.append(Entry(batch, batch, "end" if ended else "batch"))
            if ended:
                task.left = []
                break
            if batch in self.deadly:
                self.die(task)
                return
        part = Part(chunk.run.key, chunk.number, tuple(entry.batch for entry in entries))
        task.made += 1
        if not task.left:
            task.chunk = None
        if self.draws.random() < 0.02 and self.may_lose(LossCause.STORE_FULL, part):
            self.run.travels.append(Loss(LossCause.STORE_FULL, "full", part))
            return
        block = Block(chunk.run.key, chunk.number, [], Costs(seconds=1e-3), 100)
        self.run.travels.append(Arrival(block, entries))
        if self.draws.random() < 0.05:
            self.run.travels.append(Arrival(block, entries))

    def die(self, task: Task) -> None:
        """Let a task's process die; Ray restarts the task."""
        if task.asked is not None:
            task.asked.cancel()
        self.tasks.remove(task)
        self.tasks.append(Task(task.name, f"{next(self.names)}"))

    def may_lose(self, cause: LossCause, part: Part) -> bool:
        """Return whether these batches were lost so rarely that dpex makes them again."""
        most = {LossCause.BLOCK: tuning.MOST_LOSSES, LossCause.STORE_FULL: tuning.STORE_FULL_TRIES}
        counts = [(cause, batch) for batch in part.batches]
        if any(self.losses[count] >= most[cause] - 1 for count in counts):
            return False
        self.losses.update(counts)
        return True

    def lose_block(self) -> None:
        """Lose a block on its way."""
        travels = self.run.travels
        for place, news in enumerate(travels):
            if isinstance(news, Arrival):
                block = news.block
                batches = tuple(entry.batch for entry in news.batches)
                part = Part(block.run, block.chunk, batches)
                if self.may_lose(LossCause.BLOCK, part):
                    travels[place] = lost_block("its process died", part)
                return

    def arrive(self) -> None:
        """Let any block or loss reach the training process, whatever was sent before it."""
        travels = self.run.travels
        if travels:
            place = self.draws.randrange(len(travels))
            self.run.news.append(travels.pop(place))


class FakeRun:
    """A run on the pipeline; the world goes on whenever the training loop waits."""

    waits_for_ray = False

    def __init__(self, world: World) -> None:
        self._world = world
        self.arrivals = self
        self.travels: list[Arrival | Loss] = []
        self.news: deque[Arrival | Loss] = deque()
        self.broken = False
        self.feed = world.feed

    @property
    def lost(self) -> bool:
        return self.broken

    @property
    def ended(self) -> bool:
        return self.broken and not self.news

    def wait(self, _: float | None) -> bool:
        for _ in range(20):
            if self.news or self.broken:
                return True
            self._world.step()
        return bool(self.news)

    def take(self) -> Arrival | Loss | None:
        return self.news.popleft() if self.news else None

    def failure(self) -> None:
        return None

    def lost_with_node(self, _: float) -> bool:
        return False

    def tasks_at_work(self) -> int:
        return 0

    def end(self) -> None:
        self.broken = True


class FakeSession(OwnProcess):
    """A session whose pipelines are all in one world."""

    alive = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def open(self, *_: Any, **__: Any) -> Callable[[], FakeRun]:
        run = FakeRun(self._world)
        self._world.open(run)
        return lambda: run

    def waiting_text(self, **_: Any) -> str:
        return "busy"

    def name_dead_nodes(self) -> None: ...

    def check_still_possible(self, _: float) -> None: ...


def delivered(world: World, *, in_order: bool) -> list[Entry]:
    """Return what an epoch delivers in a world."""
    planner = ChunkPlanner(num_workers=WORKERS, prefetch_factor=4, prefetch_bytes=1 << 20)
    planner.begin(free_cores=TASKS)
    indices: Any = Indices()
    session: Any = FakeSession(world)
    order: BatchOrder
    if world.streams is None:
        order = IndexOrder(indices, planner, run=RUN, length=LENGTH, patient=True)
    else:
        order = StreamOrder(indices, planner, run=RUN)
    epoch = Epoch(
        RUN,
        order,
        session=session,
        planner=planner,
        options=EpochOptions(
            in_order=in_order,
            max_skipped=0,
            timeout_s=0.0,
            pin_memory=False,
            job=StoredJob("job", [], None),
            binding=world.binding,
        ),
        notes=StateNotes(DatasetVersions()),
    )
    entries = []
    epoch.fill()
    meter = Meter()
    while True:
        try:
            entries.append(epoch.next_entry(meter))
        except StopIteration:
            break
    for request in asyncio.all_tasks(world.loop):
        request.cancel()
    world.loop.run_until_complete(asyncio.sleep(0))
    world.loop.close()
    return entries


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LOOK_S", 0.0)
    monkeypatch.setattr(tuning, "STORE_FULL_WAIT_S", 0.0)


def check_error(entry: Entry) -> None:
    """Check that an error names its batch."""
    with pytest.raises(BatchLostError, match=rf"batch {entry.batch} \("):
        entry.value.reraise()


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("binding", [Binding.RELEASED, Binding.ALWAYS])
def test_every_batch_is_delivered_once_and_only_deadly_ones_fail(
    binding: Binding, in_order: bool
) -> None:
    for seed in range(50):
        deadly = set(random.Random(seed).sample(range(LENGTH), seed % 3))
        entries = delivered(World(seed, deadly, None, binding), in_order=in_order)
        batches = [entry.batch for entry in entries]
        assert (batches if in_order else sorted(batches)) == list(range(LENGTH)), seed
        failed = [entry for entry in entries if entry.outcome == "error"]
        assert {entry.batch for entry in failed} == deadly, seed
        for entry in failed:
            check_error(entry)


@pytest.mark.parametrize("in_order", [True, False])
def test_every_stream_is_delivered_up_to_its_end_or_its_deadly_batch(in_order: bool) -> None:
    for seed in range(50):
        draws = random.Random(seed)
        lengths = [draws.randint(0, 12) for _ in range(WORKERS)]
        deadly = set(draws.sample(range(LENGTH), seed % 3))
        entries = delivered(World(seed, deadly, lengths, Binding.ALWAYS), in_order=in_order)
        for worker, length in enumerate(lengths):
            of_stream = [entry for entry in entries if entry.batch % WORKERS == worker]
            expected: list[tuple[int, str]] = []
            for batch in range(worker, worker + length * WORKERS, WORKERS):
                expected.append((batch, "error" if batch in deadly else "batch"))
                if batch in deadly:
                    break
            assert [(entry.batch, entry.outcome) for entry in of_stream] == expected, seed
            for entry in of_stream:
                if entry.outcome == "error":
                    check_error(entry)
