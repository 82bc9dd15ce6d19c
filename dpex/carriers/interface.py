"""What a loader needs of its worker processes, whatever carries the batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dpex.protocol.binding import Binding
    from dpex.protocol.chunks import Chunk
    from dpex.stats import LoaderStats
    from dpex.wire.arrivals import Arrivals
    from dpex.worker.loader_jobs import LoaderJobs, PickleJob

__all__ = ["CarrierRun", "CarrierSession"]


class CarrierRun(Protocol):
    """One iteration on worker processes."""

    @property
    def arrivals(self) -> Arrivals:
        """The blocks and losses that have arrived."""

    @property
    def lost(self) -> bool:
        """Whether a new run can continue, after this one has failed."""

    def feed(
        self,
        chunks: Sequence[Chunk],
        *,
        alone: bool,
        resent: bool,
        one_by_one: bool,
        parallel: int,
        starting: int,
    ) -> None:
        """Pickle chunks and send them.

        Args:
            chunks: The chunks.
            alone: Whether a process died while it made one of them.
            resent: Whether their batches were lost.
            one_by_one: Whether only one task may run at a time.
            parallel: Number of tasks that may run at once, if logical workers are not bound.
            starting: Number of tasks that may start at once, if logical workers are bound.

        Raises:
            SerializationError: A chunk's indices cannot be pickled.
        """

    def lost_with_node(self, batch_s: float) -> bool:
        """Return whether the run waits in vain because a node died."""

    def tasks_at_work(self) -> int | None:
        """Return how many processes make batches now; None if that is unknown."""

    def failure(self) -> BaseException | None:
        """Return the error that ended the run, or None."""

    def end(self) -> None:
        """Cancel the run, finished or not."""


class CarrierSession(Protocol):
    """The worker processes of a loader, from one iteration to the next."""

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that created the session."""

    @property
    def alive(self) -> bool:
        """Whether iterations can begin."""

    def check_process(self) -> None:
        """Raise ``ClusterError`` in a fork of the process that created the session."""

    def store(self, jobs: LoaderJobs, pickle: PickleJob) -> Any:
        """Return what ``open`` needs of a loader's jobs.

        Raises:
            DpexError: The worker processes cannot get or do the jobs.
        """

    def settings(self) -> Any:
        """Return the ``Settings`` that worker processes take over, or None if they inherit them."""

    def warm_up(self, job: Any, *, binding: Binding, wait: bool) -> None:
        """Prepare the next iteration, as far as that is possible before ``open``.

        Args:
            job: What ``store`` has returned.
            binding: As for ``open``.
            wait: Whether to return only when a worker process waits for work.
        """

    def open(
        self, run: str, job: Any, *, binding: Binding, pin_device: int | None
    ) -> Callable[[], CarrierRun]:
        """Start an iteration; return a function that waits until it has started.

        Args:
            run: Key of the iteration.
            job: What ``store`` has returned.
            binding: Initial binding of logical workers to processes.
            pin_device: Index of the device for which batches are copied to pinned memory, or None.
        """

    def claims_cpus(self) -> bool:
        """Return whether Ray's CPUs limit the number of processes at work."""

    def first_tasks(self) -> int:
        """Return how many processes may work at once at first."""

    def publish(self, stats: LoaderStats, before: LoaderStats) -> None:
        """Export the increase of an epoch's statistics, if something exports metrics."""

    def waiting_text(self, *, tasks: int | None, in_flight: int) -> str:
        """Return a text that says why a batch is late."""

    def name_dead_nodes(self) -> None:
        """Log which nodes have died."""

    def check_still_possible(self, waited_s: float) -> None:
        """Raise if the loader waits in vain for a node."""

    def close(self) -> None:
        """End the processes and release what they hold."""
