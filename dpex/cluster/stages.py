"""Chunks as a Ray Dataset, and the stage that turns them into batches on the cluster."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import ray

from dpex.cluster.forkserver import inheritance
from dpex.cluster.memory import shared_memory
from dpex.cluster.private import private_mappings

if TYPE_CHECKING:
    import ray.data

    from dpex.fetch import Job
    from dpex.pickling import Pickled

__all__ = ["NAMESPACE", "Pipeline", "build", "chunk_table", "make_batches", "store_job"]

NAMESPACE = "dpex"
"""Ray namespace of the host actors."""

# A block is handed over when it holds this much, or when this much time went into it. A batch
# that took long is handed over at once, for the next one may never end; unless enough is under way
# before it: fewer blocks are less work for everybody.
_BLOCK_BYTES = 8 << 20
_BLOCK_SECONDS = 0.25
_LONG_BATCH_S = 0.025
_PATIENT_SECONDS = 1.0
# A chunk this short belongs to the beginning or the end, where batches are waited for.
_SHORT_CHUNK = 4
_CANCEL_CHECK_S = 0.5
_ANSWER_S = 0.02
# How often Ray starts a chunk whose worker process died.
_MAX_RETRIES = 3
# Pickled datasets that a process keeps a view of, one each for training and validation.
_MAX_JOBS = 2

# Which copy of an inherited job uses the very memory that was inherited.
_borrowers: dict[str, weakref.ref[Job]] = {}
_stored_jobs: OrderedDict[str, Pickled] = OrderedDict()


@dataclass(frozen=True)
class Pipeline:
    """What a loader's Ray Dataset is made from.

    Attributes:
        job: Reference to the driver's ``sys.path`` and the parts of the pickled ``Job``, in a
            list so that Ray does not resolve it; empty where workers inherit the job.
        job_key: Digest of the job's bytes.
        host_name: Name of the host actor, asked whether a chunk is still wanted.
        in_order: Whether blocks keep the order of the chunks.
        options: Ray options of one worker.
    """

    job: list[ray.ObjectRef]
    job_key: str
    host_name: str
    in_order: bool
    options: dict[str, Any] = field(default_factory=dict)


def chunk_table(payload: bytes) -> pa.Table:
    """Return a pickled chunk as a block of one row: ``chunk`` large_binary."""
    return pa.table({"chunk": pa.array([payload], pa.large_binary())})


def build(tables: list[pa.Table], pipeline: Pipeline) -> ray.data.Dataset:
    """Return the Dataset that makes the batches of some chunks.

    Args:
        tables: One source block per chunk; one block is one task.
        pipeline: What to do with them.
    """
    import ray.data

    options = {"num_cpus": 1, "max_retries": _MAX_RETRIES, **pipeline.options}
    dataset = ray.data.from_blocks(tables).map_batches(
        make_batches,
        batch_size=None,
        batch_format="pyarrow",
        fn_kwargs={
            "job": pipeline.job,
            "job_key": pipeline.job_key,
            "host_name": pipeline.host_name,
        },
        **options,
    )
    context = dataset.context
    context.execution_options.preserve_order = pipeline.in_order
    # Every row that a task yields becomes a block at once.
    context.target_max_block_size = 1
    # How much is under way is decided by whoever feeds the chunks, not by Ray Data.
    context.op_resource_reservation_enabled = False
    context.set_config("backpressure_policies.enabled", [])
    # A chunk whose worker died for good is missing in the output; the reader notices.
    context.max_errored_blocks = -1
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


def make_batches(
    table: pa.Table, *, job: list[ray.ObjectRef], job_key: str, host_name: str
) -> Iterator[pa.Table]:
    """Run one chunk: the function of the ``map_batches`` stage.

    Args:
        table: One row, as ``chunk_table`` made it.
        job: Reference to the pickled ``Job``, if it is in the object store.
        job_key: Digest of the job's bytes.
        host_name: Name of the host actor.

    Yields:
        Blocks of one row, as ``FrameWriter.table`` makes them.
    """
    from dpex.fetch import fetch_chunk
    from dpex.frame import FrameWriter

    payload = table.column("chunk")[0].as_buffer()
    if payload.size == 0:
        return
    chunk = pickle.loads(payload)
    interest = _Interest(host_name, chunk.run.key)
    writer = FrameWriter(chunk.run.key, chunk.number)
    opened = time.monotonic()
    batches = fetch_chunk(
        chunk,
        lambda: _read_job(job, job_key, host_name),
        _here(),
        interest.lost,
    )
    remaining = len(chunk.batches)
    if chunk.patient:
        long_block_s = long_batch_s = _PATIENT_SECONDS
    else:
        long_block_s = _BLOCK_SECONDS
        long_batch_s = 0.0 if remaining <= _SHORT_CHUNK else _LONG_BATCH_S
    for entry, seconds, cpu_seconds in batches:
        writer.add(entry, seconds, cpu_seconds)
        remaining -= 1
        full = writer.size_bytes >= _BLOCK_BYTES or time.monotonic() - opened >= long_block_s
        if remaining == 0 or full or seconds >= long_batch_s:
            yield writer.table()
            opened = time.monotonic()


def _read_job(job: list[ray.ObjectRef], job_key: str, host_name: str) -> Job:
    """Make one more copy of a job; large arrays are copied where and when they are written to."""
    from dpex.pickling import Pickled, load, own_copy

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

            copy: Job = load(inherited, own)
            _borrowers[job_key] = weakref.ref(copy)
            return copy
    pickled = _stored_jobs.get(job_key)
    if pickled is None:
        if not job:  # one more copy, in a process that inherited the first
            job = ray.get(_host(host_name).stored_job.remote(job_key))
        search_path, *content = ray.get(job[0])
        # What the script can import a worker of its host can, as with torch's spawned workers.
        sys.path.extend(p for p in search_path if p not in sys.path and Path(p).is_dir())
        pickled = _stored_jobs[job_key] = Pickled(*content)
        while len(_stored_jobs) > _MAX_JOBS:
            _stored_jobs.popitem(last=False)

    mapped = iter(private_mappings(pickled.buffers))

    def take(view: Any) -> Any:
        own = next(mapped)
        return own_copy(view) if own is None else own

    return cast("Job", load(pickled, take))


def store_job(pickled: Pickled) -> ray.ObjectRef:
    """Put a pickled job where workers of all nodes find it."""
    search_path = [str(Path(path).resolve()) for path in sys.path]
    return ray.put((search_path, pickled.head, pickled.buffers, pickled.tensor_slots))


def _here() -> str:
    return f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"


class _Interest:
    """Whether anybody still waits for a run's batches."""

    def __init__(self, host_name: str, run: str) -> None:
        self._host_name = host_name
        self._run = run
        self._answer: ray.ObjectRef | None = None
        self._next_look = time.monotonic()

    def lost(self) -> bool:
        """Tell what the host said when last asked, which is twice a second; never waits for it."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        try:
            if self._answer is None:
                self._answer = _host(self._host_name).cancelled.remote(self._run)
                self._next_look = now + _ANSWER_S
                return False
            if not ray.wait([self._answer], timeout=0)[0]:
                self._next_look = now + _ANSWER_S
                return False
            answer, self._answer = self._answer, None
            self._next_look = now + _CANCEL_CHECK_S
            return bool(ray.get(answer))
        except (ValueError, ray.exceptions.ActorDiedError):
            return True  # a host that has gone wants nothing any more
        except ray.exceptions.RayError:  # not to be reached at this moment
            self._answer = None
            return False


@functools.lru_cache(maxsize=4)
def _host(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)
