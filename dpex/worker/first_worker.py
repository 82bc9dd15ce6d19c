"""A first worker: a fork of the training process that makes batches while the local Ray starts.

It makes chunks as the tasks of a pipeline do (``fetch_chunk``), and its process has no Ray.
"""

from __future__ import annotations

import enum
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Chunk
from dpex.wire.block_format import BlockWriter
from dpex.wire.segments import OWN_SEGMENTS
from dpex.worker.dataset_copies import kept_for
from dpex.worker.inherited_job import inherited_job
from dpex.worker.logical_worker import Cancelled
from dpex.worker.map_style import Job, fetch_chunk

__all__ = ["CANCEL", "ChunkMessage", "END", "Made", "make_chunks"]

CANCEL = b""
"""Message to a first worker: the chunk that it has is no longer wanted."""

END = b"end"
"""Message to a first worker: it gets no more chunks."""

# Stands for the pipeline where a worker process keeps copies and segments for one.
_PIPELINE = "first workers"


@dataclass(frozen=True)
class ChunkMessage:
    """A chunk for a first worker.

    Attributes:
        payload: The pickled chunk.
        binding: Which processes may make batches of its logical worker.
        reader: The machine of the training process, if it reads segments; else empty.
        live_runs: Keys of the runs that have not ended.
    """

    payload: bytes
    binding: Binding
    reader: str
    live_runs: frozenset[str]


class Made(enum.Enum):
    """The report of a first worker that it has done a chunk, or that the chunk was cancelled."""

    UNCOMPARED = "no batch was compared"
    UNCHANGED = "the batches left the dataset copy unchanged"
    CHANGED = "a batch changed the dataset copy, whose logical worker is released"
    UNFINISHED = "the rest needs a process that keeps state, or a new dataset copy"


def make_chunks(connection: Connection, job_key: str) -> None:
    """Make the chunks that the training process sends, until it sends ``END`` or has ended.

    Args:
        connection: Connection to the training process. It gets this process's id, then the
            ``Block`` of each batch, and ``Made`` after each chunk. If a batch changes the dataset
            copy of a watched logical worker, or loads Ray, the chunk ends before that batch.
        job_key: Digest of the inherited job.
    """
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a sample that calls Ray starts another Ray
    connection.send(os.getpid())
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        if message == END:
            return
        if message != CANCEL:  # else it came after the end of the chunk
            with kept_for(_PIPELINE):
                _make_chunk(connection, pickle.loads(message), job_key)


def _make_chunk(connection: Connection, message: ChunkMessage, job_key: str) -> None:
    chunk: Chunk = pickle.loads(message.payload)
    segments = OWN_SEGMENTS.serve(
        _PIPELINE, chunk.run.key, message.reader, live_runs=message.live_runs
    )
    writer = BlockWriter(chunk.run.key, chunk.number, segments=segments)
    looks: list[bool] = []
    unfinished = False

    def read_job() -> Job:
        nonlocal unfinished
        job: Job | None = inherited_job(job_key)
        if job is None:  # a changed copy uses the inherited memory
            unfinished = True
            raise Cancelled
        return job

    batches = fetch_chunk(
        chunk,
        read_job,
        f"pid {os.getpid()}",
        _cancelled(connection),
        binding=message.binding,
        seen_unchanged=looks.append,
    )
    for entry, costs in batches:
        changed = message.binding is Binding.WATCHED and bool(looks) and not looks[-1]
        if changed or "ray" in sys.modules:  # here Ray has no answer for a sample that asks it
            unfinished = True
            break
        writer.add(entry, costs)
        del entry
        connection.send(writer.block())
    report = Made.UNCOMPARED if not looks else Made.UNCHANGED if all(looks) else Made.CHANGED
    connection.send(Made.UNFINISHED if unfinished else report)


def _cancelled(connection: Connection) -> Callable[[], bool]:
    """Return a function that says whether the chunk is no longer wanted, and looks now and then."""
    next_look = time.monotonic() + tuning.CANCEL_CHECK_S

    def cancelled() -> bool:
        nonlocal next_look
        if time.monotonic() < next_look:
            return False
        next_look = time.monotonic() + tuning.CANCEL_CHECK_S
        return connection.poll()

    return cancelled
