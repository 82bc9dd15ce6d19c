"""A task of a pipeline: it asks the actor for chunks, makes their batches and sends them."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import ray

from dpex.cluster.local.forkserver import show_script_arguments
from dpex.worker.actor_calls import (
    ACTOR_DIED,
    AssignedChunk,
    Messages,
    Patience,
    ask_actor,
    get_soon,
    pipeline_actor,
)
from dpex.worker.binding import Binding
from dpex.worker.kept_jobs import read_job, release_when_closed, working

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dpex.worker.map_style import Chunk, Job

__all__ = [
    "FIRST_TASKS",
    "TransformBatches",
    "lease_block",
    "make_batches",
    "start_tasks",
    "transform_batches",
]

FIRST_TASKS = 1
"""Number of tasks that start with a pipeline. A second process would delay the first batch."""

# What Ray passes with a call, and not through the object store.
_SMALL_BYTES = 100_000
# A block is handed over when it holds this much, or when this much time went into it. A batch
# that took long is handed over at once, for the next one may never end; unless enough is in flight
# before it: fewer blocks are less work for everybody.
_BLOCK_BYTES = 8 << 20
_BLOCK_SECONDS = 0.25
_LONG_BATCH_S = 0.025
_PATIENT_SECONDS = 2.0
# A chunk this short belongs to the beginning or the end, where batches are waited for.
_SHORT_CHUNK = 4
_CANCEL_CHECK_S = 0.1


def lease_block() -> pa.Table:
    """Return the source block of a task, which asks the pipeline actor what to do."""
    return pa.table({"turn": [0]})


def start_tasks(_: pa.Table, *, actor_name: str, pipeline_key: str) -> Iterator[pa.Table]:
    """Yield a block for each further task that is wanted, when it is: a stage's function.

    Args:
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that the tasks belong to.

    Yields:
        Blocks that say nothing.
    """
    started = FIRST_TASKS
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
) -> Iterator[pa.Table]:
    """Make one chunk after the other: the function of the ``map_batches`` stage.

    Args:
        job: Reference to the pickled ``Job``, if it is in the object store.
        job_key: Digest of the job's bytes.
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that has the chunks.
        last: Whether there is no later stage.

    Yields:
        Blocks of one row, as ``FrameWriter.table`` makes them, if there is a later stage.
    """
    from dpex.wire.block_format import BlockWriter

    show_script_arguments()
    asking = _Asking(actor_name, pipeline_key)
    interest = _interest(actor_name, pipeline_key)
    make_copy = functools.partial(read_job, job, job_key, actor_name)
    release_when_closed(actor_name, pipeline_key, job_key)
    while (assigned := asking.answer()) is not None:
        asking.messages.begin_chunk()
        chunk = pickle.loads(assigned.payload)
        interest.in_run(chunk.run.key)
        # A bound worker that is far enough ahead waits for the others, which may need its CPU.
        asking.keeps_cpu = assigned.binding is not Binding.ALWAYS
        for _ in range(assigned.skipped_blocks):
            # Ray has got these from an earlier attempt, and drops what comes in their place.
            asking.made += 1
            if not last:
                yield BlockWriter("", 0).table()
        with working(pipeline_key):
            for table in _make_chunk(chunk, assigned, make_copy, interest.lost, asking):
                asking.made += 1
                if last:
                    deliver(table, asking.origin, asking.messages)
                else:
                    yield table
                del table  # the next batch is made in its memory
    asking.messages.confirm()


def deliver(table: pa.Table, origin: tuple[str, str], messages: Messages) -> None:
    """Put a block into the object store, unless it is small, and send the actor a reference to it.

    Args:
        table: The block.
        origin: The task that began it, and the process.
        messages: Takes it there.
    """
    block, error = [], ""
    try:
        # In the store even a small one would keep an autoscaler from taking its node away.
        block.append(table if table.nbytes < _SMALL_BYTES else ray.put(table))
    except ray.exceptions.RayError as failure:  # no room in the store, nor on the disk
        error = f"{type(failure).__name__}: {failure}"
    messages.send("deliver", origin, block, table.nbytes, error)


def transform_batches(
    table: pa.Table,
    *,
    stage: int,
    job: list[ray.ObjectRef],
    job_key: str,
    actor_name: str,
    pipeline_key: str,
    last: bool,
    kept: bool = False,
) -> Iterator[pa.Table]:
    """Do a later stage's part of one block: the function of its ``map_batches``.

    Args:
        table: A block, as the stage before yielded it.
        stage: The stage's number.
        job: Reference to the pickled ``StageJob``.
        job_key: Digest of its bytes.
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that the block belongs to.
        last: Whether there is no later stage.
        kept: Whether this process serves all iterations.

    Yields:
        The block with the batches in it transformed, if there is a later stage.
    """
    from dpex.wire.block_format import BlockWriter, read_block
    from dpex.worker.later_stage import apply_stage

    show_script_arguments()
    frame = read_block(table)
    if not frame.run:  # in place of a block that had arrived
        return
    interest = _interest(actor_name, pipeline_key)
    interest.in_run(frame.run)
    # A task has several blocks where Ray does two stages in it. One of a run that was given up may
    # have no batches.
    first_batch = frame.entries[0].batch if frame.entries else -1
    block = (ray.get_runtime_context().get_task_id(), frame.chunk, first_batch)
    if not ask_actor(actor_name, "may_begin", pipeline_key, block, frame.origin):
        return
    make_copy = functools.partial(read_job, job, job_key, actor_name)
    release_when_closed(actor_name, pipeline_key, job_key)
    writer = BlockWriter(frame.run, frame.chunk, frame.costs, origin=frame.origin)
    with working(pipeline_key):
        batches = apply_stage(stage, frame.entries, make_copy, _here(), interest.lost, kept=kept)
        for entry, costs in batches:
            writer.add(entry, costs)
    if last:
        messages = Messages(actor_name, pipeline_key)
        deliver(writer.table(), frame.origin, messages)
        messages.confirm()
    else:
        yield writer.table()


class TransformBatches:
    """A worker of a later stage that keeps its process; see ``transform_batches``."""

    def __init__(self, **what: Any) -> None:
        self._what = what

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Yield a block with its batches transformed."""
        yield from transform_batches(table, **self._what, kept=True)


class _Asking:
    """A task's questions to the pipeline actor: what to do next.

    Attributes:
        made: How many blocks the task has made.
        origin: The task and its process, as the pipeline actor tells them from others.
        keeps_cpu: Whether it keeps its CPU while it waits for an answer.
        unchanged: Whether the last batch has left its copy as it was; None if not looked at.
        messages: What the task tells the pipeline actor besides.
    """

    def __init__(self, actor_name: str, pipeline_key: str) -> None:
        self._actor_name = actor_name
        self._pipeline_key = pipeline_key
        self.origin = (ray.get_runtime_context().get_task_id(), uuid.uuid4().hex)
        self._place = 0
        self.made = 0
        self.keeps_cpu = True
        self.unchanged: bool | None = None
        self.messages = Messages(actor_name, pipeline_key)
        self._told: bool | None = None
        self._answer: ray.ObjectRef | None = None

    def ask(self, coming: int = 0) -> None:
        """Ask, if that has not been done; ``answer`` has what comes of it.

        Args:
            coming: How many blocks are still to be made before what is asked for.

        Raises:
            ActorUnavailableError: The pipeline actor cannot be reached.
        """
        if self._answer is None:
            # If this process dies now, the actor has these two chunks made again, and no others.
            self.messages.confirm_earlier()
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                self._answer = pipeline_actor(self._actor_name).next_chunk.remote(
                    self._pipeline_key, self.origin, self._place, self.made + coming, self.unchanged
                )
                self._told, self.unchanged = self.unchanged, None

    def tell_changed(self) -> None:
        """Report that a batch has changed its copy, which the actor took for one that does not."""
        self.messages.send("note_state", self.origin[0], False)

    def answer(self) -> AssignedChunk | None:
        """Return the next chunk; None at the end of the lease, or where there is no host.

        Raises:
            ActorUnavailableError: The pipeline actor cannot be reached.
        """
        patience = Patience()
        while True:
            self.ask()
            if self._answer is None:
                return None
            try:
                assigned = cast("AssignedChunk | None", self._get(self._answer))
            except ACTOR_DIED:
                return None
            except ray.exceptions.ActorUnavailableError as error:
                self._answer, self.unchanged = None, self._told
                # In the end it is raised, for the pipeline actor would take an end for its own.
                patience.wait(error)
            else:
                self._answer = None
                if assigned is not None:
                    self._place = assigned.place + 1
                return assigned

    def _get(self, answer: ray.ObjectRef) -> Any:
        # The actor answers soon then: with the next chunk, or with the end of this task's lease.
        return get_soon(answer) if self.keeps_cpu else ray.get(answer)


def _make_chunk(
    chunk: Chunk,
    assigned: AssignedChunk,
    make_copy: Callable[[], Job],
    cancelled: Callable[[], bool],
    asking: _Asking,
) -> Iterator[pa.Table]:
    """Yield a chunk's blocks, and ask for the next chunk when the last one is about to come."""
    from dpex.wire.block_format import BlockWriter
    from dpex.wire.timings import Costs
    from dpex.worker.iterable import stream_chunk
    from dpex.worker.map_style import fetch_chunk

    again, binding = assigned.again, assigned.binding
    costs_before = Costs(retries=int(again))
    writer = BlockWriter(chunk.run.key, chunk.number, costs_before, origin=asking.origin)
    opened = time.monotonic()
    # The last batch comes in one block, with others or alone.
    ask = functools.partial(asking.ask, coming=1)
    if chunk.stream:
        batches = stream_chunk(chunk, make_copy, _here(), cancelled)
    else:

        def note_state(unchanged: bool) -> None:
            if binding is Binding.WATCHED:  # its next chunk depends on it
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
            # A watched worker asks when it knows whether it has to be bound.
            nearly_made=None if binding is Binding.WATCHED else ask,
            seen_unchanged=note_state,
        )
    remaining = len(chunk.batches)
    if again:  # what is delivered is not lost if its process dies once more
        long_block_s = long_batch_s = 0.0
    elif chunk.patient:
        long_block_s = long_batch_s = _PATIENT_SECONDS
    else:
        long_block_s = _BLOCK_SECONDS
        long_batch_s = 0.0 if remaining <= _SHORT_CHUNK else _LONG_BATCH_S
    for entry, costs in batches:
        writer.add(entry, costs)
        remaining -= 1
        ended = entry.outcome == "end"
        del entry
        full = writer.size_bytes >= _BLOCK_BYTES or time.monotonic() - opened >= long_block_s
        last = remaining == 0 or ended
        if last or full or costs.seconds >= long_batch_s:
            if last:
                # The answer comes while the block is stored.
                ask()
            yield writer.table()
            opened = time.monotonic()


def _here() -> str:
    return f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"


class _Interest:
    """Whether anybody still waits for a run's batches.

    The pipeline actor is asked once a run, and answers when the run is over.
    """

    def __init__(self, actor_name: str, pipeline_key: str) -> None:
        self._actor_name = actor_name
        self._pipeline_key = pipeline_key
        self._run = ""
        self._over: Future[None] | None = None
        self._next_look = 0.0

    def in_run(self, run: str) -> None:
        """Be asked about this run from now on."""
        if run != self._run:
            self._run = run
            self._over = None
            self._next_look = time.monotonic() + _CANCEL_CHECK_S

    def lost(self) -> bool:
        """Tell whether the pipeline actor has answered; never waits for it."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _CANCEL_CHECK_S
        try:
            if self._over is None:
                # A future: ray.wait would tell the node each time that this task waits.
                over = pipeline_actor(self._actor_name).over.remote(self._pipeline_key, self._run)
                self._over = cast("Future[None]", over.future())
            if not self._over.done():
                return False
            self._over.result()
        except (ValueError, *ACTOR_DIED):
            return True  # a pipeline actor that has gone wants nothing any more
        except ray.exceptions.RayError:  # not to be reached at this moment
            self._over = None
            return False
        return True


@functools.lru_cache(maxsize=4)
def _interest(actor_name: str, pipeline_key: str) -> _Interest:
    """Return the one of this process: each task would leave a question open at the actor."""
    return _Interest(actor_name, pipeline_key)
