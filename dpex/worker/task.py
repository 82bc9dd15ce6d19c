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

from dpex import tuning
from dpex.cluster.local.forkserver import show_script_arguments
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk
from dpex.wire.packing import pack, unpack
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
    from dpex.protocol.chunks import Chunk
    from dpex.wire.block_format import BlockWriter
    from dpex.wire.segments import SegmentPool
    from dpex.worker.map_style import Job

__all__ = [
    "TransformBatches",
    "lease_block",
    "make_batches",
    "start_tasks",
    "transform_batches",
]


def lease_block() -> pa.Table:
    """Return the source block of a task; the task gets its work from the pipeline actor."""
    return pa.table({"lease": [0]})


def start_tasks(_: pa.Table, *, actor_name: str, pipeline_key: str) -> Iterator[pa.Table]:
    """Yield a source block for each further task, as soon as the pipeline actor wants the task.

    This is the function of a ``map_batches`` stage before the tasks.

    Args:
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that the tasks belong to.

    Yields:
        Source blocks, which carry no data.
    """
    started = tuning.FIRST_TASKS
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
        job: Reference to the pickled ``Job``, if it is in the object store.
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
    from dpex.worker.dataset_copies import ALL_ITERATIONS

    show_script_arguments()
    asking = _Asking(actor_name, pipeline_key)
    make_copy = functools.partial(read_job, job, job_key, actor_name)
    release_when_closed(actor_name, pipeline_key, job_key)
    while (assigned := asking.answer()) is not None:
        asking.messages.begin_chunk()
        chunk = pickle.loads(assigned.payload)
        cancelled = functools.partial(is_over, pipeline_key, assigned.iteration)
        # A bound logical worker that is far enough ahead waits, and releases its CPU to the others.
        asking.keeps_cpu = assigned.binding is not Binding.ALWAYS
        for _ in range(assigned.skipped_blocks):
            # Ray has these blocks from an earlier attempt, and drops the empty replacements.
            asking.made += 1
            if not last:
                yield BlockWriter("", 0).table()
        wait_for_end(assigned.replaced, cancelled)
        if cancelled():  # its copies are dropped already, and this chunk would make new ones
            continue
        # None before a later stage, also if Ray runs that stage in this task with segments.
        segments = OWN_SEGMENTS.serve(pipeline_key, chunk.run.key, reader)
        with working(pipeline_key, ALL_ITERATIONS if persistent else assigned.iteration):
            for writer in _make_chunk(chunk, assigned, make_copy, cancelled, asking, segments):
                asking.made += 1
                if last:
                    deliver(writer, asking.messages, asking.last_sample_made())
                else:
                    yield writer.table()
        asking.finish()
    asking.messages.confirm()


def deliver(
    writer: BlockWriter, messages: Messages, finished: tuple[str, str, int] | None = None
) -> None:
    """Put a block into the object store and send a reference, or send a small block itself.

    If the object store fails, the pipeline actor gets the loss in place of the block.

    Args:
        writer: The writer of the block.
        messages: The messages of the current task to the pipeline actor.
        finished: What ``_Asking.last_sample_made`` returned.
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
    from dpex.worker.dataset_copies import ALL_ITERATIONS
    from dpex.worker.later_stage import apply_stage

    show_script_arguments()
    frame = read_block(table)
    if not frame.run:  # an empty block, in place of a block that Ray has already
        return
    make_copy = functools.partial(read_job, job, job_key, actor_name)
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


class TransformBatches:
    """A later stage whose worker keeps its process; see ``transform_batches``."""

    def __init__(self, **what: Any) -> None:
        self._what = what

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Apply the stage to one block, and yield it if there is a later stage."""
        yield from transform_batches(table, **self._what, kept=True)


class _Asking:
    """A task's requests for its next chunk.

    Attributes:
        made: Number of blocks that the task has made.
        origin: Identifiers of the task and of its process.
        keeps_cpu: Whether the task keeps its CPU for ``tuning.KEEP_CPU_S`` of a wait for an answer.
        unchanged: Whether the last batch has left its copy unchanged; None if this is not known.
        messages: The other messages of the task to the pipeline actor.
    """

    def __init__(self, actor_name: str, pipeline_key: str) -> None:
        self._actor_name = actor_name
        self._pipeline_key = pipeline_key
        self.origin = (ray.get_runtime_context().get_task_id(), attempt_name())
        self._place = 0
        self.made = 0
        # How many blocks the task will have made at the end of a chunk in which it asked early.
        self._made_then: int | None = None
        self.keeps_cpu = True
        self.unchanged: bool | None = None
        self.messages = Messages(actor_name, pipeline_key)
        self._told: bool | None = None
        self._answer: ray.ObjectRef | None = None

    def ask(self, coming: int = 0, *, early: bool = False) -> None:
        """Send a request for the next chunk, if none is pending; ``answer`` returns the chunk.

        Args:
            coming: Number of blocks of the current chunk that the task still has to make.
            early: Whether it also has samples to make; ``finish`` reports their end.

        Raises:
            ActorUnavailableError: The pipeline actor cannot be reached.
        """
        if self._answer is None:
            # Invariant: the blocks of all chunks before the current one have arrived. If this
            # process dies, only the current and the next chunk are recomputed.
            self.messages.confirm_earlier()
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                request = pack(
                    self._pipeline_key,
                    self.origin,
                    self._place,
                    self.made + coming,
                    self.unchanged,
                    early=early,
                )
                self._answer = pipeline_actor(self._actor_name).next_chunk.remote(request)
                self._told, self.unchanged = self.unchanged, None
                self._made_then = self.made + coming if early else None

    def last_sample_made(self) -> tuple[str, str, int] | None:
        """Return a report if the task asked early, and has made the last block since.

        Until the report arrives, the pipeline actor gives no task a chunk of the logical worker.
        """
        if self._made_then is None or self.made < self._made_then:
            return None
        self._made_then = None
        return *self.origin, self._place

    def finish(self) -> None:
        """Report the end of a chunk in which the task asked early, if no block reports it."""
        if self._made_then is not None:
            self._made_then = None
            self.messages.send("finished", *self.origin, self._place)

    def tell_changed(self) -> None:
        """Report that a batch has changed its copy, although its logical worker is released."""
        self.messages.send("state", self.origin[0], False)

    def answer(self) -> AssignedChunk | None:
        """Return the next chunk; None if the lease has ended or the actor no longer exists.

        Raises:
            ActorUnavailableError: The pipeline actor cannot be reached.
        """
        patience = Patience()
        while True:
            self.ask()
            if self._answer is None:
                return None
            try:
                assigned: AssignedChunk | None = unpack(self._get(self._answer))
            except ACTOR_DIED:
                return None
            except ray.exceptions.ActorUnavailableError as error:
                self._answer, self.unchanged = None, self._told
                # `wait` raises in the end, so that the task fails. The pipeline actor would take a
                # normal return of the task for the end of a lease that the actor has ended.
                patience.wait(error)
            else:
                self._answer = None
                if assigned is not None:
                    self._place = assigned.place + 1
                return assigned

    def _get(self, answer: ray.ObjectRef) -> Any:
        # If the task keeps its CPU, the actor answers soon: with a chunk or the end of the lease.
        return get_soon(answer) if self.keeps_cpu else ray.get(answer)


def _make_chunk(
    chunk: Chunk,
    assigned: AssignedChunk,
    make_copy: Callable[[], Job],
    cancelled: Callable[[], bool],
    asking: _Asking,
    segments: SegmentPool | None,
) -> Iterator[BlockWriter]:
    """Yield a writer whenever its block is complete; request the next chunk before the last one."""
    from dpex.wire.block_format import BlockWriter
    from dpex.wire.timings import Costs
    from dpex.worker.iterable import stream_chunk
    from dpex.worker.map_style import fetch_chunk

    again, binding = assigned.again, assigned.binding
    costs_before = Costs(retries=len(chunk.numbers) if again else 0)
    writer = BlockWriter(chunk.run.key, chunk.number, costs_before, segments=segments)
    opened = time.monotonic()
    # Invariant: when `ask` is called, only the block with the last batch is still to be made.
    ask = functools.partial(asking.ask, coming=1)
    ask_early = functools.partial(ask, early=True)
    if chunk.stream:
        batches = stream_chunk(chunk, make_copy, _here(), cancelled)
    else:

        def note_state(unchanged: bool) -> None:
            if binding is Binding.WATCHED:  # the actor needs it to choose the next chunk
                asking.unchanged = unchanged
            elif not unchanged:
                asking.tell_changed()

        batches = fetch_chunk(
            chunk,
            make_copy,
            _here(),
            cancelled,
            binding=binding,
            restarted=assigned.restarted,
            # For a watched logical worker, the request waits until the last batch has been checked.
            nearly_made=None if binding is Binding.WATCHED else ask_early,
            seen_unchanged=note_state,
        )
    remaining = len(chunk.batches)
    if again:  # each batch is sent at once, so it survives another death of the process
        long_block_s = long_batch_s = 0.0
    elif chunk.patient:
        long_block_s = long_batch_s = tuning.PATIENT_S
    else:
        long_block_s = tuning.BLOCK_S
        long_batch_s = 0.0 if remaining <= tuning.SHORT_CHUNK else tuning.LONG_BATCH_S
    for entry, costs in batches:
        writer.add(entry, costs)
        remaining -= 1
        ended = entry.outcome == "end"
        del entry
        # Tensors in segments do not make a block longer. But only a patient loop waits for more.
        block_bytes = writer.size_bytes if chunk.patient else writer.batch_bytes
        full = block_bytes >= tuning.BLOCK_BYTES or time.monotonic() - opened >= long_block_s
        last = remaining == 0 or ended
        if last or full or costs.seconds >= long_batch_s:
            if last:
                # The actor answers while this task stores the block.
                ask()
            yield writer
            opened = time.monotonic()


def _here() -> str:
    return f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"
