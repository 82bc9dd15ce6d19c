"""A worker process: it makes the batches of one logical worker."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from dpex import tuning
from dpex.compat.late_calls import start_no_ray
from dpex.errors import SerializationError
from dpex.protocol.chunks import ALL_ITERATIONS, AssignedChunk, Chunk, Entry
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
from dpex.wire.pickling import dump_in_band, share_script
from dpex.wire.segments import OWN_SEGMENTS
from dpex.wire.timings import Costs
from dpex.worker.chunk_work import ChunkWork
from dpex.worker.dataset_copies import kept_for
from dpex.worker.later_stage import StageJob, apply_stage
from dpex.worker.map_style import Job

__all__ = ["END", "Report", "WorkerStart", "run_worker"]

END = ALL_ITERATIONS
"""Message to a worker process: it gets no more chunks, and ends."""

# Stands for the pipeline where a worker process keeps copies and segments for one.
_LOADER = "processes"


class Report(enum.Enum):
    """A message of a worker process that has no batches. The others are ``Block``."""

    STARTED = "the process runs"
    ASKS = "the process requests its next chunk, and may still make the last samples of this one"
    ENDED = "the process has made its chunk, or nothing waits for it any more"


@dataclass(frozen=True)
class WorkerStart:
    """What the worker processes of a loader start with.

    Attributes:
        job: The job.
        later: The jobs of the later stages.
        training: Process id of the training process.
        stream: Whether the dataset is an ``IterableDataset``.
        keeps_state: Whether the logical workers are known to keep state.
    """

    job: Job
    later: Sequence[StageJob]
    training: int
    stream: bool
    keeps_state: bool = False


def run_worker(connection: Connection, start: WorkerStart) -> None:
    """Make the chunks that the training process sends, until it sends ``END`` or has ended.

    Args:
        connection: Connection to the training process. It gets ``Report`` and ``Block`` objects,
            and sends chunks, or the number of the iteration that has ended. With a chunk comes the
            machine of the training process, if it reads segments; else an empty string.
        start: What the process starts with.
    """
    start_no_ray()
    share_script()
    # The training process has been interrupted too, or has ended.
    with contextlib.suppress(KeyboardInterrupt, ConnectionError, ProcessLookupError):
        _make_chunks(_Training(connection, start.training), start)


def _make_chunks(training: _Training, start: WorkerStart) -> None:
    loop = WorkerLoop(serves_one=True)
    where = f"node {os.uname().nodename}, pid {os.getpid()}"
    work = ChunkWork(
        loop, where, _Copies(start), training.ask, may_read_again=not start.keeps_state
    )
    steps = loop.run()
    answer: Any = None
    training.send(Report.STARTED)
    with kept_for(_LOADER):
        while (step := next_step(steps, answer)) is not None:
            answer = None
            match step:
                case NextBatch():
                    answer = work.next_batch()
                case Send():
                    training.send(work.writer.block())
                    answer = time.monotonic()
                case Ask():
                    training.ask(step)
                case NextChunk():
                    answer = training.next_chunk()
                case Open():
                    chunk: Chunk = pickle.loads(step.assigned.payload)
                    cancelled = functools.partial(training.is_over, step.assigned.iteration)
                    if cancelled():
                        training.send(Report.ENDED)
                        continue
                    segments = OWN_SEGMENTS.serve(_LOADER, chunk.run.key, training.reader)
                    batches = work.batches(chunk, step.assigned, cancelled)
                    if start.later:
                        batches = _staged(batches, start.later, where, cancelled)
                    work.open(chunk, step.assigned, batches, segments)
                    answer = chunk, time.monotonic()
                case EndChunk():
                    work.close()
                    training.send(Report.ENDED)


def _staged(
    batches: Iterator[tuple[Entry, Costs]],
    later: Sequence[StageJob],
    where: str,
    cancelled: Callable[[], bool],
) -> Iterator[tuple[Entry, Costs]]:
    """Apply the later stages to each batch, in this process."""
    for entry, costs in batches:
        for number, job in enumerate(later, 1):
            read_job = functools.partial(_same, job)
            applied = next(apply_stage(number, [entry], read_job, where, cancelled), None)
            if applied is None:  # nothing waits for the batch any more
                return
            entry, more = applied
            costs.add(more)
        yield entry, costs


def _same(job: StageJob) -> StageJob:
    return job


class _Copies:
    """The copies of the job: the first is the object that the process has started with.

    A stream that is read again from its beginning needs another copy.
    """

    def __init__(self, start: WorkerStart) -> None:
        self._job: Job | None = start.job
        self._stream = start.stream
        self._pickled: bytes | SerializationError | None = None

    def __call__(self) -> Job:
        """Return a copy that nothing else uses.

        Raises:
            SerializationError: A second copy is needed, and the job cannot be pickled.
        """
        if self._job is not None:
            job, self._job = self._job, None
            if self._stream:
                try:
                    self._pickled = dump_in_band(job, "loader")
                except SerializationError as error:
                    self._pickled = error
            return job
        assert self._pickled is not None
        if isinstance(self._pickled, SerializationError):
            raise self._pickled
        again: Job = pickle.loads(self._pickled)
        return again


class _Training:
    """The training process, as a worker process reaches it.

    Attributes:
        reader: The machine of the training process when it sent the present chunk, if it reads
            segments; else empty.
    """

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection = connection
        self._awaited: list[Any] = [connection, os.pidfd_open(pid)]
        self._chunks: deque[tuple[AssignedChunk, str]] = deque()
        self.reader = ""
        # Number of the last iteration that has ended.
        self._ended = 0
        self._look_at = 0.0
        self._first = True

    def send(self, message: Any) -> None:
        """Send a report or a block."""
        self._connection.send(message)

    def ask(self, _: Ask) -> None:
        """Request the next chunk; the start of the process is the first request."""
        if not self._first:
            self.send(Report.ASKS)
        self._first = False

    def next_chunk(self) -> AssignedChunk | None:
        """Wait for the next chunk and return it, or None if no chunk follows."""
        while not self._chunks and self._ended < END:
            if self._connection not in wait(self._awaited):
                return None  # the training process has ended
            self._take()
        if self._ended >= END:
            return None
        assigned, self.reader = self._chunks.popleft()
        return assigned

    def _take(self) -> None:
        try:
            message: tuple[AssignedChunk, str] | int = self._connection.recv()
        except EOFError:
            message = END
        if isinstance(message, int):
            self._ended = message
        else:
            self._chunks.append(message)

    def is_over(self, iteration: int) -> bool:
        """Return whether an iteration has ended; look now and then."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + tuning.LOOK_S
            while self._ended < END and self._connection.poll():
                self._take()
        return iteration <= self._ended
