"""The session of a loader whose local Ray is still starting."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import signal
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.cluster.exclusive_init import waits_for_program
from dpex.cluster.limits import free_cores
from dpex.cluster.local import forkserver
from dpex.cluster.own_process import OwnProcess
from dpex.cluster.releasing import release_later
from dpex.errors import ClusterError
from dpex.training.first_workers import ChunkQueue, FirstRun, FirstWorkers

if TYPE_CHECKING:
    from dpex.pipeline.remote_run import RemoteRun
    from dpex.pipeline.session import Session, StoredJob
    from dpex.protocol.binding import Binding
    from dpex.stats import LoaderStats
    from dpex.transforms.stage import Stage
    from dpex.wire.pickling import Pickled

    PickleJob = Callable[[bool], Pickled]

__all__ = ["PickleJob", "StartingSession", "UnstoredJob"]

logger = logging.getLogger("dpex")

_THREAD_NAME = "dpex-start"
_starting: weakref.WeakSet[StartingSession] = weakref.WeakSet()


def _finish_starts() -> None:
    """Wait for Ray's starts before the main thread forks: the fork would lack their threads."""
    if threading.current_thread() is not threading.main_thread() or forkserver.forks_server:
        return
    interrupted = False
    for session in list(_starting):
        # If dpex waits for the program's call of ray.init, nothing has been started. The fork may
        # be a process of that Ray.
        while not (session.over or waits_for_program()):
            try:
                session.wait(tuning.LOOK_S)
            except KeyboardInterrupt:  # Python would ignore it here
                interrupted = True
    if interrupted:
        again = functools.partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
        threading.Timer(tuning.INTERRUPT_AGAIN_S, again).start()


os.register_at_fork(before=_finish_starts, after_in_child=_starting.clear)


def _is_exiting() -> bool:
    """Return whether Python is about to exit, and waits only for threads that start Ray."""
    others = (thread for thread in threading.enumerate() if thread.name != _THREAD_NAME)
    main = threading.main_thread()
    return not main.is_alive() and all(thread.daemon or thread is main for thread in others)


@dataclass(frozen=True)
class UnstoredJob:
    """A loader's jobs before Ray has started.

    Attributes:
        pickle_job: As for ``Session.store``.
        later: As for ``Session.store``.
    """

    pickle_job: PickleJob
    later: Sequence[tuple[Stage, PickleJob]] = ()


@dataclass(frozen=True)
class _Iteration:
    """An iteration to hand over to a pipeline.

    Attributes:
        run: As for ``Session.open``.
        job: The job that ``Session.store`` gets.
        binding: As for ``Session.open``.
        pin_device: As for ``Session.open``.
        queue: Its chunks; None if there is no iteration yet, and only the pipeline is to start.
    """

    run: str
    job: UnstoredJob
    binding: Binding
    pin_device: int | None
    queue: ChunkQueue | None

    @property
    def live(self) -> bool:
        """Whether the iteration still needs batches."""
        return self.queue is not None and not self.queue.ended


class StartingSession(OwnProcess):
    """The session of a loader until a pipeline continues an iteration; then its ``Session``.

    A thread starts Ray. Until the pipeline has as many tasks as an iteration uses, first workers
    make the batches. If no iteration needs them by then, they wait for the next one.

    Args:
        connect: Function that starts Ray and returns the session.
        connections: Connections to the first workers, if there are any.
        job_key: Digest of the job that they have inherited; empty if there are none.
        num_workers: Number of logical workers.
    """

    def __init__(
        self,
        connect: Callable[[], Session],
        connections: Sequence[Connection],
        job_key: str,
        num_workers: int,
    ) -> None:
        super().__init__()
        self._connect: Callable[[], Session] | None = connect
        self._job_key = job_key
        self._num_workers = num_workers
        self._workers = FirstWorkers(connections)
        self._release = weakref.finalize(self, release_later, self._workers.end)
        self._release.atexit = False
        # Guards the change from first workers to the pipeline.
        self._lock = threading.RLock()
        self._iterations: deque[_Iteration] = deque()
        self._session: Session | None = None
        # The session of a Ray that has started, while first workers wait for an iteration.
        self._kept_session: Session | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._begun = False
        # How often first workers have waited for an iteration after Ray's start.
        self._waits = 0
        # Not the thread's own join(): on Python 3.11, an interrupted join() takes it for ended.
        self._over = threading.Event()
        # Whether a thread waits for the end of the start.
        self._awaited = False

    # --- start ------------------------------------------------------------------------------------

    def warm_up(self, job: UnstoredJob, *, binding: Binding) -> None:
        """Start Ray now, and a pipeline for the first iteration."""
        run = uuid.uuid4().hex  # no iteration has this key
        self._iterations.append(_Iteration(run, job, binding, None, None))
        self._workers.start_now.set()
        self.begin()

    def begin(self) -> None:
        """Start Ray in a thread, if nothing has started it, and hand the iterations over."""
        with self._lock:
            if self._begun:
                return
            self._over.clear()
            # Ray imports filelock, which registers functions to be called before and after a fork.
            # If a fork waited here for that import, Python would call only those after the fork.
            with contextlib.suppress(ImportError):
                importlib.import_module("filelock")
            # Python waits for the thread at exit, before it calls Ray's exit handlers.
            BackgroundThread(
                target=self._start, args=(self._waits,), name=_THREAD_NAME, daemon=False
            ).start()
            _starting.add(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until Ray has started, at most for the timeout; call ``begin`` before."""
        self._awaited = True
        self._workers.start_now.set()
        self._over.wait(timeout_s)

    @property
    def over(self) -> bool:
        """Whether the start has ended, with or without success."""
        return self._over.is_set()

    def _start(self, waits_before: int) -> None:
        with self._lock:
            if self._begun or waits_before != self._waits:  # begin() has started two threads
                return
            self._begun = True
        waits = False
        try:
            self._workers.start_now.wait(tuning.HEAD_START_S)
            if not self._closed and not _is_exiting():
                session, self._kept_session = self._kept_session, None
                if session is None:
                    assert self._connect is not None
                    session = self._connect()
                waits = self._hand_over(session)
        except BaseException as error:
            logger.debug("Ray has not started", exc_info=True)
            self._error = error
        finally:
            self._connect = None  # it refers to the loader and its dataset
            if not waits:
                self._workers.end()
                self._workers.wake()
                self._note_over()

    def _note_over(self) -> None:
        _starting.discard(self)
        self._over.set()

    def _hand_over(self, session: Session) -> bool:
        """Open a pipeline for each iteration, and hand the iteration over to it.

        Returns:
            Whether first workers wait for the next iteration, which then calls ``begin`` again.
        """
        opened = continued = False
        while True:
            with self._lock:
                if self._closed:
                    session.close()
                if self._closed or not self._iterations:
                    waits = self._has_first_workers and not (
                        continued or self._awaited or self._closed
                    )
                    if waits:
                        self._kept_session, self._begun = session, False
                        self._waits += 1
                        self._note_over()
                    else:
                        self._session = session
                    return waits
                iteration = self._iterations.popleft()
                if not iteration.live and (opened or self._iterations):
                    continue  # else the next iteration needs a pipeline
            opened = True
            try:
                continued = self._begin_on_pipeline(session, iteration) or continued
            except Exception as error:
                continued = True
                if iteration.queue is not None:
                    iteration.queue.fail(error)

    def _begin_on_pipeline(self, session: Session, iteration: _Iteration) -> bool:
        """Open a pipeline for an iteration, and return whether it continues the iteration."""
        queue = iteration.queue if iteration.live else None
        remote = session.open(
            iteration.run,
            self._stored(session, iteration.job),
            binding=iteration.binding,
            pin_device=iteration.pin_device,
            arrivals=None if queue is None else queue.arrivals,
        )()
        # After the limit, the iteration itself finds out why tasks do not come.
        deadline = time.monotonic() + tuning.FIRST_TASKS_S
        while time.monotonic() < deadline:
            tasks = 1 if queue is None or self._awaited else queue.tasks_needed
            if remote.start_tasks_and_wait(tasks, tuning.LOOK_S):
                break
            if self._closed or _is_exiting():
                queue = None
                break
        if queue is not None and queue.attach(remote):
            return True
        remote.end()
        return False

    def _stored(self, session: Session, job: UnstoredJob) -> StoredJob:
        return session.store(job.pickle_job, job.later, inherited_key=self._job_key or None)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _check(self) -> None:
        """Raise if nothing will start."""
        self._raise_error()
        if self._session is None and self._closed:
            raise ClusterError("the loader was closed while Ray was starting")

    def started(self) -> Session:
        """Wait until Ray has started, and return the session; first workers make no more chunks."""
        self._awaited = True  # so that no first workers wait for an iteration
        self.begin()
        self.wait()
        self._check()
        assert self._session is not None
        return self._session

    @property
    def _connected(self) -> Session | None:
        return self._session or self._kept_session

    @property
    def _has_first_workers(self) -> bool:
        return self._session is None and not self._workers.ending.is_set()

    # --- as in Session ----------------------------------------------------------------------------

    def store(
        self,
        pickle_job: PickleJob,
        later: Sequence[tuple[Stage, PickleJob]] = (),
    ) -> StoredJob | UnstoredJob:
        """Return the loader's jobs, for ``open``; see ``Session.store``.

        It waits for Ray if the first workers have inherited another job.
        """
        if self._has_first_workers:
            pickled = pickle_job(True)
            if pickled.digest == self._job_key:
                return UnstoredJob(lambda _: pickled)  # pickle_job refers to the loader
        return self.started().store(pickle_job, later)

    def open(
        self, run: str, job: StoredJob | UnstoredJob, *, binding: Binding, pin_device: int | None
    ) -> Callable[[], RemoteRun | FirstRun]:
        """Start an iteration; see ``Session.open``."""
        with self._lock:
            if self._session is not None:
                if isinstance(job, UnstoredJob):
                    job = self._stored(self._session, job)
                opening = self._session.open(run, job, binding=binding, pin_device=pin_device)
                return functools.partial(self._open_after_first_workers, opening)
            self._check()
            assert isinstance(job, UnstoredJob)
            queue = ChunkQueue(run, self._workers, self._num_workers, pin_device)
            live = [iteration for iteration in self._iterations if iteration.live]
            self._iterations = deque([*live, _Iteration(run, job, binding, pin_device, queue)])
        first_run = FirstRun(queue, self.begin, self._raise_error)
        return lambda: first_run

    def _open_after_first_workers(self, opening: Callable[[], RemoteRun]) -> RemoteRun:
        self._workers.wait_for_ended_runs()
        return opening()

    def claims_cpus(self) -> bool:
        """Return whether Ray's CPUs limit the tasks; wait for Ray, unless a local Ray starts."""
        return not self._has_first_workers and self.started().claims_cpus()

    @property
    def alive(self) -> bool:
        """Whether the session is open, and its Ray starts or is this process's Ray."""
        if self.forked or self._closed or self._error is not None:
            return False
        session = self._connected
        return session is None or session.alive

    @property
    def warned_of_size(self) -> bool:
        """Whether any session has warned that its dataset is large."""
        return self._session is not None and self._session.warned_of_size

    def first_tasks(self) -> int:
        """Return the number of tasks to begin with; see ``Session.first_tasks``."""
        return free_cores() if self._session is None else self._session.first_tasks()

    def publish(self, stats: LoaderStats, before: LoaderStats) -> bool:
        """Publish the increase of an epoch's statistics, if Ray has started."""
        session = self._connected
        return session is not None and session.publish(stats, before)

    def waiting_text(self, *, tasks: int | None, in_flight: int) -> str:
        """Return a text that says why a batch is late; see ``wait_text``."""
        if self._session is not None:
            return self._session.waiting_text(tasks=tasks, in_flight=in_flight)
        return (
            f"{in_flight} batches are requested. A local Ray is starting. Number of processes that "
            f"make batches meanwhile: {'unknown' if tasks is None else tasks}"
        )

    def name_dead_nodes(self) -> None:
        """Log which nodes have died."""
        if self._session is not None:
            self._session.name_dead_nodes()

    def check_still_possible(self, waited_s: float) -> None:
        """Raise if the loader waits in vain; see ``Session.check_still_possible``."""
        if self._session is not None:
            self._session.check_still_possible(waited_s)

    def close(self) -> None:
        """Close the pipelines, and end the first workers; Ray's start continues."""
        if self.forked:
            return
        with self._lock:
            self._closed = True
            if (session := self._connected) is not None:
                session.close()
        self._workers.close()
