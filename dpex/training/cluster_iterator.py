"""Iterator of a loader in distribute mode.

The training loop's thread draws indices in exactly torch's order, and sends them to the cluster in
chunks. The cluster returns blocks of batches, which the same thread delivers.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from dpex.compat.torch_names import BaseDataLoaderIter, DatasetKind
from dpex.errors import ChunkLostError, DpexError, SerializationError, TooManySkippedError
from dpex.stats import Meter
from dpex.training.chunk_sizes import ChunkPlanner
from dpex.training.deferred_errors import KeptError, reraise
from dpex.training.in_flight import ChunkInFlight, described, joined_streams, lost_error
from dpex.training.prefetch import Demand, IndexDemand, StreamDemand
from dpex.wire.block_format import BLOCK_LOST, Entry
from dpex.worker.binding import Binding
from dpex.worker.logical_worker import Run
from dpex.worker.map_style import Chunk
from dpex.worker.seeding import generators_kept
from dpex.worker.training_settings import Settings

if TYPE_CHECKING:
    from dpex.dataloader import DpexDataLoader
    from dpex.pipeline.session import RemoteRun, Session
    from dpex.training.checkpoint import EpochProgress
    from dpex.training.epoch_number import SamplerEpochs
    from dpex.wire.receiver import Arrival

__all__ = ["ClusterIter"]

logger = logging.getLogger("dpex")

# Maximum number of chunks drawn in one call of next(), and seconds to draw each. They limit how
# much longer sampling makes one training step.
_CHUNKS_PER_STEP = 2
_DRAW_S = 0.01
# The wait for a batch lasts this long before it draws further chunks.
_PROMPT_S = 0.05
# Chunks drawn within this time after a message are gathered for the next message.
_GATHER_S = 0.002
# dpex logs why a batch is late after this time, then at intervals that double up to _MOST_NOTE_S.
_SLOW_WAIT_S = 5.0
_MOST_NOTE_S = 300.0
_PUBLISH_EVERY_S = 1.0
# The epoch fails at this number of losses (of a pipeline, or of blocks) without a block between.
_MOST_LOSSES = 3
# Name of the error that Ray raises if both the object store and the disk are full.
_NO_ROOM = "OutOfDiskError"
_ROOM_S = 2.0
_ROOM_TRIES = 6
# stacklevel from _note_state to the user's loop: _note_state, _collect, _wait_for_batch,
# _next_batch, _next_data, __next__, the loop.
_USERS_LOOP = 7
# How often dpex sends a stream's chunk to a task that makes no other chunk.
_STREAM_TRIES = 2


class ClusterIter(BaseDataLoaderIter):
    """Iterator of a loader whose workers are Ray tasks.

    Args:
        loader: The loader.
        job_key: Key of the loader's job, which ``session.store`` returned.
        session: The loader's job and pipelines on the cluster.
        planner: Planner of the chunk sizes, which keeps the costs of earlier iterations.
        generations: Source of the numbers of dataset versions.
        epochs: Epoch numbers of the loader's samplers.

    Attributes:
        meter: Statistics of the epoch.

    Source:
        torch's ``_MultiProcessingDataLoaderIter``: order of draws, reset, life cycle.
    """

    def __init__(
        self,
        loader: DpexDataLoader[Any],
        job_key: str,
        session: Session,
        planner: ChunkPlanner,
        generations: Generations,
        epochs: SamplerEpochs,
    ) -> None:
        # With a base_seed from a loaded state, torch's draw must leave the generators unchanged.
        with generators_kept(loader.generator) if loader._progress.seeded else nullcontext():
            super().__init__(loader)
        self.meter = Meter()
        self._session = session
        self._planner = planner
        self._generations = generations
        self._sampler_epochs = epochs
        self._loader_options = _Options(loader)
        self._epoch = -1
        self._published_at = time.monotonic()
        self._job_key = job_key
        self._generation = generations.new()
        self._settings = Settings.now(forks=loader._forks)
        self._restart_noted = False
        self._opening: Callable[[], RemoteRun] | None = None
        self._run: RemoteRun | None = None
        self._reset(loader, first_iter=True)

    def _reset(self, loader: DpexDataLoader[Any], first_iter: bool = False) -> None:
        """Start an epoch: the first at construction, and each further one of persistent workers."""
        # torch, too, creates the sampler's iterator twice for the first epoch.
        super()._reset(loader, first_iter)
        self._epoch += 1
        self._begin()

    def _begin(self) -> None:
        self._end_run()
        epoch = self._epoch_progress
        if epoch.base_seed is None:
            epoch.base_seed, epoch.iteration = int(self._base_seed), self._epoch
        self._base_seed, self._epoch = epoch.base_seed, epoch.iteration
        run = Run(
            key=uuid.uuid4().hex,
            loader=self._generations.loader,
            base_seed=self._base_seed,
            epoch=self._epoch,
            num_workers=self._num_workers,
            generation=self._generation,
            settings=self._settings,
        )
        self._run_spec = run
        self._planner.begin(free_cores=self._session.free_cores)
        self._draining = False
        self._failure: KeptError | None = None
        self._sent = 0
        self._unsent: list[Chunk] = []
        self._flushed_at = 0.0
        self._waiting: dict[int, ChunkInFlight] = {}
        self._stash: dict[int, Entry] = {}
        self._errors: list[str] = []
        self._errors_came_at = 0
        self._losses = 0
        self._demand = self._make_demand()
        self._open_run()
        # Draws as many batches as torch draws in iter(). Each next() draws more.
        self._fill()
        # Read after drawing, because some samplers increment their epoch when they are iterated.
        self._epoch_drawn_for = self._sampler_epochs.now

    def _make_demand(self) -> Demand:
        if self._dataset_kind == DatasetKind.Iterable:
            return StreamDemand(self._sampler_iter, self._planner, run=self._run_spec)
        return IndexDemand(
            self._sampler_iter,
            self._planner,
            run=self._run_spec,
            length=_length(self._index_sampler) if self._sampler_iter.whole_batches else None,
            patient=not self._timeout,
        )

    def _open_run(self) -> None:
        """Start opening a run; ``_opened`` waits until it is open."""
        streams = self._dataset_kind == DatasetKind.Iterable
        stateful = streams or self._loader_options.worker_init_fn is not None
        self._opening = self._session.open(
            self._run_spec,
            self._job_key,
            binding=Binding.ALWAYS if stateful else Binding.WATCHED,
            pin_memory=self._pin_memory,
        )

    def _opened(self) -> None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._run = opening()

    def _end_run(self) -> None:
        self._opening = None
        if self._run is not None:
            self._run.end()
            self._run = None

    def _shutdown_workers(self) -> None:
        """Stop the iteration. Frameworks call this method by torch's name."""
        self._end_run()

    @property
    def alive(self) -> bool:
        """Whether the iterator can read further epochs."""
        return self._session.alive

    @property
    def _epoch_progress(self) -> EpochProgress:
        progress: EpochProgress = self._sampler_iter.epoch
        return progress

    # --- drawing indices --------------------------------------------------------------------------

    def _fill(self) -> None:
        """Draw and send as many batches ahead as torch does."""
        if not self._draining:
            self._demand.fill(self._take_chunk)
        self._flush()

    def _ask_ahead(self, *, waiting: bool = False) -> bool:
        """Draw and send one chunk more than torch would, if costs allow it.

        Args:
            waiting: Whether the training loop waits for a batch. If so, drawing stops as soon as
                the receiver has news.

        Returns:
            False if nothing more can be requested now.
        """
        stop_at = time.monotonic() + _DRAW_S

        def enough() -> bool:
            if waiting:
                time.sleep(0)  # release the GIL for the receiver thread
                assert self._run is not None
                return self._run.receiver.wait(0, self._quiet_seen)
            return time.monotonic() >= stop_at

        asked = not self._draining and self._demand.ask_ahead(self._take_chunk, enough)
        self._flush()
        return asked

    def _take_chunk(self, chunk: Chunk) -> None:
        number = self._sent + len(self._unsent)
        self._unsent.append(replace(chunk, run=self._run_spec, number=number))
        # Gathers chunks that are drawn in quick succession, so that none waits long.
        if time.monotonic() - self._flushed_at > _GATHER_S:
            self._flush()

    def _flush(self) -> None:
        """Send the chunks that have been drawn."""
        self._opened()
        self._flushed_at = time.monotonic()
        if self._unsent:
            try:
                chunks, self._unsent = self._unsent, []
                self._send(chunks)
            except Exception as error:  # without these chunks the epoch cannot be completed
                if not self._session.alive:
                    self._fail(error)
                self._give_up(error)
                raise
            except BaseException:
                self._give_up(None)
                raise

    def _send(
        self,
        chunks: list[Chunk],
        *,
        alone: bool = False,
        tries: int = 1,
        one_by_one: bool = False,
    ) -> None:
        assert self._run is not None
        try:
            self._run.feed(
                chunks,
                alone=alone,
                parallel=self._planner.parallel,
                starting=self._planner.free_cores,
                one_by_one=one_by_one,
            )
        except SerializationError as error:
            for chunk in chunks:
                for batch in chunk.numbers:
                    self._fail_batch(batch, error)
            return
        for chunk in chunks:
            self._waiting[chunk.number] = ChunkInFlight(chunk, alone, tries)
            self._sent += 1

    # --- delivering batches -----------------------------------------------------------------------

    def _next_data(self) -> Any:
        try:
            with self.meter.asked():
                try:
                    return self._next_batch()
                finally:
                    self.meter.in_flight = self._demand.in_flight
        finally:
            self._publish()

    def _publish(self) -> None:
        """Publish statistics as Ray metrics: at most once a second, and at the epoch's end."""
        now = time.monotonic()
        if self._run is None or now - self._published_at > _PUBLISH_EVERY_S:
            self._published_at = now
            stats = self.meter.stats(samples=self._epoch_progress.samples)
            self._session.publish(stats, self.meter.published)
            self.meter.published = stats

    def _next_batch(self) -> Any:
        if self._failure is not None:
            self._failure.reraise()
        if self._run is None:
            raise StopIteration
        first = not self._demand.delivered
        if first:
            if self._sampler_epochs.now != self._epoch_drawn_for:
                # set_epoch() was called between iter() and the first next(), so the indices drawn
                # in iter() belong to another epoch.
                try:
                    self._sampler_iter = iter(self._index_sampler)
                    if not self._persistent_workers:
                        self._generation = self._generations.new()
                    self._begin()
                except BaseException:  # an interrupt, or Ray was shut down: there is no run
                    self._give_up(None)
                    raise
            self._sampler_epochs.begin()
        while True:
            self._fill()
            entry = self._wait_for_batch()
            self._fill()
            # The training loop has waited for the first batch, so drawing ahead must not delay it.
            for _ in range(0 if first else _CHUNKS_PER_STEP):
                if not self._ask_ahead():
                    break
            if entry.left_out:
                self._leave_out(entry)
            if entry.outcome != "nothing":
                break
        if entry.outcome == "error":
            reraise(entry.value)
        return entry.value

    def _leave_out(self, entry: Entry) -> None:
        """Count and log the samples that were left out of a batch.

        Raises:
            TooManySkippedError: The epoch has more than ``max_skipped`` such samples.
        """
        for index, error in entry.left_out:
            self.meter.skipped += 1
            logger.warning("sample %r is left out of batch %d: %s", index, entry.batch, error)
            if self.meter.skipped > self._loader_options.max_skipped:
                self._failure = KeptError(
                    TooManySkippedError(
                        f"{self.meter.skipped} samples of this epoch cannot be read, more than "
                        f"max_skipped={self._loader_options.max_skipped}; the last one is "
                        f"{index!r}: {error}. Mend the data, or allow more"
                    )
                )
                self._end_run()
                self._failure.reraise()

    def _wait_for_batch(self) -> Entry:
        """Return the next batch, or the error or the empty entry in its place."""
        deadline = time.monotonic() + self._timeout if self._timeout else None
        began = time.monotonic()
        note_at, note_s = began + _SLOW_WAIT_S, _SLOW_WAIT_S
        while True:
            self._collect()
            batch = self._demand.choose(self._stash, in_order=self._loader_options.in_order)
            if batch is not None:
                entry = self._stash.pop(batch)
                self._demand.deliver(entry)
                return entry
            if not self._waiting:
                self._fill()  # nothing is drawn while chunks may be lost: resume drawing
            if self._demand.next_batch is None:
                if not self._persistent_workers:
                    self._shutdown_workers()
                else:
                    self._end_run()
                self._demand.finish()
                self._sampler_epochs.end()
                raise StopIteration
            wait_s = _SLOW_WAIT_S
            if deadline is not None:
                wait_s = min(wait_s, deadline - time.monotonic())
                if wait_s <= 0:
                    raise RuntimeError(f"{self._timeout_text()}. {self._session.waiting_text()}")
            assert self._run is not None
            if self._waiting and self._run.receiver.ended:
                self._go_on_elsewhere()
            prompt_s = min(wait_s, _PROMPT_S)
            if self._run.receiver.wait(prompt_s, self._quiet_seen):
                continue
            if self._ask_ahead(waiting=True):
                continue  # the wait is used to draw further ahead
            arrived = self._run.receiver.wait(wait_s - prompt_s, self._quiet_seen)
            if not arrived and self._run.forsaken(self._planner.batch_s):
                # ``forsaken`` reports a node's death only once, so this loss need not count.
                self._losses -= 1
                self._go_on_elsewhere()
            if not arrived and deadline is None and time.monotonic() >= note_at:
                note_s = min(2 * note_s, _MOST_NOTE_S)
                note_at = time.monotonic() + note_s
                logger.warning("%s", self._session.waiting_text())
                self._session.check_still_possible(time.monotonic() - began)

    @property
    def _quiet_seen(self) -> int:
        """The ``quiet_above`` argument of ``Receiver.wait``.

        While chunks are in flight, a wait ends at the latest when all sent chunks are done.
        """
        return self._sent - 1 if self._waiting else self._sent

    def _collect(self) -> None:
        """Process the blocks and errors that have arrived."""
        assert self._run is not None
        receiver = self._run.receiver
        # Read before the loop, so that the loop takes every block of the chunks that it counts.
        quiet_at = receiver.quiet_at
        while (arrival := receiver.take()) is not None:
            self._losses = 0
            block = arrival.block
            sent = self._waiting.get(block.chunk)
            if block.run != self._run_spec.key:
                continue
            self._note_state(arrival)
            if sent is None:
                continue
            for entry in arrival.batches:
                if entry.outcome == "end":
                    self._demand.end_stream(entry.batch, entry.state)
                    sent.missing.clear()
                elif entry.batch in sent.missing:
                    sent.missing.discard(entry.batch)
                    self._stash[entry.batch] = entry
            self._planner.observe(
                batches=len(arrival.batches),
                seconds=block.costs.seconds,
                cpu_seconds=block.costs.cpu_seconds,
                size_bytes=block.size_bytes,
            )
            self.meter.arrived(
                block.costs,
                size_bytes=block.size_bytes,
                transfer_s=arrival.transfer_s,
                decode_s=arrival.decode_s,
            )
            if not sent.missing:
                del self._waiting[block.chunk]
        errors = receiver.take_errors()
        if errors:
            # Sends nothing new until it is known which chunk is lost.
            self._errors.extend(errors)
            self._errors_came_at = self._sent
            self._draining = True
        if self._waiting and quiet_at >= self._sent:
            self._recover()
        if not self._waiting:
            self._draining = False
            if self._sent > self._errors_came_at:
                self._errors = []  # chunks sent after the errors have arrived

    def _note_state(self, arrival: Arrival) -> None:
        """Report once if the state of a logical worker differs from that of torch's worker."""
        costs, generations = arrival.block.costs, self._generations
        if not (costs.after_restart or costs.late_changes):
            return
        numbers = [entry.batch for entry in arrival.batches]
        if costs.after_restart and not self._restart_noted:
            self._restart_noted = True
            logger.warning(
                "the process of logical worker %d has ended: what it kept (generators, counters, "
                "what worker_init_fn made) begins again with batch %d",
                min(numbers) % self._num_workers,
                min(numbers),
            )
        if costs.late_changes and not generations.change_noted:
            generations.change_noted = True
            warnings.warn(
                f"one of the batches up to {max(numbers)} changed its worker's dataset or "
                "collate_fn, which the first batches had not. Until then dpex let any process make "
                "any batch, so this state is not torch's in this epoch. Pass a worker_init_fn, "
                "which may do nothing, to keep every logical worker in one process from its first "
                "batch on",
                stacklevel=_USERS_LOOP,
            )

    def _recover(self) -> None:
        """Resend the batches in flight, which are lost.

        A task makes many batches, so dpex cannot know which batch killed it. It resends each batch
        to a task that makes no other batch. A batch that is lost again becomes an error. A stream's
        batches stay together and get more tries. If only blocks were lost, dpex resends the chunks
        as they were.
        """
        self._resend(self._send_one_by_one)

    def _resend(self, send: Callable[[list[ChunkInFlight]], None]) -> None:
        """Resend all chunks in flight with ``send``, or fail the epoch."""
        lost, self._waiting = list(self._waiting.values()), {}
        try:
            send(lost)
        except Exception as error:
            self._fail(error)
        except BaseException:  # an interrupt, after which these batches would be missing
            self._give_up(None)
            raise

    def _send_one_by_one(self, lost: list[ChunkInFlight]) -> None:
        self._draining = False
        if self._errors and all(error.startswith(BLOCK_LOST) for error in self._errors):
            self._make_again(lost)
            return
        reason = "; ".join(dict.fromkeys(self._errors)) or "no reason known"
        self._errors = []
        no_room = _NO_ROOM in reason
        if no_room:
            # All finished blocks have been read, so Ray soon frees them. Then a single block fits
            # where several blocks did not.
            time.sleep(_ROOM_S)
        most_tries = _ROOM_TRIES if no_room else _STREAM_TRIES
        again: list[Chunk] = []
        again_alone: list[ChunkInFlight] = []
        for sent in joined_streams(lost):
            if not sent.alone:
                again.extend(sent.rest(most=1))
                continue
            if (sent.chunk.stream or no_room) and sent.tries < most_tries:
                # The worker process that died may have been that of another stream.
                sent.tries += 1
                again_alone.append(sent)
                continue
            if sent.chunk.stream:  # the error of the first lost batch ends the stream
                self._demand.end_stream(min(sent.missing) + sent.chunk.stride)
                sent.missing = {min(sent.missing)}
            for batch in sent.missing:
                self._fail_batch(batch, lost_error(sent.chunk, batch, reason))
        self.meter.retries += len(again)
        if again:
            logger.warning(
                "workers died on %d batches (%s); they are tried again one by one",
                len(again),
                reason,
            )
            self._send_again(again, alone=True, one_by_one=no_room)
        for sent in again_alone:
            self._send_again(list(sent.rest()), alone=True, tries=sent.tries, one_by_one=no_room)

    def _make_again(self, lost: list[ChunkInFlight]) -> None:
        """Resend the batches whose blocks were lost with the process that made them."""
        self._losses += 1
        if self._losses == _MOST_LOSSES:
            self._fail(None)
        batches = sum(len(sent.missing) for sent in lost)
        logger.warning("blocks were lost with a worker process; %d batches are made again", batches)
        self._errors = []
        self.meter.retries += batches
        for sent in joined_streams(lost):
            self._send_again(list(sent.rest()), alone=sent.alone, tries=sent.tries)

    def _go_on_elsewhere(self) -> None:
        """Resend the batches in flight to a new pipeline, because the old pipeline was lost.

        Raises:
            ChunkLostError: The old pipeline ended without being lost, or the session has ended.
                Or this is the third loss since a block arrived.
        """
        assert self._run is not None
        failure = self._run.failure()
        self._errors.extend(self._run.receiver.take_errors())
        self._losses += 1
        if not self._run.lost or not self._session.alive or self._losses == _MOST_LOSSES:
            self._fail(failure)
        logger.warning(
            "the pipeline on the cluster was lost (%s); a new one goes on from batch %d",
            failure,
            self._demand.next_batch,
        )
        self._resend(self._send_to_another)

    def _send_to_another(self, lost: list[ChunkInFlight]) -> None:
        self._end_run()
        self._run_spec = replace(self._run_spec, key=uuid.uuid4().hex)
        self._sent = 0
        self._draining = False
        self._errors = []
        self._open_run()
        self._opened()
        for alone in (False, True):
            sent_so = [sent for sent in lost if sent.alone == alone]
            self._send_again([c for sent in sent_so for c in sent.rest()], alone=alone)

    def _send_again(self, chunks: list[Chunk], **how: Any) -> None:
        if chunks:
            numbered = [
                replace(chunk, run=self._run_spec, number=number)
                for number, chunk in enumerate(chunks, self._sent)
            ]
            self._send(numbered, **how)

    def _fail_batch(self, batch: int, error: DpexError) -> None:
        """Deliver an error in place of a batch."""
        self._stash[batch] = Entry(batch, KeptError(error), "error")

    def _fail(self, cause: BaseException | None) -> NoReturn:
        """Raise now, and at every further ``next()``, because the pipeline stopped in mid-epoch."""
        raise self._give_up(cause) from cause

    def _give_up(self, cause: BaseException | None) -> DpexError:
        """End the run, and return the error that every further ``next()`` raises."""
        where = (
            f"with {self._demand.in_flight} batches outstanding; the next one is "
            f"{self._demand.next_batch}"
        )
        if self._session.alive:
            reason = "; ".join(dict.fromkeys(self._errors)) or str(cause or "no reason known")
            text = f"the pipeline on the cluster ended {where}. Ray says: {reason}"
        else:
            text = f"the loader was closed, or Ray was shut down or lost, {where}"
        error = ChunkLostError(text)
        self._failure = KeptError(error)
        self._end_run()
        return error

    def _timeout_text(self) -> str:
        at = ""
        batch = self._demand.next_batch
        for sent in self._waiting.values():
            if batch in sent.missing:
                at = f" waiting for batch {batch} ({described(sent.chunk, batch)})"
                if len(sent.missing) > 1:
                    at += f"; its task is to make batches up to {max(sent.missing)}"
        return f"DataLoader timed out after {self._timeout} seconds{at}"


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except Exception:  # torch does not call len() here, so its error must not end the iteration
        return None


class Generations:
    """Source of the numbers of dataset versions, for the iterators of one loader.

    Attributes:
        loader: Identity of the loader.
        change_noted: Whether dpex has warned that a batch changed a copy, although the first
            batches had not.
    """

    def __init__(self) -> None:
        self.loader = uuid.uuid4().hex
        self.change_noted = False
        self._numbers = itertools.count()

    def new(self) -> int:
        """Return the number of a new dataset version."""
        return next(self._numbers)


class _Options:
    """Options that an iterator reads from its loader, without a reference to the loader."""

    def __init__(self, loader: DpexDataLoader[Any]) -> None:
        self.in_order = loader.in_order
        self.max_skipped = loader.max_skipped
        self.worker_init_fn: Callable[[int], None] | None = loader.worker_init_fn
