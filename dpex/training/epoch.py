"""One epoch of a loader whose workers are Ray tasks: chunks out, blocks in, batches in order."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dpex import tuning
from dpex.errors import BatchLostError, DpexError, SerializationError, TooManySkippedError
from dpex.log import waits, warn
from dpex.protocol.chunks import Entry
from dpex.protocol.in_flight import Attempt, InFlight, described
from dpex.protocol.loss_causes import Loss, LossCause, joined
from dpex.protocol.recovery import Recovery, Resend, recover
from dpex.stats import Meter
from dpex.training.dataset_versions import DatasetVersions
from dpex.training.deferred_errors import KeptError

if TYPE_CHECKING:
    from dpex.pipeline.remote_run import RemoteRun
    from dpex.pipeline.session import Session
    from dpex.protocol.batch_order import BatchOrder
    from dpex.protocol.binding import Binding
    from dpex.protocol.chunk_sizes import ChunkPlanner
    from dpex.protocol.chunks import Chunk, Run
    from dpex.training.first_workers import FirstRun
    from dpex.training.starting_session import StartingSession
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


class Epoch:
    """One epoch: requests, sends, receives and delivers its batches.

    Invariant: every batch that ``order`` counts as in flight is in exactly one place. Its chunk is
    not complete (in ``order``) or not sent (``_unsent``). Or it is in flight (``_in_flight``), or
    ready (``_undelivered``). If that cannot be kept, every further call raises the same
    ``BatchLostError``.

    Args:
        run: The run that the batches belong to.
        order: Requests for the batches.
        session: The loader's job and pipelines on the cluster.
        planner: Planner of the chunk sizes.
        options: Options of the loader.
        notes: Reports of worker state.
    """

    def __init__(
        self,
        run: Run,
        order: BatchOrder,
        *,
        session: Session | StartingSession,
        planner: ChunkPlanner,
        options: EpochOptions,
        notes: StateNotes,
    ) -> None:
        self._run = run
        self._order = order
        self._session = session
        self._planner = planner
        self._meter = Meter()
        self._options = options
        self._notes = notes
        self._unsent: list[Chunk] = []
        self._flushed_at = 0.0
        self._in_flight = InFlight()
        self._undelivered: dict[int, Entry] = {}
        self._pipelines_lost = 0
        self._losses: list[Loss] = []
        self._reason = ""
        self._failure: KeptError | None = None
        self._remote_run: RemoteRun | FirstRun | None = None
        self._opening: Callable[[], RemoteRun | FirstRun] | None = self._open()

    @property
    def open(self) -> bool:
        """Whether the epoch can deliver batches: it has neither ended nor failed."""
        return self._remote_run is not None

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
        if self._failure is not None:
            self._failure.reraise()

    def close(self) -> None:
        """End the run; its pipeline is free for another run."""
        self._opening = None
        if self._remote_run is not None:
            if not self._session.forked:
                self._remote_run.end()
            self._remote_run = None

    def _open(self) -> Callable[[], RemoteRun | FirstRun]:
        """Start a run, without waiting for it; ``_opened`` waits."""
        return self._session.open(
            self._run.key,
            self._options.job,
            binding=self._options.binding,
            pin_device=(
                torch.accelerator.current_device_index() if self._options.pin_memory else None
            ),
        )

    def _opened(self) -> None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._remote_run = opening()

    # --- requests ---------------------------------------------------------------------------------

    def fill(self) -> None:
        """Draw and send as far ahead as torch does."""
        self._order.fill(self._take_chunk)
        self._flush()

    def _prefetch_chunk(self, *, waiting: bool = False) -> bool:
        """Draw and send one chunk more than torch would, if costs allow it.

        Args:
            waiting: Whether the training loop waits for the next batch. Then drawing stops when
                a block arrives.

        Returns:
            False if nothing more can be requested now.
        """
        stop_at = time.monotonic() + tuning.DRAW_S

        def enough() -> bool:
            if waiting:
                time.sleep(0)  # the thread that receives needs the GIL more
                assert self._remote_run is not None
                return self._remote_run.arrivals.wait(0)
            return time.monotonic() >= stop_at

        asked = self._order.prefetch_chunk(self._take_chunk, enough)
        self._flush()
        return asked

    def _take_chunk(self, chunk: Chunk) -> None:
        self._unsent.append(chunk)
        # Chunks share a message, but no chunk waits for others.
        if time.monotonic() - self._flushed_at > tuning.GATHER_S:
            self._flush()

    def _flush(self) -> None:
        """Send the chunks that have been drawn."""
        self._opened()
        self._flushed_at = time.monotonic()
        if self._unsent:
            try:
                chunks, self._unsent = self._unsent, []
                self._send(Resend(chunks, Attempt()))
            except Exception as error:  # nothing else would make these batches
                if not self._session.alive:
                    self._fail(error)
                self.cancel(error)
                raise
            except BaseException:
                self.cancel(None)
                raise

    def _send(self, message: Resend) -> None:
        """Send chunks in one message; an error of pickling replaces their batches."""
        assert self._remote_run is not None
        chunks = self._in_flight.numbered(message.chunks, self._run)
        try:
            self._remote_run.feed(
                chunks,
                alone=message.attempt.alone,
                resent=message.attempt != Attempt(),
                parallel=self._planner.parallel,
                starting=self._planner.free_cores,
                one_by_one=message.attempt.one_by_one or self._in_flight.one_by_one,
            )
        except SerializationError as error:
            for chunk in chunks:
                for batch in chunk.numbers:
                    self._fail_batch(batch, error)
            return
        self._in_flight.add(chunks, message.attempt)

    # --- delivery ---------------------------------------------------------------------------------

    def next_entry(self, meter: Meter) -> Entry:
        """Return the next batch, or the error in its place.

        Args:
            meter: Statistics of the epoch.

        Raises:
            StopIteration: The epoch has delivered all its batches.
            RuntimeError: The next batch has not come within the loader's timeout.
            TooManySkippedError: The epoch has more than ``max_skipped`` skipped samples.
            BatchLostError: The pipeline stopped.
            ClusterError: Ray does not start, or no node can make the batch.
            Exception: The sampler raised it.
        """
        self._meter = meter
        first = not self.started
        while True:
            self.fill()
            entry = self._wait_for_batch()
            self.fill()
            # The loop waited for the first batch, so nothing delays that one.
            for _ in range(0 if first else tuning.CHUNKS_PER_STEP):
                if not self._prefetch_chunk():
                    break
            if entry.left_out:
                self._leave_out(entry)
            if entry.outcome != "nothing":
                return entry

    def _leave_out(self, entry: Entry) -> None:
        """Count and log the samples that were left out of a batch.

        Raises:
            TooManySkippedError: The epoch has more than ``max_skipped`` such samples.
        """
        for index, error in entry.left_out:
            self._meter.skipped += 1
            logger.warning("sample %r is left out of batch %d: %s", index, entry.batch, error)
            if self._meter.skipped > self._options.max_skipped:
                self._failure = KeptError(
                    TooManySkippedError(
                        f"{self._meter.skipped} samples of this epoch cannot be read, more than "
                        f"max_skipped={self._options.max_skipped}. The last is sample "
                        f"{index!r}: {error}. Repair the data, or raise max_skipped"
                    )
                )
                self.close()
                self._failure.reraise()

    def _wait_for_batch(self) -> Entry:
        """Return the next batch, or the error or the empty entry in its place."""
        timeout_s = self._options.timeout_s
        deadline = time.monotonic() + timeout_s if timeout_s else None
        began = time.monotonic()
        note_at, note_s = began + tuning.SLOW_WAIT_S, tuning.SLOW_WAIT_S
        while True:
            self._collect()
            batch = self._order.choose(self._undelivered, in_order=self._options.in_order)
            if batch is not None:
                entry = self._undelivered.pop(batch)
                self._order.deliver(entry)
                return entry
            if not self._in_flight:
                self.fill()  # nothing else would bring the next batch
            if self._order.next_batch is None:
                self.close()
                self._order.finish()
                raise StopIteration
            wait_s = tuning.SLOW_WAIT_S
            assert self._remote_run is not None
            if deadline is not None and self._remote_run.waits_for_ray:
                deadline = time.monotonic() + timeout_s  # as if iter() had waited for Ray
            if deadline is not None:
                wait_s = min(wait_s, deadline - time.monotonic())
                if wait_s <= 0:
                    raise RuntimeError(f"{self._timeout_text()}. {self._waiting_text()}")
            if time.monotonic() >= note_at:  # also if later batches arrive
                note_s = min(2 * note_s, tuning.MOST_NOTE_S)
                note_at = time.monotonic() + note_s
                waited_s = time.monotonic() - began
                waits.warning("no batch for %.0f s. %s", waited_s, self._waiting_text())
                self._session.name_dead_nodes()
                self._session.check_still_possible(waited_s)
            if self._in_flight and self._remote_run.arrivals.ended:
                self._replace_pipeline()
            prompt_s = min(wait_s, tuning.PROMPT_S)
            if self._remote_run.arrivals.wait(prompt_s):
                continue
            if self._prefetch_chunk(waiting=True):
                continue  # the wait is used to draw further ahead
            arrived = self._remote_run.arrivals.wait(wait_s - prompt_s)
            if not arrived and self._remote_run.lost_with_node(self._planner.batch_s):
                # ``lost_with_node`` reports a node's death only once, so this loss need not count.
                self._replace_pipeline(counts=False)

    def _waiting_text(self) -> str:
        assert self._remote_run is not None
        return self._session.waiting_text(
            tasks=self._remote_run.tasks_at_work(), in_flight=self._order.in_flight
        )

    def _collect(self) -> None:
        """Process the blocks and losses that have arrived."""
        assert self._remote_run is not None
        arrivals = self._remote_run.arrivals
        try:
            while (news := arrivals.take()) is not None:
                if isinstance(news, Loss):
                    self._losses.append(news)
                elif news.block.run == self._run.key:
                    self._pipelines_lost, self._reason = 0, ""
                    self._take_block(news)
                    self._notes.note(news, self._run.num_workers)  # may raise a warning
        except Exception:
            raise
        except BaseException:  # an interrupt, after which a batch may be missing
            self.cancel(None)
            raise
        if self._losses:
            self._or_fail(self._recover)

    def _take_block(self, arrival: Arrival) -> None:
        block = arrival.block
        new = self._in_flight.arrive(block.chunk, arrival.batches)
        if new is None:
            return
        for entry in new:
            if entry.outcome == "end":
                self._order.end_stream(entry.batch, entry.state)
            else:
                self._undelivered[entry.batch] = entry
        if block.costs.retries:
            self._session.name_dead_nodes()
        self._planner.observe(
            batches=len(arrival.batches),
            seconds=block.costs.seconds,
            cpu_seconds=block.costs.cpu_seconds,
            size_bytes=block.size_bytes,
        )
        self._meter.arrived(
            block.costs,
            size_bytes=block.size_bytes,
            transfer_s=arrival.transfer_s,
            decode_s=arrival.decode_s,
        )

    # --- recovery ---------------------------------------------------------------------------------

    def _or_fail(self, resend: Callable[[], None]) -> None:
        """Take batches out of flight and resend them with ``resend``, or fail the epoch."""
        try:
            resend()
        except Exception as error:
            if self._failure is not None:  # ``resend`` has failed the epoch
                raise
            self._fail(error)
        except BaseException:  # an interrupt, after which these batches would be missing
            self.cancel(None)
            raise

    def _recover(self) -> None:
        """Resend the batches that were lost, in their order; see ``recover``."""
        losses, self._losses = self._losses, []
        self._reason = joined(losses)
        for cause in LossCause:
            lost = []
            of_cause = [loss for loss in losses if loss.cause is cause]
            for loss in of_cause:
                if loss.part is not None and loss.part.run == self._run.key:
                    sent = self._in_flight.lose(loss.part)
                    lost += [] if sent is None else [sent]
            if lost:
                lost.sort(key=lambda sent: min(sent.missing))
                self._resend(recover(lost, cause, joined(of_cause)))

    def _resend(self, plan: Recovery) -> None:
        self._session.name_dead_nodes()
        if any(message.attempt.lost_blocks == tuning.MOST_LOSSES for message in plan.resends):
            self._fail(None)
        self._meter.retries += plan.retries
        time.sleep(plan.wait_s)
        for batch in plan.ended:
            self._order.end_stream(batch)
            self._in_flight.end_stream(batch, self._run.num_workers)
        for batch, error in plan.failed:
            self._fail_batch(batch, error)
        self._log(plan)
        for message in plan.resends:
            if message.chunks:
                self._send(message)

    def _log(self, plan: Recovery) -> None:
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

    def _replace_pipeline(self, *, counts: bool = True) -> None:
        """Resend the batches in flight to a new pipeline, because the old pipeline was lost.

        Args:
            counts: Whether this loss counts among those in a row.

        Raises:
            BatchLostError: The old pipeline ended without being lost, or the session has ended.
                Or this is the third loss since a block arrived.
        """
        assert self._remote_run is not None
        failure = self._remote_run.failure()
        self._pipelines_lost += counts
        if (
            not self._remote_run.lost
            or not self._session.alive
            or self._pipelines_lost == tuning.MOST_LOSSES
        ):
            self._fail(failure)
        logger.warning(
            "the pipeline on the cluster was lost (%s). A new pipeline continues from batch %d",
            failure,
            self._order.next_batch,
        )
        self._or_fail(self._send_to_new_pipeline)

    def _send_to_new_pipeline(self) -> None:
        lost = self._in_flight.take()
        self.close()
        self._run = replace(self._run, key=uuid.uuid4().hex)
        self._meter.retries += sum(len(sent.missing) for sent in lost)
        self._opening = self._open()
        self._opened()
        for attempt in dict.fromkeys(sent.attempt for sent in lost):
            chunks = [c for sent in lost if sent.attempt == attempt for c in sent.rest()]
            self._send(Resend(chunks, attempt))

    # --- failure ----------------------------------------------------------------------------------

    def _fail_batch(self, batch: int, error: DpexError) -> None:
        """Deliver an error in place of a batch."""
        self._undelivered[batch] = Entry(batch, KeptError(error), "error")

    def _fail(self, cause: BaseException | None) -> NoReturn:
        """Raise now, and at every further ``next()``, because the pipeline stopped in mid-epoch."""
        raise self.cancel(cause) from cause

    def cancel(self, cause: BaseException | None) -> DpexError:
        """End the run, and return the error that every further ``next()`` raises."""
        where = (
            f"with {self._order.in_flight} batches outstanding; the next one is "
            f"{self._order.next_batch}"
        )
        if self._session.alive:
            reason = self._reason or str(cause or "no reason known")
            text = f"the pipeline on the cluster ended {where}. Ray says: {reason}"
        else:
            text = (
                f"the loader was closed, or Ray was shut down or lost, {where}. A new iter(loader) "
                "starts a new epoch"
            )
        error = BatchLostError(text)
        self._failure = KeptError(error)
        self.close()
        return error

    def _timeout_text(self) -> str:
        at, batch = "", self._order.next_batch
        holder = self._in_flight.holding(batch)
        if holder is not None and batch is not None:
            at = f" waiting for batch {batch} ({described(holder.chunk, batch)})"
            if len(holder.missing) > 1:
                at += f"; its task is to make batches up to {max(holder.missing)}"
        return f"DataLoader timed out after {self._options.timeout_s} seconds{at}"
