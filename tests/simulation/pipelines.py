"""Pipelines, as the pipeline actor keeps them: each drives a ``Scheduler``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dpex import tuning
from dpex.protocol.chunks import AssignedChunk, PickledChunk, Replaced
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.protocol.scheduler import Answer, OtherJobs, Scheduler
from simulation.machines import StoredBlock, WorkerProcess

if TYPE_CHECKING:
    from simulation.attempts import Attempt
    from simulation.loader import Run
    from simulation.schedule import World

__all__ = ["Pipeline"]


class Pipeline:
    """One pipeline.

    Attributes:
        number: Its number.
        run: The run that it serves.
        reserved: The run that the training process wants it to serve.
        broken: Whether its execution has failed.
        closed: Whether it is closed.
        joined: Whether all its tasks have ended since.
        later_stages: Whether its blocks pass through a later stage.
        attempts: The present attempt of each task that runs.
        numbers: The number of each run that it has served, from 1.
    """

    def __init__(self, world: World, number: int, run: Run) -> None:
        plan, now = world.plan, world.clock.now
        self._world = world
        self.cluster = world.cluster
        self.number = number
        self.run: Run | None = None
        self.reserved: Run | None = None
        self.broken = self.closed = False
        self.later_stages = plan.later_stages
        self.attempts: dict[str, Attempt] = {}
        self._persistent = plan.persistent
        self._blocks: list[StoredBlock] = []
        self._losses: list[Loss] = []
        # The calls that wait for an answer.
        self._calls: dict[tuple[str, str], list[tuple[Attempt, int]]] = {}
        self.numbers: dict[str, int] = {}
        self._tasks = 0
        self._tick_at = math.inf
        self._asked_for_news: Run | None = None
        # A run that waits until no task works for an earlier run.
        self._begins: tuple[Run, float] | None = None
        # The number of blocks of each task that Ray has for the later stage.
        self._yielded: dict[str, int] = {}
        self._at_work = self.joined = False
        self._fed = 0
        self._early: dict[int, PickledChunk] = {}
        self._ends = 0
        # The closed pipelines whose tasks may still make samples of the same logical workers.
        self.earlier: list[Pipeline] = []
        self._held: list[tuple[Any, ...]] = []
        self.scheduler = Scheduler(
            now,
            holds_resources=plan.holds_resources,
            claims_cpus=plan.claims_cpus,
            later_stages=plan.later_stages,
            prefers_nodes=plan.prefers_nodes,
            num_workers=plan.workers,
            binding=plan.binding,
            persistent=plan.persistent,
            idle=None if plan.claims_cpus else world.has_idle_core,
            somebody_waits=world.cluster.tasks_wait,
            first_tasks=tuning.FIRST_TASKS,
            replaced=world.replaced,
        )
        self._serve(run)

    # --- the scheduler's events -------------------------------------------------------------------

    def _note(self, decisions: list[Answer | Loss]) -> None:
        """Perform what the scheduler has decided."""
        scheduler = self.scheduler
        for decision in decisions:
            if isinstance(decision, Answer):
                calls = self._calls.pop((decision.name, decision.attempt), None)
                if calls is None:
                    self._world.fail(f"{decision.attempt} got an answer, and has no request")
                    return
                assigned = decision.chunk
                for attempt, request in calls:
                    if isinstance(assigned, AssignedChunk):
                        self._world.states.give(attempt, assigned)
                    elif assigned is None:
                        self._world.states.end_lease(attempt)
                    self._world.log("answers", attempt.id, *_short(decision.chunk))
                    link = attempt.process.link
                    self._world.network.send(link, attempt.answer, request, decision.chunk)
            else:
                self.lose(decision)
        while self._tasks < scheduler.started:
            self._tasks += 1
            self.cluster.submit(self, f"task {self.number}.{self._tasks}")
        tick_s = scheduler.tick_s
        if tick_s is not None and not self.closed:
            now = self._world.clock.now
            if now + tick_s < self._tick_at:
                self._tick_at = now + tick_s
                self._world.clock.after(tick_s, self._tick, self._tick_at)
        if self._begins is not None:
            self._try_begin()

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = math.inf
            self._note(self.scheduler.tick(self._world.clock.now))

    def take_request(self, attempt: Attempt, request: int, step: Any) -> None:
        """Receive a task's request for its next chunk."""
        now = self._world.clock.now
        if self.joined:
            self._world.network.send(attempt.process.link, attempt.answer, request, None)
            return
        if attempt.restarted:  # Ray closes the connections of a process before it replaces it
            return
        self._calls.setdefault((attempt.name, attempt.id), []).append((attempt, request))
        self._world.log("asks", attempt.id, step.place, step.made, step.early)
        self._note(
            self.scheduler.request(
                now,
                attempt.name,
                step.place,
                step.made,
                attempt.id,
                early=step.early,
                unchanged=step.unchanged,
            )
        )

    def take_finished(self, attempt: Attempt, place: int) -> None:
        """Receive the report that an attempt has made its last sample."""
        if not self.joined:
            now = self._world.clock.now
            self._note(self.scheduler.finish(now, attempt.name, attempt.id, place))

    def take_change(self, name: str, worker: int) -> None:
        """Receive the report that a batch has changed its copy, although it was released."""
        if not self.joined:
            self._note(self.scheduler.note_change(self._world.clock.now, name, worker))

    def note_others(self, others: OtherJobs | None) -> None:
        """Receive the state of the other training jobs."""
        if not self.closed:
            self._note(self.scheduler.note_others(self._world.clock.now, others))

    # --- blocks -----------------------------------------------------------------------------------

    def store(self, attempt: Attempt, block: StoredBlock) -> Loss | None:
        """Store a block at the node that made it, unless a message carries it."""
        world, node, part = self._world, attempt.process.node, block.block
        plan, numbers, may_lose = world.plan, block.numbers, world.invariants.may_lose
        unstorable = not numbers.isdisjoint(plan.unstorable)
        vanishes = not numbers.isdisjoint(plan.vanishing)
        if not (unstorable or vanishes) and world.draw() < plan.small_share:
            return None
        if unstorable or (node.full and may_lose(part, "full", tuning.STORE_FULL_TRIES)):
            if unstorable:
                may_lose(part, "full", math.inf)
            else:
                node.full -= 1
            return Loss(LossCause.STORE_FULL, "the object store is full", part)
        block.lost = vanishes and may_lose(part, "block", math.inf)
        block.node = node
        node.stored[block] = None
        return None

    def take_block(
        self, block: StoredBlock, loss: Loss | None, attempt: Attempt, finished: int | None
    ) -> None:
        """Receive a block, or its loss."""
        if not self.closed:
            if loss is not None:
                self.lose(loss)
            elif self.run is not None and block.block.run == self.run.key:
                self._blocks.append(block)
            self._send_news()
        if finished is not None:
            self.take_finished(attempt, finished)

    def yield_block(self, attempt: Attempt, place: int, block: StoredBlock) -> None:
        """Receive a task's output, which Ray drops if an earlier attempt has yielded it."""
        world = self._world
        if attempt.replaced or place < self._yielded.get(attempt.name, 0):
            return
        self._yielded[attempt.name] = place + 1
        loss = self.store(attempt, block)
        world.clock.after(world.batch_seconds() / 4, self.take_block, block, loss, attempt, None)

    def lose(self, loss: Loss) -> None:
        """Note the loss of batches in flight, unless their run is over."""
        if loss.part is None or (self.run is not None and loss.part.run == self.run.key):
            self._world.log("loses", loss.cause.name, loss.part)
            self._losses.append(loss)
            self._send_news()

    def break_down(self) -> None:
        """Break the execution."""
        if not self.broken and not self.closed:
            self.broken = True
            self._note(self.scheduler.stop_preparing(self._world.clock.now))
            self.lose(Loss(LossCause.TASK, "the execution failed"))

    def ask_for_news(self, run: Run) -> None:
        """Receive a run's request for its news; that of an earlier run may come late."""
        if run is self.run:
            self._asked_for_news = run
            self._send_news()

    def _send_news(self) -> None:
        run = self._asked_for_news
        if run is None or run is not self.run:
            return
        if self._blocks or self._losses or self.broken:
            self._asked_for_news = None
            news = self._blocks, self._losses, self.broken
            self._blocks, self._losses = [], []
            self._world.network.send(None, run.take_news, *news)

    # --- runs -------------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Receive the request to serve another run, once no task works for an earlier one."""
        scheduler = self.scheduler
        patience_s = tuning.STATE_QUIET_S if scheduler.keeps_state else tuning.QUIET_S
        self._begins = run, self._world.clock.now + patience_s
        self._world.clock.after(patience_s, self._try_begin)
        self._try_begin()

    def _try_begin(self) -> None:
        if self._begins is None:
            return
        run, deadline = self._begins
        busy = self.scheduler.has_work
        if busy and not self.broken and not self.closed and self._world.clock.now < deadline:
            return
        self._begins = None
        begun = not (busy or self.broken or self.closed)
        if begun:
            self._stop()
            self._serve(run)
        self._world.network.send(None, run.note_begun, self, begun)

    def cancel(self, run: Run) -> None:
        """Receive the end of a run."""
        if self.run is run and not self.closed:
            self._stop()
            self._note(self.scheduler.begin(self._world.clock.now, in_run=False))

    def _stop(self) -> None:
        """Serve no run."""
        self.scheduler.drop()
        if self.run is not None:
            self._ends += 1
            end, version = self._end_iteration, self.run.version
            for process in self.cluster.processes_that_served(self):
                self._world.network.send(process.link, end, process, self._ends, version)
        self.run = None
        self._asked_for_news = None
        self._fed = 0
        self._early, self._held = {}, []
        self._blocks, self._losses = [], []

    def _end_iteration(self, process: WorkerProcess, ends: int, version: int) -> None:
        """Notify a worker process of the end of an iteration, so that it drops its copies."""
        process.ended[self.number] = max(process.ended[self.number], ends)
        if not self._persistent:
            process.drop_copies(self.number, version)

    def _serve(self, run: Run) -> None:
        self.run = run
        self.numbers[run.key] = len(self.numbers) + 1
        self._world.log("serves", self.number, run.key)
        self._note(self.scheduler.begin(self._world.clock.now, in_run=True))

    def feed(self, run: Run, number: int, chunks: list[PickledChunk], limits: Any) -> None:
        """Receive chunks of a run; messages may overtake one another, but chunks stay in order."""
        if self.closed or self.run is not run:
            return
        if any(pipeline.has_tasks for pipeline in self.earlier):
            self._held.append((run, number, chunks, limits))
            return
        scheduler = self.scheduler
        scheduler.parallel, scheduler.starting, scheduler.one_by_one = limits
        self._early.update(enumerate(chunks, number))
        while (chunk := self._early.pop(self._fed, None)) is not None:
            self._fed += 1
            self._note(scheduler.feed(self._world.clock.now, chunk))

    def note_ends(self) -> None:
        """Note that a task has ended; it may be the last one of a closed pipeline."""
        if self.closed and not self.joined and not self.attempts:
            self.joined = True
            self.scheduler.note_joined()

    def feed_held(self) -> None:
        """Continue with the chunks that waited for the tasks of closed pipelines."""
        if self._held and not any(pipeline.has_tasks for pipeline in self.earlier):
            held, self._held = self._held, []
            for chunks in held:
                self.feed(*chunks)

    @property
    def has_tasks(self) -> bool:
        """Whether the pipeline is closed, and a task of it may still make samples."""
        return self._at_work and bool(self.attempts)

    def close(self) -> None:
        """End the pipeline. Its tasks end soon, or their processes are killed."""
        if self.closed:
            return
        self._world.log("closes", self.number)
        self._stop()
        self._note(self.scheduler.begin(self._world.clock.now, in_run=False))
        self._note(self.scheduler.close(self._world.clock.now))
        self.closed = True
        self._at_work = self.scheduler.has_work
        self.cluster.end_tasks(self)
        self.note_ends()
        if self._begins is not None:
            self._try_begin()


def _short(assigned: AssignedChunk | Replaced | None) -> tuple[Any, ...]:
    if assigned is None:
        return ("the lease has ended",)
    if isinstance(assigned, Replaced):
        return ("the process is replaced",)
    chunk: Any = assigned.payload
    flags = (("again", assigned.again), ("restarted", assigned.restarted))
    return (
        f"chunk {chunk.number}",
        f"worker {chunk.worker}",
        assigned.binding.value,
        *(name for name, is_set in flags if is_set),
        *((f"skipped {assigned.skipped_blocks}",) if assigned.skipped_blocks else ()),
        *assigned.replaced,
    )
