"""The worker processes of a loader, as the training process sees them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import queue
import selectors
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.carriers.processes.replacements import Replacements, run_forked
from dpex.carriers.processes.worker_process import END, Report, WorkerStart, run_worker
from dpex.protocol.loss_causes import lost_block
from dpex.protocol.worker_queue import WorkerQueue
from dpex.wire.arrivals import Arrivals, Decoder
from dpex.wire.block_format import Block
from dpex.wire.segments import readable_segments

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from dpex.protocol.chunks import PickledChunk

__all__ = ["WorkerProcesses"]

logger = logging.getLogger("dpex")

_live: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


# The process that has registered ``_kill_at_exit`` with multiprocessing.
_registered_in = 0


@atexit.register
def _kill_at_exit() -> None:
    """Kill the processes that are left, so that no thread reads their batches any more."""
    for processes in list(_live):
        processes.kill()


def _kill_before_join() -> None:
    """Let ``_kill_at_exit`` run before multiprocessing joins the children of this process.

    A process that multiprocessing has started calls no ``atexit`` handlers, and forgets at its
    start what its parent has registered.
    """
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        Finalize(None, _kill_at_exit, exitpriority=0)


os.register_at_fork(after_in_child=_live.clear)


class _Worker:
    """A logical worker, and its present process.

    Attributes:
        queue: Its chunks.
        connection: Connection to the process.
        ended: Descriptor that becomes readable when the process ends; -1 if there is no process.
        started: Whether the process has reported its start.
        failed_starts: How many processes in a row have ended before that.
        process: The process, unless another process has forked it.
    """

    def __init__(self) -> None:
        self.queue = WorkerQueue()
        self.connection: Connection
        self.ended = -1
        self.started = False
        self.failed_starts = 0
        self.process: Any = None

    def send(self, message: Any) -> None:
        """Send a message; if the process has ended, ``ended`` shows it."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self.ended < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.ended, signal.SIGKILL)

    def reap(self) -> str:
        """Release what belongs to the process, which has ended, and say how it ended."""
        self.connection.close()
        os.close(self.ended)
        self.ended = -1
        process, self.process = self.process, None
        if process is None:
            return "worker process died"
        # Not closed: another thread may join all children, as multiprocessing does at exit.
        process.join()
        code, pid = process.exitcode, process.pid
        if code is not None and code < 0:
            return f"worker process {pid} was killed by {signal.Signals(-code).name}"
        return f"worker process {pid} exited with status {code}"


class WorkerProcesses:
    """One process for each logical worker of a loader, and a thread that reads what they send.

    The processes start as torch's workers do: now, by the loader's ``multiprocessing_context``. A
    process that dies is replaced; see ``Replacements``. With another start method than ``"fork"``,
    the replacement gets the dataset as it is then.

    Args:
        context: The loader's ``multiprocessing_context``.
        start: What each process starts with.
        num_workers: Number of logical workers.

    Attributes:
        arrivals: The blocks and losses of the present iteration that have arrived.
        failure: The error because of which nothing more arrives, if there is one.

    Source:
        torch's ``_MultiProcessingDataLoaderIter``: one process for each worker, which starts at
        ``iter()`` and gets 5 s to end.
    """

    def __init__(self, context: BaseContext, start: WorkerStart, num_workers: int) -> None:
        self._context = context
        self._start = start
        self.arrivals = Arrivals()
        self.failure: Exception | None = None
        self._decoder: Decoder | None = None
        # Guards the queues and the sending of messages.
        self._lock = threading.RLock()
        self._closing = False
        # Number of workers whose process runs, or is about to be replaced.
        self._running = num_workers
        self._selector = selectors.DefaultSelector()
        # What the thread does next, for finalizers, which must not wait for a lock.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._called = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not closed by the thread: another thread could write to a file that gets the number then.
        weakref.finalize(self, os.close, self._called).atexit = False
        self._selector.register(self._called, selectors.EVENT_READ)
        # When the thread kills the processes that have not ended, by the monotonic clock.
        self._kill_at = math.inf
        # The processes are started before the thread: a fork has none of this object's threads.
        forks = context.get_start_method() == "fork"
        self._replacements = Replacements(context) if forks else None
        self._workers = [_Worker() for _ in range(num_workers)]
        try:
            for worker in self._workers:
                self._start_process(worker)
        except BaseException:
            self._abandon()
            raise
        finally:
            if self._replacements is not None:
                self._replacements.channel.close()
        self._reader = BackgroundThread(target=self._receive, name="dpex-processes", daemon=True)
        self._reader.start()
        _live.add(self)
        _kill_before_join()

    def _start_process(self, worker: _Worker) -> None:
        ours, theirs = self._context.Pipe()
        make: Any = self._context
        run: Callable[..., None] = run_worker
        if self._replacements is not None:
            first = worker is self._workers[0]
            run = functools.partial(run_forked, self._replacements.channel, first)
        process = make.Process(target=run, args=(theirs, self._start), daemon=True)
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._watch(worker, ours, process.pid, process)

    def _watch(self, worker: _Worker, connection: Connection, pid: int, process: Any) -> None:
        worker.connection, worker.ended = connection, os.pidfd_open(pid)
        worker.process, worker.started = process, False
        self._selector.register(connection, selectors.EVENT_READ, worker)
        self._selector.register(worker.ended, selectors.EVENT_READ, worker)

    def _abandon(self) -> None:
        """Kill the processes of a start that has failed."""
        for worker in self._workers:
            if worker.process is not None:
                worker.kill()
                worker.reap()
        if self._replacements is not None:
            self._replacements.close()

    # --- the training loop ------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the processes can serve an iteration."""
        return not self._closing and self.failure is None

    @property
    def at_work(self) -> int:
        """Number of processes that make a chunk."""
        with self._lock:
            return sum(worker.queue.at_work for worker in self._workers)

    def begin(self, decoder: Decoder) -> None:
        """Start an iteration, whose blocks the decoder decodes."""
        with self._lock:
            self.arrivals = Arrivals()
            self._decoder = decoder
            for worker in self._workers:
                worker.queue.begin()

    def feed(self, chunks: Iterable[PickledChunk]) -> None:
        """Add chunks to the iteration."""
        with self._lock:
            fed = {}
            for chunk in chunks:
                worker = fed[chunk.worker] = self._workers[chunk.worker]
                worker.queue.feed(chunk)
            for worker in fed.values():
                self._advance(worker)

    def _advance(self, worker: _Worker) -> None:
        """Send a process its next chunk, if it has requested one."""
        assigned = worker.queue.next()
        if assigned is not None:
            worker.send((assigned, readable_segments()))

    def end_iteration(self) -> None:
        """Cancel the iteration."""
        with self._lock:
            self._cancel()
            for worker in self._workers:
                worker.queue.end()
                worker.send(worker.queue.iteration)

    def _cancel(self) -> None:
        """Decode no more batches."""
        self.arrivals.end()
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def close(self) -> None:
        """End the processes, and wait; those still at work after ``tuning.END_S`` are killed."""
        self._begin_to_close()
        self._wake()  # for the new time limit
        self._reader.join(tuning.END_S + tuning.EXIT_S)
        _live.discard(self)

    def _begin_to_close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._kill_at = time.monotonic() + tuning.END_S
            self.end_iteration()
            for worker in self._workers:
                worker.send(END)

    def kill(self) -> None:
        """Kill the processes, and wait until the thread has unpickled its present batch.

        Python ends a thread that still runs at its end in the middle of the user's code, and may
        abort then.
        """
        with self._lock:
            self._closing = True
            self._cancel()
            self._kill_all()
        self._reader.join(tuning.UNPICKLED_S)
        _live.discard(self)

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()

    def abandon(self, *, persistent: bool) -> None:
        """End the iteration soon, and the processes unless they are persistent; for finalizers."""
        self._calls.put(self.end_iteration if persistent else self._begin_to_close)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._called, 1)

    def fail(self, error: Exception) -> None:
        """Record that nothing more arrives."""
        self.failure = error.with_traceback(None)
        self.arrivals.end()

    # --- the thread that reads --------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while self._running:
                for key, _ in self._selector.select(self._until_kill_s()):
                    worker: _Worker | None = key.data
                    if worker is None:
                        self._call()
                    elif self._selector.get_map().get(key.fd) is not key:
                        continue  # its process has just been replaced
                    elif key.fd == worker.ended:
                        self._end(worker)
                    elif not self._read(worker):
                        self._selector.unregister(worker.connection)
        except BaseException as error:
            self.fail(RuntimeError(f"dpex can read no more batches: {error!r}"))
            raise
        finally:
            self._selector.close()
            if self._replacements is not None:
                self._replacements.close()

    def _until_kill_s(self) -> float | None:
        """Return the seconds until the processes are killed; kill them once the time is over."""
        if math.isinf(self._kill_at):
            return None
        left_s = self._kill_at - time.monotonic()
        if left_s <= 0:
            self._kill_at = math.inf
            with self._lock:
                self._kill_all()
        return max(0.0, left_s)

    def _call(self) -> None:
        """Do what finalizers have left to this thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._called)
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def _read(self, worker: _Worker) -> bool:
        """Read one message of a process; return False if there is none, because it has ended."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Block):
            self._take(message)
            return True
        with self._lock:
            if message is Report.STARTED:
                worker.started, worker.failed_starts = True, 0
                worker.queue.note_start()
            elif message is Report.ASKS:
                worker.queue.note_request()
            else:
                worker.queue.note_chunk_ended()
            self._advance(worker)
        return True

    def _take(self, block: Block) -> None:
        """Decode a block for the training loop."""
        arrivals, decoder = self.arrivals, self._decoder
        if decoder is None:
            return
        try:
            news = decoder(block)
        except Exception as error:  # SegmentsUnreadableError: from now on there are no segments
            logger.debug("a block is lost", exc_info=True)
            news = lost_block(str(error), block.part)
        arrivals.add(news)

    def _end(self, worker: _Worker) -> None:
        """Take what a process that has ended had sent, and replace the process."""
        if worker.connection in self._selector.get_map():
            # A process that it has started may still have the connection.
            os.set_blocking(worker.connection.fileno(), False)
            while self._read(worker):
                pass
            self._selector.unregister(worker.connection)
        self._selector.unregister(worker.ended)
        with self._lock:
            how = worker.reap()
            worker.failed_starts += not worker.started
            if self._closing or self.failure is not None:
                self._running -= 1
                return
            logger.debug("%s", how)
            loss = worker.queue.note_death(how)
            try:
                if worker.failed_starts >= tuning.MOST_FAILED_STARTS:
                    raise ChildProcessError("such processes end before their first sample")
                self._replace(worker)
            except (OSError, EOFError) as error:
                self._running -= 1
                self.fail(RuntimeError(f"DataLoader {how}, and cannot be replaced: {error!r}"))
                return
            self._advance(worker)
        if loss is not None:
            self.arrivals.add(loss)

    def _replace(self, worker: _Worker) -> None:
        if self._replacements is None:
            self._start_process(worker)
            return
        ours, theirs = self._context.Pipe()
        try:
            pid = self._replacements.fork(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._watch(worker, ours, pid, None)
