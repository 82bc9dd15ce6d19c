"""The pipeline actor, which runs Ray Data outside the training process and its GIL.

One pipeline actor serves all loaders of a training process. It claims no CPU, does not need torch
and decodes no batch. It passes chunks to the tasks, and block references to the training process.
A pipeline serves one iteration of a loader at a time, and outlives the iteration.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dpex import tuning
from dpex.carriers.ray.copy_holders import CopyHolders
from dpex.carriers.ray.execution import Execution
from dpex.carriers.ray.fair_share import ACTOR_PREFIX, FairShare, ask_others, free_cpus
from dpex.carriers.ray.ray_dataset import PipelineSpec, build
from dpex.carriers.ray.task_requests import TaskRequests
from dpex.carriers.ray.tasks_or_actors import REFUSALS, StartWatch, TaskPools, has_room
from dpex.cluster.connect import ray_job
from dpex.cluster.machine_share import IdleCores
from dpex.compat.executor import failed_shortcuts, tune_executor
from dpex.protocol.chunks import AssignedChunk, Part, PickledChunk, Replaced
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.protocol.scheduler import OtherJobs, Scheduler
from dpex.recent import Recent
from dpex.wire.packed_calls import packed
from dpex.worker.actor_calls import NAMESPACE, Arrived, loss_of
from dpex.worker.process_identity import process_of, runs_here

__all__ = ["PipelineActor", "get_pipeline_actor"]

# Ray releases the CPUs of a task that waits for an answer, but not these resources.
_HELD_WHILE_WAITING = frozenset({"resources", "memory", "accelerator_type"})


@dataclass
class Reply:
    """The news of a run.

    Attributes:
        blocks: New blocks, each with its size in bytes and its batches. An entry has a reference to
            the block, or the pickled block itself if it is small.
        ended: Whether the run gets no more blocks.
        replaceable: Whether a private name of Ray ended the pipeline, or Ray Data cannot run tasks.
            A new pipeline then uses the public way, or actors.
        losses: Batches in flight that were lost, or the reason why the pipeline ended.
    """

    blocks: list[tuple[Any, int, Part]] = field(default_factory=list)
    ended: bool = False
    replaceable: bool = False
    losses: list[Loss] = field(default_factory=list)

    def pack(self) -> bytes | Reply:
        """Return the pickled reply, or the reply if only Ray can pickle its references."""
        whole = all(isinstance(block, bytes) for block, *_ in self.blocks)
        return pickle.dumps(self, protocol=5) if whole else self


class _Pipeline:
    """A pipeline, as the pipeline actor keeps it.

    Attributes:
        until_idle: Whether an execution of the pipeline ends when its tasks have ended.
        arrived: The latest messages from worker processes, to recognise resent messages.
        earlier: Closed pipelines whose tasks may still make samples, each as a future of the end.
        left: The future of this pipeline's end, if its tasks were making samples at ``close``.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        run: str,
        loop: asyncio.AbstractEventLoop,
        somebody_waits: Callable[[], bool],
        earlier: Collection[asyncio.Future[None]],
        replaced: deque[str],
        task_pools: TaskPools,
    ) -> None:
        self._task_pools = task_pools
        self._in_actors = spec.in_actors or not task_pools.check()
        spec = replace(spec, in_actors=self._in_actors)
        # The processes of a stage that keeps them may take long to load it again.
        kept = any(stage.keeps_processes for stage in spec.later)
        self.until_idle = self._in_actors and not kept
        # Unlike a task, an actor does not release its CPU while it waits.
        held = not _HELD_WHILE_WAITING.isdisjoint(spec.options)
        self.run: str | None = None
        self.holders = CopyHolders(self._may_hold)
        self._persistent = spec.persistent
        self._loop = loop
        self._blocks: list[tuple[Any, int, Part]] = []
        self._losses: list[Loss] = []
        self.broken = False
        self.changed = asyncio.Event()
        self.scheduler = Scheduler(
            time.monotonic(),
            holds_resources=held or (self._in_actors and spec.claims_cpus),
            claims_cpus=spec.claims_cpus,
            later_stages=bool(spec.later),
            prefers_nodes="fallback_strategy" in spec.options,
            in_actors=self._in_actors,
            num_workers=spec.num_workers,
            binding=spec.binding,
            persistent=spec.persistent,
            idle=None if spec.claims_cpus else IdleCores().any,
            somebody_waits=somebody_waits,
            first_tasks=tuning.FIRST_TASKS,
            replaced=replaced,
        )
        self.requests = TaskRequests(self.scheduler, self.note_loss)
        # Number of attempts of a later stage for each block.
        self._starts: Recent[tuple[str, Part], int] = Recent(tuning.MOST_REMEMBERED)
        self.arrived = Arrived()
        self.earlier = earlier
        self.left: asyncio.Future[None] | None = None
        self._serve(run)
        self._failed_before = failed_shortcuts()
        self._executions: list[Execution] = []
        further = bool(spec.later)
        self._execute(spec, leases=tuning.FIRST_TASKS, further=further, started=tuning.FIRST_TASKS)
        # Set when no execution of a pipeline with later stages runs.
        self._ended = asyncio.Event()
        if not spec.later or self.until_idle:
            self._adding = asyncio.ensure_future(self._add_tasks(spec))
        if not self._in_actors:
            self._watching = asyncio.ensure_future(self._watch_starts(spec))

    async def _add_tasks(self, spec: PipelineSpec) -> None:
        """Start the Datasets of the further tasks, when the scheduler wants these tasks.

        Ray Data starts further tasks of a Dataset at any time. Actors that may still get input
        never end, so each group of actors has its own Dataset. The limit on the workers of a later
        stage holds within one Dataset. So a pipeline with later stages has one Dataset at a time.
        """
        try:
            started = tuning.FIRST_TASKS
            while True:
                if spec.later:
                    await self._ended.wait()
                    self._ended.clear()
                    started = self.requests.handed_out
                tasks = await self.requests.more_tasks(started)
                if tasks is None:
                    return
                if self._in_actors:
                    started += tasks
                    self._execute(spec, leases=tasks, further=bool(spec.later), started=started)
                else:
                    self._execute(spec, leases=0, further=True, started=started)
                    return
        except Exception as error:  # such as that of a thread that cannot start
            self._take_end(error)

    def _execute(self, spec: PipelineSpec, *, leases: int, further: bool, started: int) -> None:
        def take_end(error: BaseException | None) -> None:
            if error is None and further and not self.until_idle:
                error = RuntimeError("Ray Data's execution has ended")
            if error is not None:
                self._take_end(error)
            else:  # its tasks have nothing left to do
                self._loop.call_soon_threadsafe(self._forget, execution)

        execution = Execution(
            lambda: build(spec, leases=leases, further=further, started=started), take_end
        )
        self._executions.append(execution)

    def _forget(self, execution: Execution) -> None:
        self._executions.remove(execution)
        self._ended.set()

    async def _watch_starts(self, spec: PipelineSpec) -> None:
        """End the pipeline if tasks do not start although nodes have room for them."""
        watch = StartWatch(time.monotonic())
        while not self.scheduler.closed and not self.broken:
            room = False
            if self.scheduler.pending:
                room = await self._loop.run_in_executor(None, _has_room, spec.options)
            if watch.stuck(time.monotonic(), self.scheduler.pending, room=room):
                text = f"no task has started within {tuning.TASKS_START_S:.0f} s"
                error = TimeoutError(f"{text}, although CPUs are free")
                self._task_pools.fail(error)
                self._take_end(error)
            await asyncio.sleep(tuning.CLUSTER_LOOK_S)

    def close(self) -> None:
        """Cancel the run and end all task leases."""
        self.begin(None)
        self.holders.end()
        self.requests.note(self.scheduler.close)
        self._ended.set()

    def join(self) -> None:
        """Wait some seconds for the executions to end, and so for their tasks."""
        deadline = time.monotonic() + tuning.END_S + tuning.PROCESS_END_S
        for execution in self._executions:
            execution.close(deadline)

    def begin(self, run: str | None) -> None:
        """Serve another run, or none; drop the chunks that wait."""
        self.scheduler.drop()
        self._serve(run)

    def _may_hold(self, process: str, waited_s: float) -> bool:
        """Return whether a process that does not answer may still hold copies."""
        if (runs := runs_here(process)) is not None:
            return runs
        # Ray ends idle processes, and the processes of other machines are not visible here.
        return self.scheduler.has_work or waited_s < tuning.PROCESS_END_S

    def _serve(self, run: str | None) -> None:
        if self.run is not None:
            self.holders.end(keep=self._persistent)
        self.run = run
        self.requests.note(self.scheduler.begin, in_run=run is not None)
        self._fed = 0
        self._early: dict[int, PickledChunk] = {}
        self._blocks.clear()
        self._losses.clear()
        self._starts.clear()
        self.changed.set()

    def feed(self, number: int, chunks: list[PickledChunk]) -> None:
        """Add chunks; before the first of them, ``number`` chunks of the run were sent.

        Calls of an async actor may overtake one another, but chunks must stay in order.
        """
        self._early.update(enumerate(chunks, number))
        while (chunk := self._early.pop(self._fed, None)) is not None:
            self._fed += 1
            self.requests.note(self.scheduler.feed, chunk)

    def news(self) -> Reply | None:
        """Return the news since the last call, or None if there is none."""
        (blocks, self._blocks), (losses, self._losses) = (self._blocks, []), (self._losses, [])
        broken = self.broken
        if not (blocks or losses or broken):
            return None
        failed = failed_shortcuts() > self._failed_before
        in_vain = not self._in_actors and self._task_pools.failed
        replaceable = broken and (failed or in_vain)
        return Reply(blocks, broken, replaceable, losses)

    def note_loss(self, loss: Loss) -> None:
        """Record the loss of batches in flight, unless their run is over."""
        if loss.part is None or loss.part.run == self.run:
            self._losses.append(loss)
            self.changed.set()

    def deliver(self, part: Part, block: Any, size_bytes: int, loss: Loss | None) -> None:
        """Accept a block from a worker process, or its loss.

        Args:
            part: The batches of the block.
            block: A reference to the block, or the pickled block if it is small; None if it is
                lost.
            size_bytes: The block's size.
            loss: The loss of the block, or None.
        """
        if block is not None and part.run == self.run:
            self._blocks.append((block, size_bytes, part))
        if loss is not None:
            self.note_loss(loss)
        self.changed.set()

    def accept(self, subject: str, content: tuple[Any, ...], stored: Sequence[Any]) -> None:
        """Accept the content of a message from a worker process."""
        match subject:
            case "block":
                part, block, size_bytes, loss, finished = content
                self.deliver(part, stored[0] if stored else block, size_bytes, loss)
                if finished is not None:
                    self.requests.note(self.scheduler.finish, *finished)
            case "finished":
                self.requests.note(self.scheduler.finish, *content)
            case "state":
                self.requests.note(self.scheduler.note_change, *content)
            case _:
                raise ValueError(subject)

    def may_begin(self, task: str, part: Part) -> int | None:
        """Return the iteration of a block that a later stage may begin, and count its attempts.

        After ``MAX_DEATHS`` attempts, the block is lost. No stage begins a block of an earlier run.

        Args:
            task: The stage's task, which has several blocks if Ray runs two stages in one task.
            part: The batches of the block.
        """
        if part.run != self.run:
            return None
        attempts = self._starts.get((task, part), 0) + 1
        self._starts[task, part] = attempts
        if attempts <= tuning.MAX_DEATHS:
            return self.scheduler.run
        text = f"the worker process of a later stage died {tuning.MAX_DEATHS} times in a row"
        self.note_loss(Loss(LossCause.TASK, text, part))
        return None

    def _take_end(self, error: BaseException) -> None:
        """Report a failed execution to the training process; any thread may call this."""
        loss = loss_of(error)

        def end() -> None:
            self.broken = True
            refused = isinstance(error, REFUSALS) and not isinstance(error, ray.exceptions.RayError)
            if refused and not self.scheduler.has_run:
                if self._in_actors:
                    self._task_pools.actors_failed()
                else:
                    self._task_pools.fail(error)
            self.requests.note(self.scheduler.stop_preparing)
            self.note_loss(loss)

        self._loop.call_soon_threadsafe(end)


class _PipelineActor:
    """The class of the pipeline actor.

    ``take``, ``next_end``, ``start_task``, ``more_tasks`` and ``next_chunk`` wait without a time
    limit. ``begin``, ``feed``, ``close`` and ``released`` wait for a limited time until no task
    works for an earlier run. A call that names a pipeline may arrive before ``open``, and waits for
    it. ``others`` waits for Ray in a thread. The other methods do not wait.
    """

    def __init__(self) -> None:
        self._pipelines: dict[str, asyncio.Future[_Pipeline]] = {}
        # A call asks for a closed pipeline soon after its end.
        self._closed: Recent[str, CopyHolders | None] = Recent(tuning.MOST_REMEMBERED)
        # The closed pipelines whose tasks have not all ended.
        self._ending: dict[str, _Pipeline] = {}
        # See ``Scheduler``. The processes of a closed pipeline may still run.
        self._replaced: deque[str] = deque(maxlen=tuning.MAX_REPLACED)
        self._task_pools = TaskPools()
        self._sharing: asyncio.Future[None] | None = None
        self._fair_share = FairShare(free_cpus)
        tune_executor()
        gc.freeze()  # loaded modules stay, so no collection has to scan them

    def _opening(self, pipeline_key: str) -> asyncio.Future[_Pipeline]:
        """Return the future of a pipeline; any call may arrive before ``open``."""
        if pipeline_key not in self._pipelines:
            self._pipelines[pipeline_key] = asyncio.get_running_loop().create_future()
        return self._pipelines[pipeline_key]

    async def _serving(self, pipeline_key: str, run: str) -> _Pipeline | None:
        """Return a pipeline if it serves this run; None if the run was cancelled."""
        if pipeline_key in self._closed:
            return None
        pipeline = await self._opening(pipeline_key)
        return pipeline if pipeline.run == run else None

    async def _with_tasks(self, pipeline_key: str) -> _Pipeline | None:
        """Return a pipeline if it may have tasks: also a closed one, until they have ended."""
        if pipeline_key in self._ending:
            return self._ending[pipeline_key]
        return None if pipeline_key in self._closed else await self._opening(pipeline_key)

    def _somebody_waits(self) -> bool:
        """Return whether any pipeline of this actor has tasks that wait to begin."""
        now = time.monotonic()
        return any(pipeline.scheduler.waits(now) for pipeline in self._opened())

    def _opened(self) -> list[_Pipeline]:
        return [o.result() for o in self._pipelines.values() if o.done() and not o.exception()]

    def _at_work(self) -> tuple[asyncio.Future[None], ...]:
        """Return the ends of the closed pipelines whose tasks may still make samples."""
        return tuple(p.left for p in self._ending.values() if p.left is not None)

    async def open(self, pipeline_key: str, spec: PipelineSpec, run: str) -> None:
        """Start a pipeline that serves ``run`` first."""
        if pipeline_key in self._closed and pipeline_key not in self._pipelines:
            return  # closed before this call arrived, and no call waits for it
        opening = self._opening(pipeline_key)
        try:
            pipeline = _Pipeline(
                spec,
                run,
                asyncio.get_running_loop(),
                self._somebody_waits,
                self._at_work(),
                self._replaced,
                self._task_pools,
            )
            opening.set_result(pipeline)
            if spec.claims_cpus and self._sharing is None:
                self._sharing = asyncio.ensure_future(self._share_cpus())
        except Exception as error:
            opening.set_exception(error)

    async def begin(self, pipeline_key: str, run: str) -> tuple[bool, bool]:
        """Switch a pipeline to another run.

        Returns:
            Whether the pipeline has begun the run. It has not if it is broken or closed, or still
            works for a cancelled run. Then the second item is whether logical workers lose state.
        """
        if pipeline_key in self._closed:
            return False, False
        pipeline = await self._opening(pipeline_key)
        patience_s = tuning.STATE_QUIET_S if pipeline.scheduler.keeps_state else tuning.QUIET_S
        deadline = time.monotonic() + patience_s
        while pipeline.scheduler.has_work and not pipeline.broken and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if pipeline.broken or pipeline.scheduler.has_work or pipeline_key in self._closed:
            closed = pipeline_key in self._closed
            return False, pipeline.scheduler.keeps_state and not closed
        pipeline.begin(run)
        pipeline.earlier = self._at_work()
        return True, False

    @packed
    async def feed(
        self,
        pipeline_key: str,
        run: str,
        number: int,
        chunks: list[PickledChunk],
        *,
        parallel: int,
        starting: int,
        one_by_one: bool,
    ) -> None:
        """Append chunks to a run.

        Args:
            pipeline_key: The pipeline.
            run: The run that the chunks belong to. If it was cancelled, the call does nothing.
            number: How many chunks of the run were sent before.
            chunks: The chunks.
            parallel: Number of tasks that may run at once, if logical workers are not bound.
            starting: Number of tasks that may start at once, if logical workers are bound.
            one_by_one: Whether only one task may run at a time.
        """
        if pipeline_key in self._closed:
            return
        pipeline = await self._opening(pipeline_key)
        if pipeline.run == run and pipeline.earlier:
            # Their tasks may make samples of the same logical workers, for a run that has ended.
            await asyncio.wait(pipeline.earlier)
            pipeline.earlier = ()
        if pipeline.run == run:
            pipeline.scheduler.parallel, pipeline.scheduler.starting = parallel, starting
            pipeline.scheduler.one_by_one = one_by_one
            pipeline.feed(number, chunks)

    async def start_task(self, pipeline_key: str, run: str) -> None:
        """Start a task for a run, and wait for it; see ``TaskRequests``."""
        pipeline = await self._serving(pipeline_key, run)
        if pipeline is not None and not pipeline.broken:
            await pipeline.requests.start_task()

    async def more_tasks(self, pipeline_key: str, started: int) -> int | None:
        """Wait until a pipeline wants tasks; see ``TaskRequests``."""
        if pipeline_key in self._closed:
            return None
        pipeline = await self._opening(pipeline_key)
        return await pipeline.requests.more_tasks(started, until_idle=pipeline.until_idle)

    @packed
    async def next_chunk(
        self,
        pipeline_key: str,
        origin: tuple[str, str],
        place: int,
        made: int,
        unchanged: bool | None,
        *,
        early: bool = False,
    ) -> AssignedChunk | Replaced | None:
        """Return a task's next chunk, or None if its lease is over.

        Args:
            pipeline_key: The task's pipeline.
            origin: The task and its process.
            place: See ``Scheduler.request``.
            made: See ``Scheduler.request``.
            unchanged: See ``Scheduler.request``.
            early: See ``Scheduler.request``.
        """
        pipeline = await self._with_tasks(pipeline_key)
        if pipeline is None:
            return None
        name, attempt = origin
        chunk = await pipeline.requests.next_chunk(
            name, place, made, attempt, early=early, unchanged=unchanged
        )
        if isinstance(chunk, AssignedChunk):
            pipeline.holders.hold(process_of(attempt))
        return chunk

    @packed
    async def accept(
        self,
        pipeline_key: str,
        number: tuple[str, int],
        subject: str,
        content: tuple[Any, ...],
        stored: Sequence[ray.ObjectRef] = (),
    ) -> None:
        """Accept a message from a worker process; see ``Messages.send``.

        Args:
            pipeline_key: The pipeline that the message concerns.
            number: The message's sender and number.
            subject: What the message is about.
            content: Its content.
            stored: A reference to the block that it delivers, if the block is not in the content.
        """
        pipeline = await self._with_tasks(pipeline_key)
        if pipeline is not None and pipeline.arrived.add(number):
            pipeline.accept(subject, content, stored)

    async def may_begin(self, pipeline_key: str, task: str, part: Part, process: str) -> int | None:
        """Return the iteration of a block that a later stage may begin in a process, or None.

        See ``_Pipeline.may_begin``.
        """
        if pipeline_key in self._closed:
            return None
        pipeline = await self._opening(pipeline_key)
        pipeline.holders.hold(process)
        return pipeline.may_begin(task, part)

    async def take(self, pipeline_key: str, run: str) -> bytes | Reply:
        """Wait for news of a run, and return it; for a cancelled run, ``ended`` is set."""
        while (pipeline := await self._serving(pipeline_key, run)) is not None:
            pipeline.changed.clear()
            reply = pipeline.news()
            if reply is not None:
                return reply.pack()
            await pipeline.changed.wait()
        return Reply(ended=True).pack()

    async def tasks_at_work(self, pipeline_key: str, run: str) -> int:
        """Return how many tasks make batches of a run; 0 if the run is over."""
        pipeline = await self._serving(pipeline_key, run)
        return pipeline.scheduler.tasks_at_work if pipeline is not None else 0

    async def cancel(self, pipeline_key: str, run: str) -> None:
        """Cancel a run: drop the chunks that wait; tasks soon stop making the others."""
        if (pipeline := await self._serving(pipeline_key, run)) is not None:
            pipeline.begin(None)

    async def next_end(self, pipeline_key: str, process: str, seen: int) -> int | None:
        """Wait for the end of an iteration, or of the pipeline; see ``CopyHolders.next_end``.

        Returns:
            How many iterations have ended. None if the pipeline is closed, so that the process
            drops everything.
        """
        if pipeline_key not in self._closed:
            pipeline = await self._opening(pipeline_key)
            ends = await pipeline.holders.next_end(process, seen)
            if pipeline_key not in self._closed:
                return ends
        elif (holders := self._closed[pipeline_key]) is not None:
            holders.drop(process, seen)
        return None

    async def released(self, pipeline_key: str) -> list[str]:
        """Wait until worker processes hold no copies of an iteration that is over.

        Returns:
            The processes that still hold copies after ``tuning.END_S``.
        """
        if pipeline_key in self._closed:
            holders = self._closed[pipeline_key]
        else:
            holders = (await self._opening(pipeline_key)).holders
        return [] if holders is None else await holders.released(tuning.END_S)

    async def close(self, pipeline_key: str) -> None:
        """Close a pipeline, even if its ``open`` has not arrived yet."""
        opening = self._pipelines.get(pipeline_key)
        opened = opening is not None and opening.done() and not opening.exception()
        self._closed[pipeline_key] = opening.result().holders if opening and opened else None
        if pipeline_key not in self._pipelines:
            return
        try:
            pipeline = await self._pipelines[pipeline_key]
        except Exception:  # it never opened, and the waiting calls raised the error
            return
        finally:
            self._pipelines.pop(pipeline_key, None)
        self._ending[pipeline_key] = pipeline
        pipeline.close()
        loop = asyncio.get_running_loop()
        if pipeline.scheduler.has_work:
            pipeline.left = loop.create_future()
        try:
            await loop.run_in_executor(None, pipeline.join)
        finally:
            del self._ending[pipeline_key]
            pipeline.scheduler.note_joined()
            if pipeline.left is not None:
                pipeline.left.set_result(None)
        del pipeline
        # Ray Data's plan is a reference cycle, which keeps the job in the object store.
        await loop.run_in_executor(None, gc.collect)

    async def others(self, name: str, waits: bool) -> tuple[OtherJobs | None, float]:
        """Return the state of the other training jobs; see ``FairShare.others``."""
        return await self._fair_share.others(name, waits)

    async def _share_cpus(self) -> None:
        """Report the state of the other training jobs to the pipelines, in an endless loop."""
        loop = asyncio.get_running_loop()
        name = ray.get_runtime_context().get_actor_name()
        while True:
            opened = self._opened()
            waits = self._somebody_waits()
            # Between iterations the answer is None: an old answer would mislead the next iteration.
            others, pause_s = None, tuning.POLL_S
            if waits or any(pipeline.scheduler.in_run for pipeline in opened):
                others, pause_s = await loop.run_in_executor(None, ask_others, name, waits)
            for pipeline in opened:
                pipeline.requests.note(pipeline.scheduler.note_others, others)
            await asyncio.sleep(pause_s)


def _has_room(options: dict[str, Any]) -> bool:
    """Return whether some node surely has room for a task; False if Ray does not answer."""
    with contextlib.suppress(Exception):
        nodes = sum(node["Alive"] for node in ray.nodes())
        return has_room(options, ray.available_resources(), nodes)
    return False


@dataclass
class PipelineActor:
    """A pipeline actor that this process has started.

    Attributes:
        handle: Ray's handle.
        name: Its name in dpex's namespace.
        ray_job: The cluster's address, and the ID of this process's Ray job.
        lost: Whether a call found the actor dead.
    """

    handle: Any
    name: str
    ray_job: tuple[str, str]
    lost: bool = False

    @property
    def connected(self) -> bool:
        """Whether the actor's Ray is still this process's Ray."""
        return ray.is_initialized() and self.ray_job == ray_job()

    @property
    def alive(self) -> bool:
        """Whether the actor, as far as is known, runs in this process's Ray."""
        return not self.lost and self.connected


_running: PipelineActor | None = None
_starting = threading.Lock()


def get_pipeline_actor(runtime_env: dict[str, Any] | None) -> PipelineActor:
    """Return this process's pipeline actor; start one on this node if none is alive.

    Args:
        runtime_env: Ray runtime environment for nodes that lack dpex.
    """
    global _running
    with _starting:
        if _running is None or not _running.alive:
            context = ray.get_runtime_context()
            name = f"{ACTOR_PREFIX}{uuid.uuid4().hex}"
            options: dict[str, Any] = {"runtime_env": runtime_env} if runtime_env else {}
            handle = (
                ray.remote(_PipelineActor)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    num_cpus=0,
                    # Each task that waits for a chunk has one call open.
                    max_concurrency=100_000,
                    # With a soft affinity, Ray may choose another node.
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        context.get_node_id(), soft=False
                    ),
                    **options,
                )
                .remote()
            )
            _running = PipelineActor(handle, name, ray_job())
        return _running
