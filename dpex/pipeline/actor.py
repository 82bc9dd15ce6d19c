"""The actor that runs the pipelines, so that the trainer's process keeps its GIL to itself.

One host serves all loaders of a process. It claims no CPU, has no use for torch, and touches no
data: it passes chunks in and block references out. A pipeline serves one
iteration of a loader at a time and outlives it.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dpex.cluster.limits import IdleCores
from dpex.cluster.local.forkserver import inheritance
from dpex.compat.executor import tune_executor
from dpex.pipeline.dataset import PipelineSpec, build, store_job
from dpex.pipeline.execution import Execution
from dpex.pipeline.fair_share import ACTOR_PREFIX, POLL_S, FairShare, ask_others, free_cpus
from dpex.pipeline.scheduler import MAX_DEATHS, OtherJobs, Scheduler
from dpex.worker.actor_calls import NAMESPACE, Arrived, AssignedChunk
from dpex.worker.task import FIRST_TASKS

__all__ = ["PipelineActor", "get_pipeline_actor"]

_QUIET_WAIT_S = 1.0
# The state of persistent logical workers is worth a longer wait: torch waits for them, too.
_STATE_WAIT_S = 60.0
_MAX_RECENT = 10_000
# What Ray does not take back from a task that waits for an answer, as it does its CPUs.
_HELD_WHILE_WAITING = frozenset({"resources", "memory", "accelerator_type"})


@dataclass
class Reply:
    """What a pipeline has to say.

    Attributes:
        blocks: New blocks: a reference, or a small block itself, and its size in bytes.
        quiet_at: Number of the run's chunks when last all of them were done; their blocks have
            all been handed out with or before this reply.
        ended: Whether no more will come for this run.
        errors: What lost something that was in flight.
    """

    blocks: list[tuple[Any, int]] = field(default_factory=list)
    quiet_at: int = 0
    ended: bool = False
    errors: list[str] = field(default_factory=list)


class _Pipeline:
    """One pipeline, as the pipeline actor keeps it.

    Attributes:
        job_key: Digest of the job that its workers read.
        arrived: The messages that workers have sent.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        run: str,
        loop: asyncio.AbstractEventLoop,
        somebody_waits: Callable[[], bool],
    ) -> None:
        self.job_key = spec.job_key
        self._loop = loop
        self._blocks: deque[tuple[Any, int]] = deque()
        self._errors: list[str] = []
        self._told_quiet_at = 0
        self.broken = False
        self.changed = asyncio.Event()
        self.over = asyncio.Event()
        self.scheduler = Scheduler(
            loop,
            self.changed.set,
            holds_resources=not _HELD_WHILE_WAITING.isdisjoint(spec.options),
            claims_cpus=spec.claims_cpus,
            choosy="fallback_strategy" in spec.options,
            num_workers=spec.num_workers,
            binding=spec.binding,
            persistent=spec.persistent,
            idle=None if spec.claims_cpus else IdleCores().any,
            somebody_waits=somebody_waits,
            first_tasks=FIRST_TASKS,
        )
        self._starts: Counter[tuple[str, int, int]] = Counter()
        self.arrived = Arrived()
        self._serve(run)
        self._executions: list[Execution] = []
        if spec.later:  # the number of a later stage's workers is limited in one Dataset
            self._execute(spec, first=True, further=True)
        else:
            self._execute(spec, first=True, further=False)
            self._adding = asyncio.ensure_future(self._add_tasks(spec))

    async def _add_tasks(self, spec: PipelineSpec) -> None:
        """Start the Dataset of further tasks when the first of them is wanted."""
        if await self.scheduler.more_tasks(FIRST_TASKS) is not None:
            self._execute(spec, first=False, further=True)

    def _execute(self, spec: PipelineSpec, *, first: bool, further: bool) -> None:
        def take_end(error: BaseException | None) -> None:
            if error is None and further:
                error = RuntimeError("Ray Data's execution has ended")
            if error is not None:  # else the first task has no more to do
                self._take_end(error)

        execution = Execution(lambda: build(spec, first=first, further=further), take_end)
        self._executions.append(execution)

    def close(self) -> None:
        """End all tasks: none gets another chunk."""
        self.begin(None)
        self.scheduler.close()

    def join(self) -> None:
        """Wait some seconds for the end of the executions."""
        for execution in self._executions:
            execution.close()

    def begin(self, run: str | None) -> None:
        """Serve another iteration, or none; what waits is dropped."""
        self.scheduler.drop()
        self._serve(run)

    def _serve(self, run: str | None) -> None:
        self.over.set()
        self.over = asyncio.Event()
        self.run = run
        self.scheduler.begin(in_run=run is not None)
        self._first_chunk = self.scheduler.fed
        self._early: dict[int, tuple[bytes, int, bool]] = {}
        self._blocks.clear()
        self._errors.clear()
        self._starts.clear()
        self.changed.set()

    def feed(self, number: int, payloads: list[bytes], workers: list[int], *, alone: bool) -> None:
        """Append chunks, the first one being the run's ``number``-th.

        Calls of an async actor may overtake one another; chunks must not.
        """
        chunks = zip(payloads, workers, strict=True)
        self._early.update((at, (*chunk, alone)) for at, chunk in enumerate(chunks, number))
        while (chunk := self._early.pop(self.scheduler.fed - self._first_chunk, None)) is not None:
            self.scheduler.feed(chunk[0], chunk[1], alone=chunk[2])

    def news(self) -> Reply | None:
        """Return what is new since the last call, or None."""
        blocks, errors, quiet_at = list(self._blocks), list(self._errors), self.scheduler.quiet_at
        broken = self.broken
        self._blocks.clear()
        self._errors.clear()
        if not (blocks or errors or broken or quiet_at != self._told_quiet_at):
            return None
        self._told_quiet_at = quiet_at
        return Reply(blocks, quiet_at - self._first_chunk, broken, errors)

    def note_error(self, text: str) -> None:
        """Record what lost something that was in flight."""
        self._errors.append(text)
        self.changed.set()
        self.scheduler.release()

    def deliver(
        self, origin: tuple[str, str], blocks: list[Any], size_bytes: int, error: str
    ) -> None:
        """Take a block from a worker, or what it says in its place."""
        self._blocks.extend((block, size_bytes) for block in blocks)
        if error:
            self.note_error(error)
        self.scheduler.delivered(*origin)
        self.changed.set()

    def may_begin(self, block: tuple[str, int, int], origin: tuple[str, str]) -> bool:
        """Count how often a later stage has begun with a block, and give it up in the end.

        Args:
            block: The stage's task, and the block's chunk and first batch.
            origin: The task that began it, and the process.
        """
        self._starts[block] += 1
        if self._starts[block] <= MAX_DEATHS:
            return True
        text = f"the worker process of a later stage died {MAX_DEATHS} times in a row"
        self.deliver(origin, [], 0, text)
        return False

    def _take_end(self, error: BaseException) -> None:
        """Tell the reader that an execution has failed; called in the execution's thread."""

        def end() -> None:
            self.broken = True
            self._errors.append(f"{type(error).__name__}: {error}")
            self.changed.set()

        self._loop.call_soon_threadsafe(end)


class _Recent(OrderedDict[str, None]):
    """The names last added; who asks for one asks soon."""

    def add(self, name: str) -> None:
        """Add a name, and forget the oldest where there are too many."""
        self[name] = None
        while len(self) > _MAX_RECENT:
            self.popitem(last=False)


class _PipelineActor:
    """The actor's class.

    ``take``, ``over``, ``closed`` and ``next_chunk`` wait for what they tell, ``begin`` and
    ``close`` for some seconds that nothing is at work; the other methods are short.
    """

    def __init__(self) -> None:
        self._pipelines: dict[str, asyncio.Future[_Pipeline]] = {}
        self._closed = _Recent()
        self._closing: dict[str, asyncio.Event] = {}
        self._stored_jobs: dict[str, asyncio.Future[ray.ObjectRef]] = {}
        self._sharing: asyncio.Future[None] | None = None
        self._fair_share = FairShare(free_cpus)
        tune_executor()
        gc.freeze()  # what is loaded by now stays, so no collection need look at it

    def _opening(self, pipeline_key: str) -> asyncio.Future[_Pipeline]:
        """Return the pipeline, or the promise of it: any call may arrive before ``open``."""
        if pipeline_key not in self._pipelines:
            self._pipelines[pipeline_key] = asyncio.get_running_loop().create_future()
        return self._pipelines[pipeline_key]

    async def _serving(self, pipeline_key: str, run: str) -> _Pipeline | None:
        """Return a pipeline if it serves this run; None if the run was given up."""
        if pipeline_key in self._closed:
            return None
        pipeline = await self._opening(pipeline_key)
        return pipeline if pipeline.run == run else None

    def _somebody_waits(self) -> bool:
        """Return whether a pipeline of this process has tasks that wait to begin."""
        return any(pipeline.scheduler.waits for pipeline in self._opened())

    def _opened(self) -> list[_Pipeline]:
        return [o.result() for o in self._pipelines.values() if o.done() and not o.exception()]

    async def open(self, pipeline_key: str, spec: PipelineSpec, run: str) -> None:
        """Start a pipeline that serves ``run`` first."""
        if pipeline_key in self._closed and pipeline_key not in self._pipelines:
            return  # given up before it came, and nobody waits for it
        loop = asyncio.get_running_loop()
        opening = self._opening(pipeline_key)
        try:
            opening.set_result(_Pipeline(spec, run, loop, self._somebody_waits))
            if spec.claims_cpus and self._sharing is None:
                self._sharing = asyncio.ensure_future(self._share_cpus())
        except Exception as error:
            opening.set_exception(error)

    async def begin(self, pipeline_key: str, run: str) -> bool:
        """Let a pipeline serve another iteration.

        Returns:
            False if the pipeline is broken, or still at work for an iteration that was given up.
        """
        if pipeline_key in self._closed:
            return False
        pipeline = await self._opening(pipeline_key)
        patience_s = _STATE_WAIT_S if pipeline.scheduler.keeps_state else _QUIET_WAIT_S
        deadline = time.monotonic() + patience_s
        while pipeline.scheduler.at_work and not pipeline.broken and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if pipeline.broken or pipeline.scheduler.at_work or pipeline_key in self._closed:
            return False
        pipeline.begin(run)
        return True

    async def feed(
        self,
        pipeline_key: str,
        run: str,
        number: int,
        payloads: list[bytes],
        *,
        workers: list[int],
        alone: bool,
        parallel: int,
        starting: int,
        one_by_one: bool,
    ) -> None:
        """Append chunks to a run.

        Args:
            pipeline_key: The pipeline.
            run: The run that the chunks belong to; ignored if it was given up.
            number: Number of the first of these chunks in the run.
            payloads: Pickled chunks.
            workers: The logical worker of each.
            alone: Whether each is to have a task of its own.
            parallel: Number of tasks to run at once, if logical workers are not bound.
            starting: Number of tasks to start at once, if they are.
            one_by_one: Whether one task is to run at a time.
        """
        if pipeline_key in self._closed:
            return
        pipeline = await self._opening(pipeline_key)
        if pipeline.run == run:
            pipeline.scheduler.parallel, pipeline.scheduler.starting = parallel, starting
            pipeline.scheduler.one_by_one = one_by_one
            pipeline.feed(number, payloads, workers, alone=alone)

    async def more_tasks(self, pipeline_key: str, started: int) -> int | None:
        """Wait until a pipeline wants tasks; see ``Scheduler.more_tasks``."""
        if pipeline_key in self._closed:
            return None
        return await (await self._opening(pipeline_key)).scheduler.more_tasks(started)

    async def next_chunk(
        self,
        pipeline_key: str,
        origin: tuple[str, str],
        place: int,
        made: int,
        unchanged: bool | None,
    ) -> AssignedChunk | None:
        """Answer a task that asks for its next chunk.

        Args:
            pipeline_key: Its pipeline.
            origin: The task, and its process.
            place: See ``Scheduler.next_chunk``.
            made: See there.
            unchanged: Whether its last batch has left the copy as it was; None if not looked at.
        """
        if pipeline_key in self._closed:
            return None
        pipeline = await self._opening(pipeline_key)
        name, attempt = origin
        if unchanged is not None:
            pipeline.scheduler.note_state(name, unchanged)
        try:
            return await pipeline.scheduler.next_chunk(name, place, made, attempt)
        except MemoryError as error:
            pipeline.note_error(f"{type(error).__name__}: {error}")
            return None

    async def deliver(
        self,
        pipeline_key: str,
        message: tuple[str, int],
        origin: tuple[str, str],
        blocks: list[Any],
        size_bytes: int,
        error: str,
    ) -> None:
        """Take a block.

        Args:
            pipeline_key: The pipeline that it belongs to.
            message: The sender, and the number of its message.
            origin: The task that made it, and the process.
            blocks: A reference to it, or a small one itself; none if it is lost.
            size_bytes: Its size.
            error: Why it is lost.
        """
        if pipeline_key not in self._closed:
            pipeline = await self._opening(pipeline_key)
            if pipeline.arrived.add(message):
                pipeline.deliver(origin, blocks, size_bytes, error)

    async def may_begin(
        self, pipeline_key: str, block: tuple[str, int, int], origin: tuple[str, str]
    ) -> bool:
        """Tell a task of a later stage whether to begin; see ``_Pipeline.may_begin``."""
        if pipeline_key in self._closed:
            return False
        return (await self._opening(pipeline_key)).may_begin(block, origin)

    async def release(self, pipeline_key: str, run: str) -> None:
        """End the leases that wait: the run's reader has lost a block."""
        if (
            pipeline_key not in self._closed
            and (pipeline := await self._opening(pipeline_key)).run == run
        ):
            pipeline.scheduler.release()

    async def take(self, pipeline_key: str, run: str) -> Reply:
        """Wait for news of a run; one that was given up has ended."""
        while (
            pipeline_key not in self._closed
            and (pipeline := await self._opening(pipeline_key)).run == run
        ):
            pipeline.changed.clear()
            reply = pipeline.news()
            if reply is not None:
                return reply
            await pipeline.changed.wait()
        return Reply(ended=True)

    async def inherits(self, job_key: str) -> bool:
        """Tell whether this process, and with it the workers, inherit a job."""
        return job_key in inheritance

    async def stored_job(self, job_key: str) -> list[ray.ObjectRef]:
        """Put an inherited job into the object store, for a worker that needs another copy."""
        if job_key not in self._stored_jobs:
            self._stored_jobs[job_key] = asyncio.get_running_loop().run_in_executor(
                None, store_job, inheritance[job_key]
            )
        return [await self._stored_jobs[job_key]]

    async def cancel(self, pipeline_key: str, run: str) -> None:
        """Give up a run: its chunks that have not begun do nothing, the others stop soon."""
        if (
            pipeline_key not in self._closed
            and (pipeline := await self._opening(pipeline_key)).run == run
        ):
            pipeline.begin(None)

    async def over(self, pipeline_key: str, run: str) -> None:
        """Answer when a run is over."""
        if (
            pipeline_key not in self._closed
            and (pipeline := await self._opening(pipeline_key)).run == run
        ):
            await pipeline.over.wait()

    async def note_state(
        self, pipeline_key: str, message: tuple[str, int], lease: str, unchanged: bool
    ) -> None:
        """Take a task's report about its copy; see ``Scheduler.note_state``."""
        if pipeline_key not in self._closed:
            (await self._opening(pipeline_key)).scheduler.note_state(lease, unchanged)

    async def closed(self, pipeline_key: str) -> None:
        """Answer when a pipeline is closed: then nobody needs what workers keep for it."""
        if pipeline_key not in self._closed:
            await self._closing.setdefault(pipeline_key, asyncio.Event()).wait()

    async def close(self, pipeline_key: str) -> None:
        """End a pipeline; one that is still to be opened never is."""
        self._closed.add(pipeline_key)
        if pipeline_key in self._closing:
            self._closing.pop(pipeline_key).set()
        if pipeline_key not in self._pipelines:
            return
        try:
            pipeline = await self._pipelines[pipeline_key]
        except Exception:  # it never opened, and has said so
            return
        finally:
            self._pipelines.pop(pipeline_key, None)
        pipeline.close()
        still_read = {other.job_key for other in self._opened()}
        if pipeline.job_key not in still_read:
            self._stored_jobs.pop(pipeline.job_key, None)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, pipeline.join)
        del pipeline
        # A plan of Ray Data's refers to itself, and to the job in the object store.
        await loop.run_in_executor(None, gc.collect)

    async def others(self, name: str, waits: bool) -> tuple[OtherJobs | None, float]:
        """Answer a pipeline actor that asks how the others fare; see ``FairShare.others``."""
        return await self._fair_share.others(name, waits)

    async def _share_cpus(self) -> None:
        """Let the pipelines know, from now on, how the other hosts on the cluster fare."""
        loop = asyncio.get_running_loop()
        name = ray.get_runtime_context().get_actor_name()
        while True:
            opened = self._opened()
            waits = any(pipeline.scheduler.waits for pipeline in opened)
            # An answer from between two iterations is too old for the next one.
            others, pause_s = None, POLL_S
            if waits or any(pipeline.scheduler.in_run for pipeline in opened):
                others, pause_s = await loop.run_in_executor(None, ask_others, name, waits)
            for pipeline in opened:
                pipeline.scheduler.note_others(others)
            await asyncio.sleep(pause_s)


@dataclass
class PipelineActor:
    """A running host.

    Attributes:
        actor: Ray's handle.
        name: Its name in the namespace of dpex.
        driver: The cluster's address and this process's job there.
        lost: Whether it was found dead.
    """

    handle: Any
    name: str
    driver: tuple[str, str]
    lost: bool = False

    @property
    def connected(self) -> bool:
        """Whether the Ray it was started in is still this process's Ray."""
        return ray.is_initialized() and self.driver == _driver()

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known, in this process's Ray."""
        return not self.lost and self.connected


def _driver() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())


_running: PipelineActor | None = None
_starting = threading.Lock()


def get_pipeline_actor(runtime_env: dict[str, Any] | None) -> PipelineActor:
    """Return this process's host, started on first use on this node.

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
                    # Every task that waits for a chunk is a call in flight.
                    max_concurrency=100_000,
                    # A soft affinity leaves it to chance.
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        context.get_node_id(), soft=False
                    ),
                    **options,
                )
                .remote()
            )
            _running = PipelineActor(handle, name, _driver())
        return _running
