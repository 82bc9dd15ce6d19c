"""Random interleavings of what tasks do, against the invariant that the scheduler keeps.

A model of the tasks' processes knows which of them makes samples of which logical worker.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from played_scheduler import PlayedScheduler

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Part, PickledChunk

WORKERS = 3
TASKS = 4
STEPS = 400


@dataclass(eq=False)
class Process:
    """A process of a task, which makes one chunk after another.

    Attributes:
        name: Name of its lease.
        attempt: Its own name.
        runs: The logical worker whose samples it makes now; None if it makes none.
        binding: The binding of its chunk.
        place: Number of chunks that it has got in this lease.
        made: Number of blocks that it has made.
        asked: Its request for the next chunk, if it has sent one.
        early: Whether it made samples when it sent the request.
        unchanged: What the next request reports of the copy; None if the chunk was not watched.
        delivering: The blocks on their way to the scheduler. A last block that was made after a
            request has the place of that request.
    """

    name: str
    attempt: str
    runs: int | None = None
    binding: Binding = Binding.RELEASED
    place: int = 0
    made: int = 0
    asked: asyncio.Future[AssignedChunk | None] | None = None
    early: bool = False
    unchanged: bool | None = None
    delivering: list[int | None] = field(default_factory=list)


@dataclass
class Model:
    """The processes of a pipeline, and what may happen to them.

    Attributes:
        processes: The processes that the scheduler should know of.
        ghosts: The processes that Ray has replaced, and that have not ended.
    """

    scheduler: PlayedScheduler
    draws: random.Random
    processes: list[Process] = field(default_factory=list)
    ghosts: list[Process] = field(default_factory=list)
    names: itertools.count[int] = field(default_factory=itertools.count)
    chunks: int = 0

    def check(self) -> None:
        """Check the invariant: no two processes make samples of one logical worker."""
        running = [p.runs for p in (*self.processes, *self.ghosts) if p.runs is not None]
        assert len(running) == len(set(running)), running

    # --- what a process does ----------------------------------------------------------------------

    def start(self) -> None:
        if len(self.processes) < TASKS:
            self.processes.append(Process(f"task {next(self.names)}", f"{next(self.names)}"))

    def ask(self, process: Process) -> None:
        """Request the next chunk; before the end of the chunk only if it is not watched."""
        early = process.runs is not None
        if process.asked is not None or (early and process.binding is Binding.WATCHED):
            return
        process.early = early
        unchanged, process.unchanged = process.unchanged, None
        request = self.scheduler.next_chunk(
            process.name,
            process.place,
            process.made + early,
            process.attempt,
            early=early,
            unchanged=unchanged,
        )
        process.asked = asyncio.ensure_future(request)

    def finish(self, process: Process) -> None:
        """Make the last sample of the chunk, which is a block, or none if it is cancelled."""
        if process.runs is None:
            return
        process.runs = None
        if process.early and not self.scheduler.in_run:
            self.scheduler.finish(process.name, process.attempt, process.place)
            return
        process.made += 1
        process.delivering.append(process.place if process.early else None)
        if process.binding is Binding.WATCHED:
            process.unchanged = self.draws.random() < 0.9
        if not process.early:
            self.ask(process)

    def deliver(self, process: Process) -> None:
        if process.delivering:
            place = process.delivering.pop(0)
            if place is not None:
                self.scheduler.finish(process.name, process.attempt, place)

    def take(self, process: Process) -> None:
        """Take the answer, and begin the chunk."""
        if process.asked is None or not process.asked.done() or process.runs is not None:
            return
        assigned = process.asked.result()
        process.asked, process.early = None, False
        if assigned is None:
            while process.delivering:
                self.deliver(process)
            self.processes.remove(process)
            return
        self.ghosts = [ghost for ghost in self.ghosts if ghost.attempt not in assigned.replaced]
        process.place = assigned.place + 1
        process.made += assigned.skipped_blocks
        process.binding = assigned.binding
        process.runs = int(assigned.payload)
        self.check()

    def die(self, process: Process) -> None:
        """Let Ray restart the task in another process; the first may still make samples."""
        self.processes.remove(process)
        if process.runs is not None:
            self.ghosts.append(process)
        self.processes.append(Process(process.name, f"{next(self.names)}"))

    # --- what the training process does -----------------------------------------------------------

    def feed(self, *, alone: bool = False) -> None:
        if self.scheduler.in_run:
            worker = self.chunks % WORKERS
            self.chunks += 1
            part = Part("run", self.chunks)
            self.scheduler.feed(PickledChunk(b"%d" % worker, worker, part, alone, resent=alone))

    def end_iteration(self) -> None:
        self.scheduler.drop()
        self.scheduler.begin(in_run=False)

    def begin_iteration(self) -> None:
        if not self.scheduler.in_run and not self.scheduler.has_work:
            self.scheduler.begin(in_run=True)

    # --- steps ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let one thing happen."""
        of_a_process = (self.ask, self.finish, self.finish, self.deliver, self.take, self.take)
        if self.processes and self.draws.random() < 0.7:
            self.draws.choice(of_a_process)(self.draws.choice(self.processes))
            return
        rare = self.draws.random()
        if rare < 0.05:
            self.end_iteration()
        elif rare < 0.2 and self.processes:
            self.die(self.draws.choice(self.processes))
        elif rare < 0.3:
            self.begin_iteration()
        elif rare < 0.5:
            self.start()
        else:
            self.feed(alone=rare > 0.97)

    def advance(self) -> None:
        """Let every process do what it can."""
        for process in list(self.processes):
            self.finish(process)
            self.deliver(process)
            self.take(process)
            if process in self.processes and process.runs is None:
                self.ask(process)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("binding", [Binding.RELEASED, Binding.WATCHED, Binding.ALWAYS])
def test_no_two_processes_are_the_same_worker(
    binding: Binding, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LOOK_S", 0.0)

    async def play(seed: int) -> None:
        options: dict[str, Any] = {"binding": binding, "persistent": persistent}
        scheduler = PlayedScheduler(lambda _: None, num_workers=WORKERS, **options)
        scheduler.limit(parallel=TASKS, starting=TASKS)
        model = Model(scheduler, random.Random(seed))
        for _ in range(STEPS):
            model.step()
            await asyncio.sleep(0)
            model.check()
        # Nothing waits for ever: the tasks make all chunks of the iteration, if none dies.
        for _ in range(STEPS):
            model.begin_iteration()
            model.start()
            model.advance()
            await asyncio.sleep(0)
            model.check()
            if scheduler.in_run and not scheduler.has_work:
                break
        assert not scheduler.has_work, seed
        for process in model.processes:
            if process.asked is not None:
                process.asked.cancel()

    for seed in range(60):
        asyncio.run(asyncio.wait_for(play(seed), 20))
