"""Chunks as a Ray Dataset, and the stage that turns them into batches on the cluster."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import ray

from dpex.cluster.local.forkserver import inheritance, show_script_arguments
from dpex.cluster.releasing import be_ready, release_later
from dpex.compat.executor import limit_to_concurrency
from dpex.compat.objects import private_mappings
from dpex.wire.memory_map import shared_memory
from dpex.worker.actor_calls import (
    HOST_DIED,
    Assignment,
    Messages,
    Patience,
    ask_host,
    get_soon,
    host,
)
from dpex.worker.binding import Binding

if TYPE_CHECKING:
    from concurrent.futures import Future

    import ray.data

    from dpex.wire.pickling import Pickled
    from dpex.worker.map_style import Chunk, Job

__all__ = [
    "FIRST_TASKS",
    "LaterStage",
    "Pipeline",
    "build",
    "hand_out_turns",
    "make_batches",
    "store_job",
    "transform_batches",
]

FIRST_TASKS = 1
"""Number of tasks that start with a pipeline. A second process would delay the first batch."""

# Ray Data's setting of what holds tasks back. If it has another name, tasks start later.
_POLICIES = "backpressure_policies.enabled"
# What Ray passes with a call, and not through the object store.
_SMALL_BYTES = 100_000
# The label that Ray gives each node.
_NODE = "ray.io/node-id"
# A block is handed over when it holds this much, or when this much time went into it. A batch
# that took long is handed over at once, for the next one may never end; unless enough is under way
# before it: fewer blocks are less work for everybody.
_BLOCK_BYTES = 8 << 20
_BLOCK_SECONDS = 0.25
_LONG_BATCH_S = 0.025
_PATIENT_SECONDS = 2.0
# A chunk this short belongs to the beginning or the end, where batches are waited for.
_SHORT_CHUNK = 4
_CANCEL_CHECK_S = 0.1
# Until a host that could not be reached is asked again when a pipeline is closed.
_ASK_AGAIN_S = 2.0
# As long as torch gives its workers to end.
_MOST_END_S = 5.0
# Ray Data lets tasks ask for the memory that their output took so far. An autoscaler starts no node
# for such a task where its configuration does not say how much memory a node has.
_NO_MEMORY = {"memory": 0}
# Which copy of an inherited job uses the very memory that was inherited.
_borrowers: dict[str, weakref.ref[Job]] = {}
_stored_jobs: dict[str, Pickled] = {}
# The pipelines that this process keeps something for, each with the jobs that it reads.
_jobs_of: dict[str, set[str]] = {}
# The pipelines that a task is at work for.
_at_work: set[str] = set()
_keeping = threading.Lock()


@dataclass(frozen=True)
class LaterStage:
    """A stage after the one that reads, as the host builds it.

    Attributes:
        job: Reference to the pickled ``StageJob``, as in ``Pipeline``.
        job_key: Digest of its bytes.
        options: Ray options of one worker.
        most_workers: How many work at once.
        capped: Whether the user has said how many.
        keeps_processes: Whether its workers keep their processes.
    """

    job: list[ray.ObjectRef]
    job_key: str
    options: dict[str, Any]
    most_workers: int
    capped: bool
    keeps_processes: bool


@dataclass(frozen=True)
class Pipeline:
    """What a loader's Ray Dataset is made from.

    Attributes:
        job: Reference to the driver's ``sys.path`` and the parts of the pickled ``Job``, in a
            list so that Ray does not resolve it; empty where workers inherit the job.
        job_key: Digest of the job's bytes.
        host_name: Name of the host actor, asked whether a chunk is still wanted.
        lane_key: The lane that its tasks belong to.
        claims_cpus: Whether its tasks share the CPUs with others'.
        num_workers: How many logical workers there are.
        binding: Whether they are bound to processes, to begin with.
        persistent: Whether they outlive an iteration.
        options: Ray options of one worker.
        later: The stages after the first one.
    """

    job: list[ray.ObjectRef]
    job_key: str
    host_name: str
    lane_key: str = ""
    claims_cpus: bool = False
    num_workers: int = 1
    binding: Binding = Binding.WATCHED
    persistent: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    later: tuple[LaterStage, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from a pipeline that does something else."""
        return (self.job_key, *(stage.job_key for stage in self.later))


def build(pipeline: Pipeline, *, first: bool, further: bool) -> ray.data.Dataset:
    """Return a Dataset whose tasks make a pipeline's batches.

    The last stage delivers the batches to the host and yields no rows: Ray Data's executor looks
    only ten times a second.

    Args:
        pipeline: The pipeline.
        first: Whether the Dataset has the pipeline's first task.
        further: Whether it has the further ones: a stage before them yields a block whenever the
            host wants a task.
    """
    import ray.data
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    first_options = {**_NO_MEMORY, "num_cpus": 1, **pipeline.options}
    scheduling_strategy = first_options.pop("scheduling_strategy", None)
    whose = {"host_name": pipeline.host_name, "lane_key": pipeline.lane_key}
    sources = [ray.data.from_blocks([_turn()])] if first else []
    if further:
        turns = ray.data.from_blocks([_turn()]).map_batches(
            hand_out_turns,
            batch_size=None,
            batch_format="pyarrow",
            fn_kwargs=whose,
            compute=TaskPoolStrategy(size=1),
            # Ray would do stages that ask for the same in one task.
            num_cpus=0 if first_options["num_cpus"] else 0.001,
            **_on_this_node(),
            **_NO_MEMORY,
        )
        sources.append(turns)
    dataset = sources[0].union(*sources[1:]) if sources[1:] else sources[0]
    dataset = dataset.map_batches(
        make_batches,
        batch_size=None,
        batch_format="pyarrow",
        fn_kwargs={
            "job": pipeline.job,
            "job_key": pipeline.job_key,
            "last": not pipeline.later,
            **whose,
        },
        **first_options,
    )
    for number, stage in enumerate(pipeline.later, 1):
        what = {"stage": number, "job": stage.job, "job_key": stage.job_key, **whose}
        what["last"] = number == len(pipeline.later)
        options = {**_NO_MEMORY, **stage.options}
        if stage.keeps_processes:
            options |= {"fn_constructor_kwargs": what}
            options["compute"] = ActorPoolStrategy(size=stage.most_workers)
        else:
            options |= {"fn_kwargs": what}
            # What asks for the same as the first stage is done by Ray in its tasks.
            if stage.capped or {**_NO_MEMORY, **stage.options} != first_options:
                options["compute"] = TaskPoolStrategy(size=stage.most_workers)
        dataset = dataset.map_batches(
            _Transforming if stage.keeps_processes else transform_batches,
            # A block has one row. With GPUs Ray wants to be told.
            batch_size=1 if stage.keeps_processes else None,
            batch_format="pyarrow",
            **options,
        )
    context = dataset.context
    # Whoever reads the batches knows their order.
    context.execution_options.preserve_order = False
    # Every row that a task yields becomes a block at once.
    context.target_max_block_size = 1
    # How much is under way is decided by whoever feeds the chunks, not by Ray Data.
    if pipeline.later:
        limit_to_concurrency(context)
    else:
        context.set_config(_POLICIES, [])
    if scheduling_strategy is not None:
        context.scheduling_strategy = context.scheduling_strategy_large_args = scheduling_strategy
    # A trainer that evaluates for an hour is not stuck.
    for name, value in (
        ("execution_no_progress_timeout_s", -1),
        ("memory_usage_poll_interval_s", None),
        ("enable_lineage_reconstruction_resource_accounting", False),
        ("enable_progress_bars", False),
        ("enable_operator_progress_bars", False),
        ("print_on_execution_start", False),
    ):
        if hasattr(context, name):
            setattr(context, name, value)
    if hasattr(context, "issue_detectors_config"):
        context.issue_detectors_config.detectors = []
    return dataset


def _on_this_node() -> dict[str, Any]:
    """Return options of a task that is to run beside the host.

    On another node it would keep an autoscaler from taking that away.
    """
    here = ray.get_runtime_context().get_node_id()
    labels = next((n.get("Labels") or {} for n in ray.nodes() if n["NodeID"] == here), {})
    return {"label_selector": {_NODE: here}} if labels.get(_NODE) == here else {}


def _turn() -> pa.Table:
    """Return the source block of a task, which asks the host what to do."""
    return pa.table({"turn": [0]})


def hand_out_turns(_: pa.Table, *, host_name: str, lane_key: str) -> Iterator[pa.Table]:
    """Yield a block for each further task that is wanted, when it is: a stage's function.

    Args:
        host_name: Name of the host actor.
        lane_key: The lane that the tasks belong to.

    Yields:
        Blocks that say nothing.
    """
    started = FIRST_TASKS
    with contextlib.suppress(ValueError, *HOST_DIED):
        while True:
            tasks = ask_host(host_name, "more_tasks", lane_key, started)
            if tasks is None:
                return
            for _ in range(tasks):
                yield _turn()
            started += tasks


def make_batches(
    _: pa.Table,
    *,
    job: list[ray.ObjectRef],
    job_key: str,
    host_name: str,
    lane_key: str,
    last: bool,
) -> Iterator[pa.Table]:
    """Make one chunk after the other: the function of the ``map_batches`` stage.

    Args:
        job: Reference to the pickled ``Job``, if it is in the object store.
        job_key: Digest of the job's bytes.
        host_name: Name of the host actor.
        lane_key: The lane that has the chunks.
        last: Whether there is no later stage.

    Yields:
        Blocks of one row, as ``FrameWriter.table`` makes them, if there is a later stage.
    """
    from dpex.wire.block_format import FrameWriter

    show_script_arguments()
    asking = _Asking(host_name, lane_key)
    interest = _interest(host_name, lane_key)
    read_job = functools.partial(_read_job, job, job_key, host_name)
    _release_when_closed(host_name, lane_key, job_key)
    while (assignment := asking.answer()) is not None:
        asking.messages.begin_chunk()
        chunk = pickle.loads(assignment.payload)
        interest.in_run(chunk.run.key)
        # A bound worker that is far enough ahead waits for the others, which may need its CPU.
        asking.keeps_cpu = assignment.binding is not Binding.ALWAYS
        for _ in range(assignment.skipped_blocks):
            # Ray has got these from an earlier attempt, and drops what comes in their place.
            asking.made += 1
            if not last:
                yield FrameWriter("", 0).table()
        with _working(lane_key):
            for table in _make_chunk(chunk, assignment, read_job, interest.lost, asking):
                asking.made += 1
                if last:
                    deliver(table, asking.origin, asking.messages)
                else:
                    yield table
                del table  # the next batch is made in its memory
    asking.messages.confirm()


def deliver(table: pa.Table, origin: tuple[str, str], messages: Messages) -> None:
    """Put a block into the object store, unless it is small, and send the host a reference to it.

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
    host_name: str,
    lane_key: str,
    last: bool,
    kept: bool = False,
) -> Iterator[pa.Table]:
    """Do a later stage's part of one block: the function of its ``map_batches``.

    Args:
        table: A block, as the stage before yielded it.
        stage: The stage's number.
        job: Reference to the pickled ``StageJob``.
        job_key: Digest of its bytes.
        host_name: Name of the host actor.
        lane_key: The lane that the block belongs to.
        last: Whether there is no later stage.
        kept: Whether this process serves all iterations.

    Yields:
        The block with the batches in it transformed, if there is a later stage.
    """
    from dpex.wire.block_format import FrameWriter, read_frame
    from dpex.worker.later_stage import apply_stage

    show_script_arguments()
    frame = read_frame(table)
    if not frame.run:  # in place of a block that had arrived
        return
    interest = _interest(host_name, lane_key)
    interest.in_run(frame.run)
    # A task has several blocks where Ray does two stages in it. One of a run that was given up may
    # have no batches.
    first_batch = frame.entries[0].batch if frame.entries else -1
    block = (ray.get_runtime_context().get_task_id(), frame.chunk, first_batch)
    if not ask_host(host_name, "may_begin", lane_key, block, frame.origin):
        return
    read_job = functools.partial(_read_job, job, job_key, host_name)
    _release_when_closed(host_name, lane_key, job_key)
    writer = FrameWriter(frame.run, frame.chunk, frame.costs, origin=frame.origin)
    with _working(lane_key):
        batches = apply_stage(stage, frame.entries, read_job, _here(), interest.lost, kept=kept)
        for entry, costs in batches:
            writer.add(entry, costs)
    if last:
        messages = Messages(host_name, lane_key)
        deliver(writer.table(), frame.origin, messages)
        messages.confirm()
    else:
        yield writer.table()


class _Transforming:
    """A worker of a later stage that keeps its process; see ``transform_batches``."""

    def __init__(self, **what: Any) -> None:
        self._what = what

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        yield from transform_batches(table, **self._what, kept=True)


class _Asking:
    """A task's questions to the host: what to do next.

    Attributes:
        made: How many blocks the task has made.
        origin: The task and its process, as the host tells them from others.
        keeps_cpu: Whether it keeps its CPU while it waits for an answer.
        unchanged: Whether the last batch has left its copy as it was; None if not looked at.
        messages: What the task tells the host besides.
    """

    def __init__(self, host_name: str, lane_key: str) -> None:
        self._host_name = host_name
        self._lane_key = lane_key
        self.origin = (ray.get_runtime_context().get_task_id(), uuid.uuid4().hex)
        self._place = 0
        self.made = 0
        self.keeps_cpu = True
        self.unchanged: bool | None = None
        self.messages = Messages(host_name, lane_key)
        self._told: bool | None = None
        self._answer: ray.ObjectRef | None = None

    def ask(self, coming: int = 0) -> None:
        """Ask, if that has not been done; ``answer`` has what comes of it.

        Args:
            coming: How many blocks are still to be made before what is asked for.

        Raises:
            ActorUnavailableError: The host cannot be reached.
        """
        if self._answer is None:
            # If this process dies now, the host has these two chunks made again, and no others.
            self.messages.confirm_earlier()
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                self._answer = host(self._host_name).next_chunk.remote(
                    self._lane_key, self.origin, self._place, self.made + coming, self.unchanged
                )
                self._told, self.unchanged = self.unchanged, None

    def tell_changed(self) -> None:
        """Report that a batch has changed its copy, which the host took for one that does not."""
        self.messages.send("note_state", self.origin[0], False)

    def answer(self) -> Assignment | None:
        """Return the next chunk; None at the end of the turn, or where there is no host.

        Raises:
            ActorUnavailableError: The host cannot be reached.
        """
        patience = Patience()
        while True:
            self.ask()
            if self._answer is None:
                return None
            try:
                assignment = cast("Assignment | None", self._get(self._answer))
            except HOST_DIED:
                return None
            except ray.exceptions.ActorUnavailableError as error:
                self._answer, self.unchanged = None, self._told
                # In the end it is raised, for the host would take an end for its own.
                patience.wait(error)
            else:
                self._answer = None
                if assignment is not None:
                    self._place = assignment.place + 1
                return assignment

    def _get(self, answer: ray.ObjectRef) -> Any:
        # The host answers soon then: with the next chunk, or with the end of this task's turn.
        return get_soon(answer) if self.keeps_cpu else ray.get(answer)


def _make_chunk(
    chunk: Chunk,
    assignment: Assignment,
    read_job: Callable[[], Job],
    cancelled: Callable[[], bool],
    asking: _Asking,
) -> Iterator[pa.Table]:
    """Yield a chunk's blocks, and ask for the next chunk when the last one is about to come."""
    from dpex.wire.block_format import FrameWriter
    from dpex.wire.timings import Costs
    from dpex.worker.iterable import stream_chunk
    from dpex.worker.map_style import fetch_chunk

    again, binding = assignment.again, assignment.binding
    costs_before = Costs(retries=int(again))
    writer = FrameWriter(chunk.run.key, chunk.number, costs_before, origin=asking.origin)
    opened = time.monotonic()
    # The last batch comes in one block, with others or alone.
    ask = functools.partial(asking.ask, coming=1)
    if chunk.stream:
        batches = stream_chunk(chunk, read_job, _here(), cancelled)
    else:

        def note_state(unchanged: bool) -> None:
            if binding is Binding.WATCHED:  # its next chunk depends on it
                asking.unchanged = unchanged
            elif not unchanged:
                asking.tell_changed()

        batches = fetch_chunk(
            chunk,
            read_job,
            _here(),
            cancelled,
            binding=binding,
            restarted=assignment.restarted,
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


def _read_job(job: list[ray.ObjectRef], job_key: str, host_name: str) -> Any:
    """Make one more copy of a job; large arrays are copied where and when they are written to."""
    from dpex.wire.pickling import Pickled, load, own_copy

    inherited = inheritance.get(job_key)
    if inherited is not None:
        borrower = _borrowers.get(job_key)
        # Once the last copy has gone its memory serves again, if it was left as it is.
        if borrower is None or (borrower() is None and inherited.digest == job_key):
            shared = shared_memory()

            def own(buffer: Any) -> Any:
                # Memory that the trainer shares on purpose, with a file or with other processes,
                # is not copied by writing to it.
                return own_copy(buffer) if buffer.flags.writeable and shared(buffer) else buffer

            copy = _with_size(load(inherited, own), inherited)
            _borrowers[job_key] = weakref.ref(copy)
            return copy
    pickled = _stored_jobs.get(job_key)
    if pickled is None:
        if not job:  # one more copy, in a process that inherited the first
            job = ask_host(host_name, "stored_job", job_key)
        search_path, *content = ray.get(job[0])
        # What the script can import a worker of its host can, as with torch's spawned workers.
        sys.path.extend(p for p in search_path if p not in sys.path and Path(p).is_dir())
        pickled = _stored_jobs[job_key] = Pickled(*content)
    buffers = pickled.buffers
    mapped = dict(zip(map(id, buffers), private_mappings(buffers), strict=True))

    def take(view: Any) -> Any:
        own = mapped[id(view)]
        return own_copy(view) if own is None else own

    return _with_size(load(pickled, take), pickled)


def _with_size(job: Any, pickled: Pickled) -> Any:
    """Tell a ``Job`` how large its pickle was."""
    if hasattr(job, "pickled_bytes"):
        return replace(job, pickled_bytes=(len(pickled.head), pickled.size_bytes))
    return job


def store_job(pickled: Pickled) -> ray.ObjectRef:
    """Put a pickled job where workers of all nodes find it."""
    search_path = [str(Path(path).resolve()) for path in sys.path]
    content = (pickled.head, pickled.buffers, *pickled.slots, pickled.object_refs)
    return ray.put((search_path, *content))


def _release_when_closed(host_name: str, lane_key: str, job_key: str) -> None:
    """Drop what this process keeps for a pipeline as soon as the host has closed it, or has died.

    The process may have no task then. So a call waits at the host, one for each pipeline.
    """
    with _keeping:
        known = lane_key in _jobs_of
        _jobs_of.setdefault(lane_key, set()).add(job_key)
    if not known:
        be_ready()
        _ask_for_the_end(host_name, lane_key)


def _ask_for_the_end(host_name: str, lane_key: str) -> None:
    def answered(closed: Future[None]) -> None:
        error = closed.exception()
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, HOST_DIED):
            # The host cannot be reached at this moment.
            _later(_ASK_AGAIN_S, _ask_for_the_end, host_name, lane_key)
        else:
            release_later(functools.partial(_release, lane_key))
            if error is None:
                _later(_MOST_END_S, _end_work, lane_key)

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # there is no host any more
        closed = host(host_name).closed.remote(lane_key).future()
        closed.add_done_callback(answered)
        return
    release_later(functools.partial(_release, lane_key))


def _later(seconds: float, function: Callable[..., None], *args: Any) -> None:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


def _end_work(lane_key: str) -> None:
    """End this process if it is still at work for a pipeline that was closed.

    torch terminates its workers then. Ray starts the task again, and that one ends at once.
    """
    with _keeping:
        at_work = lane_key in _at_work
    if at_work:
        os._exit(1)


def _release(lane_key: str) -> None:
    """Drop what this process keeps for a pipeline; a task at work for it does that at its end."""
    from dpex.wire.pickling import give_back_memory
    from dpex.worker.dataset_copies import release_copies

    with _keeping:
        _jobs_of.pop(lane_key, None)
        if lane_key in _at_work:
            return
        for job_key in set(_stored_jobs).difference(*_jobs_of.values()):
            del _stored_jobs[job_key]
    release_copies(lane_key)
    gc.collect()
    with _keeping:
        if not (_jobs_of or _at_work):
            # Every object that is left belongs to a module. Later collections skip all of them.
            gc.freeze()
    give_back_memory()


@contextlib.contextmanager
def _working(lane_key: str) -> Iterator[None]:
    """Use what this process keeps for a pipeline: it is not released inside the block."""
    from dpex.worker.dataset_copies import kept_for

    with _keeping:
        outer = lane_key in _at_work
        _at_work.add(lane_key)
    try:
        with kept_for(lane_key):
            yield
    finally:
        with _keeping:
            if not outer:
                _at_work.discard(lane_key)
            # The host has closed the pipeline since, or before the task began its chunk.
            released = not outer and lane_key not in _jobs_of
        if released:
            _release(lane_key)


def _here() -> str:
    return f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"


class _Interest:
    """Whether anybody still waits for a run's batches.

    The host is asked once a run, and answers when the run is over.
    """

    def __init__(self, host_name: str, lane_key: str) -> None:
        self._host_name = host_name
        self._lane_key = lane_key
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
        """Tell whether the host has answered; never waits for it."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _CANCEL_CHECK_S
        try:
            if self._over is None:
                # A future: ray.wait would tell the node each time that this task waits.
                over = host(self._host_name).over.remote(self._lane_key, self._run)
                self._over = cast("Future[None]", over.future())
            if not self._over.done():
                return False
            self._over.result()
        except (ValueError, *HOST_DIED):
            return True  # a host that has gone wants nothing any more
        except ray.exceptions.RayError:  # not to be reached at this moment
            self._over = None
            return False
        return True


@functools.lru_cache(maxsize=4)
def _interest(host_name: str, lane_key: str) -> _Interest:
    """Return the one of this process: each task would leave a question open at the host."""
    return _Interest(host_name, lane_key)
