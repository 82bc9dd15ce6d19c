"""The tasks of a pipeline, which ask the actor for chunks, make their batches and send them."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import ALL_ITERATIONS, AssignedChunk, Replaced
from dpex.protocol.worker_loop import (
    Ask,
    EndChunk,
    NextBatch,
    NextChunk,
    Open,
    Send,
    WorkerLoop,
    next_step,
)
from dpex.wire.packed_calls import pack
from dpex.worker.actor_calls import (
    ACTOR_DIED,
    Messages,
    Patience,
    ask_actor,
    get_soon,
    loss_of,
    pipeline_actor,
)
from dpex.worker.kept_jobs import is_over, read_job, release_when_closed, working
from dpex.worker.process_identity import attempt_name, process_name, wait_for_end

if TYPE_CHECKING:
    from dpex.wire.block_format import BlockWriter

__all__ = [
    "MakeBatches",
    "StartTasks",
    "TransformBatches",
    "lease_block",
    "make_batches",
    "start_tasks",
    "transform_batches",
]


def lease_block() -> pa.Table:
    """Return the source block of a task; the task gets its work from the pipeline actor."""
    return pa.table({"lease": [0]})


def start_tasks(
    _: pa.Table, *, started: int, actor_name: str, pipeline_key: str
) -> Iterator[pa.Table]:
    """Yield a source block for each further task, as soon as the pipeline actor wants the task.

    This is the function of a ``map_batches`` stage before the tasks.

    Args:
        started: Number of tasks that have started otherwise.
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that the tasks belong to.

    Yields:
        Source blocks, which carry no data.
    """
    with contextlib.suppress(ValueError, *ACTOR_DIED):
        while True:
            tasks = ask_actor(actor_name, "more_tasks", pipeline_key, started)
            if tasks is None:
                return
            for _ in range(tasks):
                yield lease_block()
            started += tasks


def make_batches(
    _: pa.Table,
    *,
    job: list[ray.ObjectRef],
    job_key: str,
    actor_name: str,
    pipeline_key: str,
    last: bool,
    reader: str,
    persistent: bool,
) -> Iterator[pa.Table]:
    """Make the batches of one chunk after another, until the task lease ends.

    This is the function of the first stage's ``map_batches``.

    Args:
        job: Reference to the pickled ``Job`` in the object store.
        job_key: Digest of the job's bytes.
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that has the chunks.
        last: Whether there is no later stage.
        reader: The machine of the training process, if it reads segments; else empty.
        persistent: Whether dataset copies serve all iterations.

    Yields:
        Blocks of one row, as ``BlockWriter.table`` makes them, if there is a later stage.
    """
    from dpex.wire.block_format import BlockWriter
    from dpex.wire.segments import OWN_SEGMENTS
    from dpex.worker.chunk_work import ChunkWork  # loads torch, which the actor does not need

    loop = WorkerLoop()
    actor = _Actor(actor_name, pipeline_key)
    make_copy = functools.partial(read_job, job, job_key)
    release_when_closed(actor_name, pipeline_key, job_key)
    chunks = ChunkWork(loop, _here(), make_copy, actor.ask, actor.note_change)
    steps = loop.run()
    answer: Any = None
    # Each chunk closes it at its end.
    with contextlib.ExitStack() as work:
        while (step := next_step(steps, answer)) is not None:
            answer = None
            match step:
                case NextBatch():
                    answer = chunks.next_batch()
                case Send():
                    if last:
                        deliver(chunks.writer, actor.messages, actor.report_of(step.finished))
                    else:
                        actor.report(step.finished)
                        yield chunks.writer.table()
                    answer = time.monotonic()
                case Ask():
                    actor.ask(step)
                case NextChunk():
                    answer = actor.answer()
                case Open():
                    assigned = step.assigned
                    actor.messages.begin_chunk()
                    for _ in range(0 if last else assigned.skipped_blocks):
                        # Ray has these blocks from an earlier attempt, and drops the replacements.
                        yield BlockWriter("", 0).table()
                    cancelled = functools.partial(is_over, pipeline_key, assigned.iteration)
                    wait_for_end(assigned.replaced, cancelled)
                    if cancelled():  # its copies are dropped already, and it would make new ones
                        continue
                    chunk = pickle.loads(assigned.payload)
                    # None before a later stage, also if Ray runs that stage in this task.
                    segments = OWN_SEGMENTS.serve(pipeline_key, chunk.run.key, reader)
                    iteration = ALL_ITERATIONS if persistent else assigned.iteration
                    work.enter_context(working(pipeline_key, iteration))
                    batches = chunks.batches(chunk, assigned, cancelled)
                    chunks.open(chunk, assigned, batches, segments)
                    answer = chunk, time.monotonic()
                case EndChunk():
                    chunks.close()
                    work.close()
                    actor.report(step.finished)
    actor.messages.confirm()


def deliver(
    writer: BlockWriter, messages: Messages, finished: tuple[str, str, int] | None = None
) -> None:
    """Put a block into the object store and send a reference, or send a small block itself.

    If the object store fails, the pipeline actor gets the loss in place of the block.

    Args:
        writer: The writer of the block.
        messages: The messages of the current task to the pipeline actor.
        finished: What ``_Actor.report_of`` returned.
    """
    part = writer.part
    if (block := writer.message()) is not None:
        messages.send("block", part, block, len(block), None, finished)
        return
    table = writer.table()
    stored, loss = None, None
    try:
        # A block in the object store, however small, keeps an autoscaler from removing its node.
        stored = ray.put(table)
    except ray.exceptions.RayError as failure:  # for example, the store and the disk are full
        loss = loss_of(failure, part)
    messages.send("block", part, None, table.nbytes, loss, finished, stored=stored)


def transform_batches(
    table: pa.Table,
    *,
    stage: int,
    job: list[ray.ObjectRef],
    job_key: str,
    actor_name: str,
    pipeline_key: str,
    last: bool,
    reader: str,
    kept: bool = False,
) -> Iterator[pa.Table]:
    """Apply a later stage to one block.

    This is the function of the stage's ``map_batches``.

    Args:
        table: A block that the previous stage yielded.
        stage: Number of the stage.
        job: Reference to the pickled ``StageJob``.
        job_key: Digest of the job's bytes.
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that the block belongs to.
        last: Whether this is the last stage.
        reader: The machine of the training process, if it reads segments; else empty.
        kept: Whether this process's copy of the stage serves all iterations.

    Yields:
        The block with its batches transformed, if there is a later stage.
    """
    from dpex.wire.block_format import BlockWriter, read_block
    from dpex.wire.segments import OWN_SEGMENTS
    from dpex.worker.later_stage import apply_stage

    frame = read_block(table)
    if not frame.run:  # an empty block, in place of a block that Ray has already
        return
    make_copy = functools.partial(read_job, job, job_key)
    release_when_closed(actor_name, pipeline_key, job_key)
    task = ray.get_runtime_context().get_task_id()
    begun = "may_begin", pipeline_key, task, frame.part, process_name()
    iteration: int | None = ask_actor(actor_name, *begun)
    if iteration is None:
        return
    cancelled = functools.partial(is_over, pipeline_key, iteration)
    segments = OWN_SEGMENTS.serve(pipeline_key, frame.run, reader)
    writer = BlockWriter(frame.run, frame.chunk, frame.costs, segments=segments)
    with working(pipeline_key, ALL_ITERATIONS if kept else iteration):
        batches = apply_stage(stage, frame.entries, make_copy, _here(), cancelled, kept=kept)
        for entry, costs in batches:
            writer.add(entry, costs)
    if last:
        messages = Messages(actor_name, pipeline_key)
        deliver(writer, messages)
        messages.confirm()
    else:
        yield writer.table()


class _Worker:
    """A function of ``map_batches`` as a class, which Ray Data runs in an actor.

    Args:
        **arguments: Arguments of the function, apart from the block.
    """

    _function: Callable[..., Iterator[pa.Table]]

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Call the function with one block."""
        yield from type(self)._function(table, **self._arguments)


class StartTasks(_Worker):
    """The stage that starts further tasks; see ``start_tasks``."""

    _function = staticmethod(start_tasks)


class MakeBatches(_Worker):
    """The first stage; see ``make_batches``. Each call is one task lease."""

    _function = staticmethod(make_batches)


class TransformBatches(_Worker):
    """A later stage; see ``transform_batches``."""

    _function = staticmethod(transform_batches)


class _Actor:
    """The pipeline actor, as a task's loop reaches it.

    Attributes:
        messages: The messages of the task, other than its requests.
    """

    def __init__(self, actor_name: str, pipeline_key: str) -> None:
        self._actor_name = actor_name
        self._pipeline_key = pipeline_key
        self._origin = (ray.get_runtime_context().get_task_id(), attempt_name())
        # Whether the task keeps its CPU for ``tuning.KEEP_CPU_S`` of a wait for an answer.
        self._keeps_cpu = True
        self.messages = Messages(actor_name, pipeline_key)
        self._request: Ask | None = None
        self._answer: ray.ObjectRef | None = None

    def ask(self, request: Ask) -> None:
        """Send a request, without waiting for its answer.

        Raises:
            ActorUnavailableError: The pipeline actor cannot be reached.
        """
        # Invariant: the blocks of all chunks before the current one have arrived. If this
        # process dies, only the current and the next chunk are recomputed.
        self.messages.confirm_earlier()
        self._request = request
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            packed = pack(
                self._pipeline_key,
                self._origin,
                request.place,
                request.made,
                request.unchanged,
                early=request.early,
            )
            self._answer = pipeline_actor(self._actor_name).next_chunk.remote(packed)

    def answer(self) -> AssignedChunk | None:
        """Return the next chunk; None if the lease has ended or the actor no longer exists.

        Raises:
            ActorUnavailableError: The pipeline actor cannot be reached.
        """
        patience = Patience()
        while self._request is not None:
            if self._answer is None:
                self.ask(self._request)
            if self._answer is None:
                return None
            try:
                # If the task keeps its CPU, the actor answers soon: with a chunk, or with the end.
                get = get_soon if self._keeps_cpu else ray.get
                assigned: AssignedChunk | Replaced | None = pickle.loads(get(self._answer))
            except ACTOR_DIED:
                return None
            except ray.exceptions.ActorUnavailableError as error:
                self._answer = None
                # `wait` raises in the end, so that the task fails. The pipeline actor would take a
                # normal return of the task for the end of a lease that the actor has ended.
                patience.wait(error)
            else:
                self._request = self._answer = None
                if isinstance(assigned, Replaced):
                    os._exit(1)
                # A bound logical worker that is far enough ahead releases its CPU to the others.
                self._keeps_cpu = assigned is None or assigned.binding is not Binding.ALWAYS
                return assigned
        return None

    def report_of(self, finished: int | None) -> tuple[str, str, int] | None:
        """Return the report that the last sample before a request has been made, if it has been."""
        return None if finished is None else (*self._origin, finished)

    def report(self, finished: int | None) -> None:
        """Send that report, which no block takes along."""
        if (report := self.report_of(finished)) is not None:
            self.messages.send("finished", *report)

    def note_change(self, worker: int) -> None:
        """Report that a batch has changed its copy, although its logical worker is released."""
        self.messages.send("state", self._origin[0], worker)


def _here() -> str:
    return f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"
