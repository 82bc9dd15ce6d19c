"""The first workers of a loader, as the training process sees them.

They make batches from ``iter()`` on, while the local Ray starts. They keep no state of logical
workers: if a batch changes its dataset copy, the pipeline makes that batch in their place.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.cluster.releasing import be_ready, release_later
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import PickledChunk
from dpex.protocol.loss_causes import Loss, LossCause, lost_block
from dpex.wire.arrivals import Arrivals, Decoder
from dpex.wire.block_format import Block
from dpex.wire.buffer_pool import MemoryPool
from dpex.wire.segments import readable_segments
from dpex.worker.first_worker import CANCEL, END, ChunkMessage, Made
from dpex.worker.map_style import pickled_chunks

if TYPE_CHECKING:
    from dpex.pipeline.remote_run import RemoteRun
    from dpex.protocol.chunks import Chunk

__all__ = ["ChunkQueue", "FirstRun", "FirstWorkers"]

logger = logging.getLogger("dpex")


@dataclass(frozen=True)
class _Work:
    """The chunk that a first worker makes, and its queue.

    Attributes:
        queue: The queue that the chunk comes from.
        chunk: The chunk.
        watched: Whether its logical worker is watched, see ``Binding``.
    """

    queue: ChunkQueue
    chunk: PickledChunk
    watched: bool


class _FirstWorker:
    """A first worker.

    Attributes:
        connection: The connection to its process.
        usable: Whether its process exists, and its connection works.
        lost: Whether its connection is closed at the other end. Its process may still run.
        work: The chunk that its process makes; None if it is idle.
        cancelled_at: When the run of its chunk ended; infinite before.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.usable = False
        self.lost = False
        self.work: _Work | None = None
        self.cancelled_at = math.inf
        self._process: int | None = None

    @property
    def awaited(self) -> Connection | int:
        """The connection; once that is lost, the process, whose end is still awaited."""
        return self._process if self.lost and self._process is not None else self.connection

    def know_process(self, pid: int) -> None:
        """Open its process, so that no later process with the same id is taken for it."""
        self.usable = True
        with contextlib.suppress(OSError):  # it has ended already
            self._process = os.pidfd_open(pid)

    def send(self, message: bytes) -> None:
        """Send a message; if its process has ended, the next read reports that."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def lose(self) -> None:
        """Record that the connection is lost, and kill its process."""
        self.usable, self.lost = False, True
        self.kill()

    def kill(self) -> None:
        """Kill its process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None


_live: weakref.WeakSet[FirstWorkers] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    """Kill the first workers that are left, so that no thread copies their batches any more."""
    for workers in list(_live):
        workers.kill()


os.register_at_fork(after_in_child=_live.clear)


class FirstWorkers:
    """The first workers of a loader, and a thread that reads what they make.

    Args:
        connections: Connections to their processes.

    Attributes:
        lock: Guards the first workers and the queues of their chunks.
        start_now: Set if Ray must start at once.
        ending: Set when they get no more chunks.
        queues: The chunks of each run that has not ended.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.lock = threading.RLock()
        # Notified when a first worker has become idle.
        self._idle = threading.Condition(self.lock)
        self._workers = [_FirstWorker(connection) for connection in connections]
        self.start_now = threading.Event()
        self.ending = threading.Event()
        self.queues: list[ChunkQueue] = []
        be_ready()
        self._reader = BackgroundThread(target=self._receive, name="dpex-first", daemon=True)
        if self._workers:
            self._reader.start()
            _live.add(self)
        else:
            self.end()

    @property
    def at_work(self) -> int:
        """Number of first workers that make a chunk."""
        return sum(worker.work is not None for worker in list(self._workers))

    def running(self, queue: ChunkQueue | None) -> set[int]:
        """Return the logical workers whose samples are being made, of a queue and of ended runs.

        The sample of a chunk whose run has ended may take as long as it likes.
        """
        works = [worker.work for worker in self._workers if worker.work is not None]
        return {w.chunk.worker for w in works if w.queue is queue or w.queue.ended}

    def wait_for_ended_runs(self) -> None:
        """Wait until no sample of a run that has ended is being made; kill those that hang."""
        with self._idle:
            self._idle.wait_for(lambda: not self.running(None))

    def give(self, work: _Work) -> bool:
        """Give a chunk to an idle first worker, and return whether there is one."""
        idle = next((w for w in self._workers if w.usable and w.work is None), None)
        if idle is None or self.at_work >= work.queue.parallel or self.ending.is_set():
            return False
        idle.work = work
        binding = Binding.WATCHED if work.watched else Binding.RELEASED
        live_runs = frozenset(queue.run for queue in self.queues)
        given = ChunkMessage(work.chunk.payload, binding, readable_segments(), live_runs)
        idle.send(pickle.dumps(given))
        return True

    def cancel(self, queue: ChunkQueue) -> None:
        """Stop the work on the chunks of a queue."""
        with self.lock:
            for worker in self._workers:
                if worker.work is not None and worker.work.queue is queue:
                    worker.cancelled_at = time.monotonic()
                    worker.send(CANCEL)

    def close(self) -> None:
        """End all runs that have not ended, and the first workers."""
        with self.lock:
            for queue in list(self.queues):
                queue.end()
            self.end()

    def kill(self) -> None:
        """Kill the first workers, and wait for the thread that reads what they make."""
        with self.lock:
            self.end()  # also those that are not forked yet
            for worker in self._workers:
                worker.kill()
        self._reader.join(tuning.EXIT_S)

    def wake(self) -> None:
        """End the arrivals of each run that no pipeline will continue."""
        with self.lock:
            for queue in self.queues:
                if queue.remote is None:
                    queue.arrivals.end()

    def end(self) -> None:
        """Give no more chunks, and end each first worker as soon as it is idle."""
        with self.lock:
            self.ending.set()
            self.start_now.set()
            for worker in self._workers:
                if worker.work is None:
                    worker.send(END)

    def _receive(self) -> None:
        while workers := {worker.awaited: worker for worker in self._workers}:
            for ready in wait(list(workers), tuning.END_S):
                worker = workers[cast("Connection | int", ready)]
                if worker.lost:
                    self._remove(worker)
                    continue
                try:
                    message = worker.connection.recv()
                except Exception as error:  # most often EOFError: the process has ended
                    logger.debug("a first worker has ended: %r", error)
                    self._lose(worker)
                else:
                    self._take(worker, message)
            for worker in workers.values():
                # Nothing waits for its sample any more, and the sample does not end.
                if time.monotonic() - worker.cancelled_at > tuning.END_S:
                    worker.kill()

    def _take(self, worker: _FirstWorker, message: int | Block | Made) -> None:
        if isinstance(message, int):
            with self.lock:
                worker.know_process(message)
                self._hand_out()
            return
        work = worker.work
        assert work is not None
        if isinstance(message, Block):
            work.queue.take(message)
            return
        with self.lock:
            worker.work, worker.cancelled_at = None, math.inf
            self._idle.notify_all()
            work.queue.made(work, message)
            self._hand_out()
            if self.ending.is_set():
                worker.send(END)

    def _lose(self, worker: _FirstWorker) -> None:
        """Kill a first worker whose connection is lost. It counts until its process has ended."""
        with self.lock:
            worker.lose()
            if isinstance(worker.awaited, Connection):
                self._remove(worker)  # its process is known to have ended

    def _remove(self, worker: _FirstWorker) -> None:
        with self.lock:
            self._workers.remove(worker)
            worker.close()
            self._idle.notify_all()
            if worker.work is not None:
                worker.work.queue.lose(worker.work)
            if not self._workers:
                self.end()
            self._hand_out()

    def _hand_out(self) -> None:
        for queue in self.queues:
            queue.hand_out()


class ChunkQueue:
    """The chunks of one run: first workers make them, and the pipeline once it has its tasks.

    Invariant: the chunks of a logical worker are made one after another, also those of a run that
    has ended. So they never run in two processes at once, and if a batch of a watched logical
    worker changes its dataset copy, the pipeline gets its chunk, and then the later ones.

    Args:
        run: Key of the run.
        workers: The first workers.
        num_workers: Number of logical workers.
        pin_device: As for ``Decoder``.

    Attributes:
        run: Key of the run.
        arrivals: The blocks and losses that have arrived.
        remote: The run on the pipeline; None until the pipeline has its tasks.
        ended: Whether the run is cancelled.
        failure: The error with which the pipeline has refused the run or its chunks, if it has.
    """

    def __init__(
        self, run: str, workers: FirstWorkers, num_workers: int, pin_device: int | None
    ) -> None:
        self.run = run
        self.arrivals = Arrivals()
        self.remote: RemoteRun | None = None
        self.ended = False
        self.failure: Exception | None = None
        self._workers = workers
        self._num_workers = num_workers
        self._decoder = Decoder(run, MemoryPool(), pin_device)
        self._waiting: list[PickledChunk] = []
        self._limits: dict[str, Any] = {}
        # The logical workers whose first batches have left their dataset copies unchanged.
        self._unchanged: set[int] = set()
        with workers.lock:
            workers.queues.append(self)

    def feed(self, chunks: Iterable[PickledChunk], limits: dict[str, Any]) -> None:
        """Append chunks.

        Args:
            chunks: The chunks.
            limits: The other arguments of ``RemoteRun.send``, for all chunks from now on.
        """
        with self._workers.lock:
            self._limits = limits
            self._waiting.extend(chunks)
            self.hand_out()

    @property
    def parallel(self) -> int:
        """How many processes are to make chunks at once: one per core unless samples clearly wait.

        While Ray starts, samples that compute wait for cores too. With more processes, they would
        wait longer, and seem to need still more processes.
        """
        parallel: int = self._limits.get("parallel", 1)
        cores: int = self._limits.get("starting", 1)
        return parallel if parallel >= tuning.CLEARLY_MORE * cores else min(parallel, cores)

    @property
    def tasks_needed(self) -> int:
        """How many tasks the pipeline needs before it gets the chunks."""
        with self._workers.lock:
            return 1 if self.ended or self._only_pipeline else self.parallel

    @property
    def _only_pipeline(self) -> bool:
        """Whether first workers make no more chunks, or must not make a chunk that waits."""
        return self._workers.ending.is_set() or any(chunk.alone for chunk in self._waiting)

    @property
    def waits_for_ray(self) -> bool:
        """Whether a chunk waits for the pipeline, and no first worker can make it."""
        with self._workers.lock:
            return self.remote is None and bool(self._waiting) and self._only_pipeline

    @property
    def first_workers_at_work(self) -> int:
        """Number of first workers that make a chunk."""
        return self._workers.at_work

    def attach(self, remote: RemoteRun) -> bool:
        """Send the chunks from now on to the pipeline; return False if the run has ended."""
        with self._workers.lock:
            if not self.ended:
                self.remote = remote
                # They would not know which logical workers the pipeline runs for an ended run.
                self._workers.end()
                self.hand_out()
            return not self.ended

    def hand_out(self) -> None:
        """Give each chunk that need not wait to an idle first worker, or to the pipeline."""
        held = self._workers.running(self)
        waiting, self._waiting = self._waiting, []
        for_pipeline = []
        for chunk in waiting:
            worker = chunk.worker
            if worker in held:
                self._waiting.append(chunk)
            elif self.remote is not None:
                for_pipeline.append(chunk)
            else:
                watched = len(self._unchanged) < self._num_workers
                work = _Work(self, chunk, watched)
                given = not chunk.alone and self._workers.give(work)
                if not given:
                    self._waiting.append(chunk)
                held.add(worker)
        if for_pipeline:
            self._send(for_pipeline)

    def _send(self, chunks: list[PickledChunk]) -> None:
        assert self.remote is not None
        try:
            self.remote.send(chunks, **self._limits)
        except Exception as error:  # for example, Ray was shut down
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Record that nothing more arrives."""
        self.failure = error.with_traceback(None)
        self.arrivals.end()

    def take(self, block: Block) -> None:
        """Decode a block of a first worker for the training loop."""
        if self.ended:
            return
        try:
            news = self._decoder(block)
        except Exception as error:  # SegmentsUnreadableError: from now on there are no segments
            logger.debug("a block of a first worker is lost", exc_info=True)
            news = lost_block(str(error), block.part)
        self.arrivals.add(news)

    def made(self, work: _Work, report: Made) -> None:
        """Record the end of a first worker's chunk."""
        if report in (Made.CHANGED, Made.UNFINISHED):
            self._workers.end()  # the pipeline has processes that keep state
        if self.ended:
            return
        if report is Made.UNFINISHED:
            self._waiting.insert(0, work.chunk)
            return
        if report is Made.UNCHANGED:
            self._unchanged.add(work.chunk.worker)

    def lose(self, work: _Work) -> None:
        """Record that the process of a first worker has ended over a chunk."""
        if not self.ended:
            text = "a worker process died before Ray started"
            self.arrivals.add(Loss(LossCause.TASK, text, work.chunk.part))

    def end(self) -> None:
        """Cancel the run."""
        with self._workers.lock:
            if self.ended:
                return
            self.ended = True
            self._workers.queues.remove(self)
            self._waiting.clear()
            self._workers.cancel(self)
            self.arrivals.end()
            if self.remote is not None:
                self.remote.end()
        self._decoder.close()


class FirstRun:
    """One iteration that begins on first workers; see ``RemoteRun`` for its methods.

    Args:
        queue: The chunks of the iteration.
        begin: Function that starts Ray, if nothing has started it.
        check: Function that raises the error of Ray's start, if there was one.

    Attributes:
        queue: The chunks of the iteration.
    """

    def __init__(
        self, queue: ChunkQueue, begin: Callable[[], None], check: Callable[[], None]
    ) -> None:
        self.queue = queue
        self._begin = begin
        self._check = check
        self._release = weakref.finalize(self, release_later, queue.end)
        self._release.atexit = False

    @property
    def arrivals(self) -> Arrivals:
        """The blocks and losses that have arrived.

        Raises:
            Exception: Ray has not started, or the pipeline has refused the run.
        """
        if self.queue.remote is None:
            self._check()
            if self.queue.failure is not None:
                raise self.queue.failure.with_traceback(None)
        return self.queue.arrivals

    def feed(
        self, chunks: Sequence[Chunk], *, alone: bool, resent: bool = False, **limits: Any
    ) -> None:
        """Pickle chunks and send them; see ``RemoteRun.feed``."""
        self.queue.feed(pickled_chunks(chunks, alone=alone, resent=resent), limits)
        self._begin()  # not earlier: the first batches need the cores

    @property
    def waits_for_ray(self) -> bool:
        """Whether batches do not come because Ray is starting."""
        return self.queue.waits_for_ray

    def lost_with_node(self, batch_s: float) -> bool:
        """Return whether the run waits in vain because a node died."""
        remote = self.queue.remote
        return remote is not None and remote.lost_with_node(batch_s)

    def tasks_at_work(self) -> int | None:
        """Return how many processes make batches now; None if that is unknown."""
        remote = self.queue.remote
        return self.queue.first_workers_at_work if remote is None else remote.tasks_at_work()

    def failure(self) -> BaseException | None:
        """Return the error that ended the run, or None."""
        remote = self.queue.remote
        return self.queue.failure or (remote.failure() if remote is not None else None)

    @property
    def lost(self) -> bool:
        """Whether a new pipeline can continue."""
        return self.queue.remote is not None and self.queue.remote.lost

    def end(self) -> None:
        """Cancel the run, finished or not."""
        self.queue.end()
        self._release.detach()
