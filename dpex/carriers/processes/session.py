"""The worker processes of a loader, from one iteration to the next."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dpex.carriers.processes.worker_process import WorkerStart
from dpex.carriers.processes.worker_processes import WorkerProcesses
from dpex.cluster.machine_share import free_cores
from dpex.cluster.own_process import OwnProcess
from dpex.protocol.binding import Binding
from dpex.wire.arrivals import Arrivals, Decoder
from dpex.wire.classes_by_value import remember
from dpex.worker.map_style import pickled_chunks

if TYPE_CHECKING:
    from dpex.protocol.chunks import Chunk
    from dpex.stats import LoaderStats
    from dpex.worker.loader_jobs import LoaderJobs, PickleJob

__all__ = ["ProcessRun", "ProcessSession", "check_system"]


def check_system() -> None:
    """Check that dpex's worker processes run on this system.

    Raises:
        NotImplementedError: It is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise NotImplementedError(
            f"dpex's worker processes need Linux, and this is {sys.platform}. Pass "
            "distribute_mode=False"
        )


class ProcessSession(OwnProcess):
    """The worker processes of a loader; see ``CarrierSession``.

    Args:
        num_workers: Number of logical workers, each of which has a process.
        persistent: Whether the processes outlive an iteration.
    """

    def __init__(self, num_workers: int, *, persistent: bool) -> None:
        super().__init__()
        self._num_workers = num_workers
        self._persistent = persistent
        self._free_cores = free_cores()  # each call reads files
        self._kept: tuple[LoaderJobs, WorkerProcesses] | None = None
        self._started = self._closed = False
        self._in_use: weakref.WeakSet[ProcessRun] = weakref.WeakSet()

    @property
    def alive(self) -> bool:
        """Whether iterations can begin."""
        return not (self.forked or self._closed)

    def store(self, jobs: LoaderJobs, pickle: PickleJob) -> LoaderJobs:
        """Return the jobs: the worker processes start with them."""
        return jobs

    def settings(self) -> None:
        """Return None: the worker processes inherit the settings."""

    def warm_up(self, job: LoaderJobs, *, binding: Binding, wait: bool) -> None:
        """Do nothing: the worker processes start at ``iter()``, as torch's do."""

    def open(
        self, run: str, job: LoaderJobs, *, binding: Binding, pin_device: int | None
    ) -> Callable[[], ProcessRun]:
        """Start an iteration, and its processes unless they persist.

        Args:
            run: Key of the iteration.
            job: What the processes start with.
            binding: Whether the logical workers are known to keep state.
            pin_device: As for ``Decoder``.

        Raises:
            OSError: A process cannot be started.
        """
        processes = self._processes(job, binding)
        processes.begin(Decoder(run, pin_device))
        opened = ProcessRun(processes, persistent=self._persistent)
        self._in_use.add(opened)
        return lambda: opened

    def _processes(self, job: LoaderJobs, binding: Binding) -> WorkerProcesses:
        if self._kept is not None:
            kept_job, kept = self._kept
            if kept_job is job and kept.open:
                return kept
            kept.close()
            self._kept = None
        if job.context.get_start_method() == "fork" and not self._started:
            remember()
            self._started = True
        keeps_state = binding is Binding.ALWAYS
        later = [stage_job for _, stage_job in job.later]
        start = WorkerStart(job.job, later, os.getpid(), job.stream, keeps_state)
        processes = WorkerProcesses(job.context, start, self._num_workers)
        if self._persistent:
            self._kept = job, processes
            release = weakref.finalize(self, processes.abandon, persistent=False)
            release.atexit = False
        return processes

    def claims_cpus(self) -> bool:
        """Return False: no scheduler counts the CPUs of the processes."""
        return False

    def first_tasks(self) -> int:
        """Return the number of free cores."""
        return self._free_cores

    def publish(self, stats: LoaderStats, before: LoaderStats) -> None:
        """Do nothing: without Ray, nothing exports metrics."""

    def waiting_text(self, *, tasks: int | None, in_flight: int) -> str:
        """Return a text that says why a batch is late."""
        return (
            f"{in_flight} batches are requested. {tasks} of {self._num_workers} worker processes "
            "of this machine make batches"
        )

    def name_dead_nodes(self) -> None:
        """Do nothing: this machine is the only node."""

    def check_still_possible(self, waited_s: float) -> None:
        """Do nothing: the processes wait for no resources."""

    def close(self) -> None:
        """End the processes; iterations that are open raise an error."""
        if self.forked:
            return
        self._closed = True
        for run in list(self._in_use):
            run.fail(RuntimeError("the loader was closed"))
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()


class ProcessRun:
    """One iteration on worker processes; see ``CarrierRun``."""

    lost = False

    def __init__(self, processes: WorkerProcesses, *, persistent: bool) -> None:
        self._processes = processes
        self.arrivals: Arrivals = processes.arrivals
        self._release = weakref.finalize(self, processes.abandon, persistent=persistent)
        self._release.atexit = False
        self._persistent = persistent

    def feed(
        self, chunks: Sequence[Chunk], *, alone: bool, resent: bool = False, **limits: Any
    ) -> None:
        """Pickle chunks and send them; ``limits`` have no effect, because all processes run."""
        self._processes.feed(pickled_chunks(chunks, alone=alone, resent=resent))

    def lost_with_node(self, batch_s: float) -> bool:
        """Return False: this machine is the only node."""
        return False

    def tasks_at_work(self) -> int | None:
        """Return how many processes make batches now."""
        return self._processes.at_work

    def failure(self) -> BaseException | None:
        """Return the error that ended the run, or None."""
        return self._processes.failure

    def fail(self, error: Exception) -> None:
        """End the iteration with an error, unless it has ended."""
        if self._release.alive:
            self._processes.fail(error)
            self.end()

    def end(self) -> None:
        """Cancel the iteration, and end its processes unless they persist."""
        if self._release.detach() is None:
            return
        if self._persistent:
            self._processes.end_iteration()
        else:
            self._processes.close()
