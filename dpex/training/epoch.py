"""One epoch of a loader with dpex's workers: chunks out, blocks in, batches in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dpex.errors import TooManySkippedError
from dpex.log import waits, warn
from dpex.protocol.delivery import Delivery, Wait
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.protocol.sent_chunks import Attempt
from dpex.stats import Meter
from dpex.training.dataset_versions import DatasetVersions

if TYPE_CHECKING:
    from dpex.carriers.interface import CarrierRun, CarrierSession
    from dpex.protocol.batch_order import BatchOrder
    from dpex.protocol.binding import Binding
    from dpex.protocol.chunk_sizes import ChunkPlanner
    from dpex.protocol.chunks import Chunk, Entry, Run
    from dpex.protocol.recovery import Recovery
    from dpex.wire.arrivals import Arrival

__all__ = ["Epoch", "EpochOptions", "StateNotes"]

logger = logging.getLogger("dpex")


@dataclass(frozen=True)
class EpochOptions:
    """Options of the loader that hold for an epoch.

    Attributes:
        in_order: Whether batches are delivered in order.
        max_skipped: Maximum number of samples to leave out.
        timeout_s: Maximum wait for a batch in seconds; 0 for no maximum.
        pin_memory: Whether batches go to page-locked memory.
        job: The loader's job, which ``session.store`` returned.
        binding: Whether logical workers are bound to processes at the start.
    """

    in_order: bool
    max_skipped: int
    timeout_s: float
    pin_memory: bool
    job: Any
    binding: Binding


class StateNotes:
    """Reports of a logical worker's state that differs from that of torch's worker.

    Args:
        versions: The loader's dataset versions; a late change is reported once for all of them.
    """

    def __init__(self, versions: DatasetVersions) -> None:
        self._versions = versions
        self._restart_noted = False

    def note(self, arrival: Arrival, num_workers: int) -> None:
        """Report what a block says of its worker's state."""
        costs = arrival.block.costs
        if not (costs.after_restart or costs.late_changes):
            return
        numbers = [entry.batch for entry in arrival.batches]
        if costs.after_restart and not self._restart_noted:
            self._restart_noted = True
            logger.warning(
                "the process of logical worker %d has ended. Its state (generators, counters, the "
                "result of worker_init_fn) starts again at batch %d",
                min(numbers) % num_workers,
                min(numbers),
            )
        if costs.late_changes and not self._versions.change_noted:
            self._versions.change_noted = True
            warn(
                f"a batch (number {max(numbers)} or an earlier one) changed its logical "
                "worker's dataset or collate_fn, but the first batches did not. Until then any "
                "process made any batch, so the workers' state differs from torch's in this epoch. "
                "Pass a worker_init_fn, which may do nothing: it keeps every logical worker in one "
                "process from the first batch on",
            )


class _RunCarrier:
    """Carries the chunks of an epoch to the worker processes of a session; see ``Carrier``.

    Args:
        order: Requests for the batches, for messages.
        session: The loader's worker processes.
        planner: Planner of the chunk sizes.
        options: Options of the loader.
        notes: Reports of worker state.

    Attributes:
        meter: Statistics of the epoch.
    """

    def __init__(
        self,
        order: BatchOrder,
        session: CarrierSession,
        planner: ChunkPlanner,
        options: EpochOptions,
        notes: StateNotes,
    ) -> None:
        self.meter = Meter()
        self._order = order
        self._session = session
        self._planner = planner
        self._options = options
        self._notes = notes
        self._num_workers = 0
        self._opening: Callable[[], CarrierRun] | None = None
        self._opened: CarrierRun | None = None

    @property
    def _run(self) -> CarrierRun:
        assert self._opened is not None
        return self._opened

    @property
    def alive(self) -> bool:
        """Whether runs can be opened."""
        return self._session.alive

    def open(self, run: Run) -> None:
        """Start a run, without waiting for it."""
        self._num_workers = run.num_workers
        pinned = self._options.pin_memory
        self._opening = self._session.open(
            run.key,
            self._options.job,
            binding=self._options.binding,
            pin_device=torch.accelerator.current_device_index() if pinned else None,
        )

    def wait_until_open(self) -> None:
        """Wait until the started run is open."""
        opening, self._opening = self._opening, None
        assert opening is not None
        self._opened = opening()

    def send(self, chunks: Sequence[Chunk], attempt: Attempt, *, one_by_one: bool) -> None:
        """Pickle and send chunks."""
        self._run.feed(
            chunks,
            alone=attempt.alone,
            resent=attempt != Attempt(),
            parallel=self._planner.parallel,
            starting=self._planner.free_cores,
            one_by_one=one_by_one,
        )

    def end(self) -> None:
        """Cancel the run, unless this process is a fork of the one that opened it."""
        self._opening = None
        if self._opened is not None:
            if not self._session.forked:
                self._opened.end()
            self._opened = None

    def take(self) -> Arrival | Loss | None:
        """Return the next block or loss that has come."""
        assert self._opened is not None  # as in _run, in one frame less for each batch
        return self._opened.arrivals.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait until ``has_news`` is true; return False after the timeout."""
        return self._run.arrivals.wait(timeout_s)

    def has_news(self) -> bool:
        """Return whether there is something to take, or never will be."""
        time.sleep(0)  # the thread that receives needs the GIL more
        return self._run.arrivals.wait(0)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._run.arrivals.ended

    def lost_with_node(self) -> bool:
        """Return whether the run waits in vain because a node died."""
        return self._run.lost_with_node(self._planner.batch_s)

    def failure(self) -> BaseException | None:
        """Return the error that ended the run, or None."""
        return self._run.failure()

    @property
    def replaceable(self) -> bool:
        """Whether a new pipeline can continue."""
        return self._run.lost

    def waiting_text(self) -> str:
        """Return a text that says why the next batch is late."""
        return self._session.waiting_text(
            tasks=self._run.tasks_at_work(), in_flight=self._order.in_flight
        )

    def name_dead_nodes(self) -> None:
        """Log which nodes have died."""
        self._session.name_dead_nodes()

    def note_block(self, arrived: Arrival, *, new: bool) -> None:
        """Count the costs of a block, and report what it says of its worker's state."""
        block = arrived.block
        if new:
            if block.costs.retries:
                self._session.name_dead_nodes()
            self._planner.observe(
                batches=len(arrived.batches),
                seconds=block.costs.seconds,
                cpu_seconds=block.costs.cpu_seconds,
                size_bytes=block.size_bytes,
            )
            self.meter.arrived(
                block.costs,
                size_bytes=block.size_bytes,
                transfer_s=arrived.transfer_s,
                decode_s=arrived.decode_s,
            )
        self._notes.note(arrived, self._num_workers)

    def note_late(self, waited_s: float) -> None:
        """Log why no batch comes; raise if none can come."""
        waits.warning("no batch for %.0f s. %s", waited_s, self.waiting_text())
        self._session.name_dead_nodes()
        self._session.check_still_possible(waited_s)

    def note_recovery(self, plan: Recovery) -> None:
        """Count and log the batches that are resent."""
        self.meter.retries += plan.retries
        if plan.cause is LossCause.BLOCK:
            logger.warning(
                "blocks were lost with a worker process. dpex recomputes %d batches", plan.retries
            )
        elif plan.retries:
            logger.warning(
                "%d batches were lost (%s). dpex recomputes them in separate tasks",
                plan.retries,
                plan.reason,
            )

    def note_new_run(self, failure: BaseException | None, resent: int) -> None:
        """Count and log that the batches in flight are resent to a new pipeline."""
        self.meter.retries += resent
        logger.warning(
            "the pipeline on the cluster was lost (%s). A new pipeline continues from batch %d",
            failure,
            self._order.next_batch,
        )

    def leave_out(self, entry: Entry) -> None:
        """Count and log the samples that were left out of a batch.

        Raises:
            TooManySkippedError: The epoch has more than ``max_skipped`` such samples.
        """
        for index, error in entry.left_out:
            self.meter.skipped += 1
            logger.warning("sample %r is left out of batch %d: %s", index, entry.batch, error)
            if self.meter.skipped > self._options.max_skipped:
                raise TooManySkippedError(
                    f"{self.meter.skipped} samples of this epoch cannot be read, more than "
                    f"max_skipped={self._options.max_skipped}. The last is sample "
                    f"{index!r}: {error}. Repair the data, or raise max_skipped"
                )


class Epoch:
    """One epoch: a ``Delivery`` that waits on the clock and on the session's worker processes.

    Args:
        run: The run that the batches belong to.
        order: Requests for the batches.
        session: The loader's worker processes.
        planner: Planner of the chunk sizes.
        options: Options of the loader.
        notes: Reports of worker state.
    """

    def __init__(
        self,
        run: Run,
        order: BatchOrder,
        *,
        session: CarrierSession,
        planner: ChunkPlanner,
        options: EpochOptions,
        notes: StateNotes,
    ) -> None:
        self._order = order
        self._session = session
        self._carrier = _RunCarrier(order, session, planner, options, notes)
        self._delivery = Delivery(
            run,
            order,
            self._carrier,
            time.monotonic,
            in_order=options.in_order,
            timeout_s=options.timeout_s,
        )
        self.fill = self._delivery.fill
        self.cancel = self._delivery.cancel

    @property
    def open(self) -> bool:
        """Whether the epoch can deliver batches: it has neither ended nor failed."""
        return self._delivery.open

    @property
    def started(self) -> bool:
        """Whether a batch has been delivered."""
        return bool(self._order.delivered)

    @property
    def batches_in_flight(self) -> int:
        """Number of batches that are requested but not delivered."""
        return self._order.in_flight

    def raise_failure(self) -> None:
        """Raise the error that ended the epoch, if there was one.

        Raises:
            ClusterError: This process is a fork of the one that began the epoch.
            DpexError: The epoch has failed.
        """
        self._session.check_process()
        self._delivery.raise_failure()

    def close(self) -> None:
        """End the run; its pipeline is free for another run."""
        self._delivery.end()

    def next_entry(self, meter: Meter) -> Entry:
        """Return the next batch, or the error in its place.

        Args:
            meter: Statistics of the epoch.

        Raises:
            StopIteration: The epoch has delivered all its batches.
            ClusterError: Ray does not start, or no node can make the batch.
            Exception: See ``Delivery.next_entry``.
        """
        self._carrier.meter = meter
        steps = self._delivery.next_entry()
        try:
            step = next(steps)
            while True:
                if isinstance(step, Wait):
                    step = steps.send(self._carrier.wait(step.seconds))
                else:
                    time.sleep(step.seconds)
                    step = next(steps)
        except StopIteration as end:
            entry: Entry | None = end.value
        finally:
            steps.close()  # an interrupt during a step reaches the generator at once
        if entry is None:
            raise StopIteration
        return entry
