"""Iterator of a loader with dpex's workers, as torch's loader sees it."""

from __future__ import annotations

import time
import uuid
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dpex import tuning
from dpex.compat.torch_names import BaseDataLoaderIter, DatasetKind
from dpex.compat.untraced import untraced
from dpex.protocol.batch_order import BatchOrder, IndexOrder, StreamOrder
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Run
from dpex.protocol.deferred_errors import reraise
from dpex.stats import Meter
from dpex.training.epoch import Epoch, EpochOptions, StateNotes
from dpex.worker.seeding import generators_kept

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from dpex.carriers.interface import CarrierSession
    from dpex.protocol.chunk_sizes import ChunkPlanner
    from dpex.training.checkpoint import EpochProgress
    from dpex.training.dataset_versions import DatasetVersions
    from dpex.training.sampler_epochs import SamplerEpochs

__all__ = ["DistributedIter", "initial_binding"]


def initial_binding(loader: DataLoader[Any]) -> Binding:
    """Return whether a loader's logical workers are bound to processes at first."""
    streams = loader._dataset_kind == DatasetKind.Iterable
    return Binding.ALWAYS if streams or loader.worker_init_fn else Binding.WATCHED


class DistributedIter(BaseDataLoaderIter):
    """Iterator of a loader with dpex's workers.

    Each epoch is one ``Epoch``. The iterator outlives its epochs if workers are persistent.

    Args:
        loader: The loader.
        job: The loader's job, which ``session.store`` returned.
        session: The loader's worker processes.
        planner: Planner of the chunk sizes, which keeps the costs of earlier iterations.
        versions: Source of the numbers of dataset versions.
        epochs: Epoch numbers of the loader's samplers.
        max_skipped: Maximum number of samples to leave out of an epoch.
        settings: Settings that the worker processes apply.
        seeded: Whether a loaded state has the base_seed of the first epoch.

    Attributes:
        meter: Statistics of the epoch.

    Source:
        torch's ``_MultiProcessingDataLoaderIter``: order of draws, reset, life cycle.
    """

    @untraced
    def __init__(
        self,
        loader: DataLoader[Any],
        job: Any,
        session: CarrierSession,
        planner: ChunkPlanner,
        versions: DatasetVersions,
        epochs: SamplerEpochs,
        *,
        max_skipped: int,
        settings: Any,
        seeded: bool,
    ) -> None:
        # With a base_seed from a loaded state, torch's draw must leave the generators unchanged.
        with generators_kept(loader.generator) if seeded else nullcontext():
            super().__init__(loader)
        self.meter = Meter()
        self._session = session
        self._planner = planner
        self._versions = versions
        self._sampler_epochs = epochs
        self._options = EpochOptions(
            in_order=loader.in_order,
            max_skipped=max_skipped,
            timeout_s=self._timeout,
            pin_memory=self._pin_memory,
            job=job,
            binding=initial_binding(loader),
        )
        self._notes = StateNotes(versions)
        self._epoch_number = -1
        self._published_at = time.monotonic()
        self._version = versions.new()
        self._settings = settings
        self._epoch: Epoch | None = None
        self._reset(loader, first_iter=True)

    @untraced
    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Start an epoch: the first at construction, and each further one of persistent workers."""
        # torch, too, creates the sampler's iterator twice for the first epoch.
        super()._reset(loader, first_iter)
        self._epoch_number += 1
        self._begin()

    def _begin(self) -> None:
        """Replace the epoch by a new one, and send its first chunks."""
        self._shutdown_workers()
        progress = self._epoch_progress
        if progress.base_seed is None:
            progress.base_seed, progress.iteration = int(self._base_seed), self._epoch_number
        self._base_seed, self._epoch_number = progress.base_seed, progress.iteration
        run = Run(
            key=uuid.uuid4().hex,
            loader=self._versions.loader,
            base_seed=self._base_seed,
            epoch=self._epoch_number,
            num_workers=self._num_workers,
            dataset_version=self._version,
            settings=self._settings,
        )
        self._planner.begin(free_cores=self._session.first_tasks())
        self._epoch = Epoch(
            run,
            self._order(run),
            session=self._session,
            planner=self._planner,
            options=self._options,
            notes=self._notes,
        )
        # Draws as many batches as torch draws in iter(). Each next() draws more.
        self._epoch.fill()
        # Read after drawing, because some samplers increment their epoch when they are iterated.
        self._epoch_drawn_for = self._sampler_epochs.now

    def _order(self, run: Run) -> BatchOrder:
        if self._dataset_kind == DatasetKind.Iterable:
            return StreamOrder(self._sampler_iter, self._planner, run=run)
        return IndexOrder(
            self._sampler_iter,
            self._planner,
            run=run,
            length=_length(self._index_sampler) if self._sampler_iter.whole_batches else None,
            patient=not self._timeout,
        )

    @untraced
    def _shutdown_workers(self) -> None:
        """Stop the iteration. Frameworks call this method by torch's name."""
        if self._epoch is not None:
            self._epoch.close()

    @property
    def alive(self) -> bool:
        """Whether the iterator can read further epochs."""
        return self._session.alive

    @property
    def _epoch_progress(self) -> EpochProgress:
        progress: EpochProgress = self._sampler_iter.epoch
        return progress

    @untraced
    def _next_data(self) -> Any:
        assert self._epoch is not None
        try:
            with self.meter.asked():
                try:
                    return self._next_batch()
                finally:
                    self.meter.in_flight = self._epoch.batches_in_flight
        finally:
            self._publish()

    def _publish(self) -> None:
        """Publish the statistics as Ray's metrics, at intervals and at the end of the epoch."""
        now = time.monotonic()
        over = self._epoch is None or not self._epoch.open
        if over or now - self._published_at > tuning.PUBLISH_S:
            self._published_at = now
            stats = self.meter.stats()
            self._session.publish(stats, self.meter.published)
            self.meter.published = stats

    def _next_batch(self) -> Any:
        assert self._epoch is not None
        self._epoch.raise_failure()
        if not self._epoch.open:
            raise StopIteration
        if not self._epoch.started:
            if self._sampler_epochs.now != self._epoch_drawn_for:
                self._draw_again()
            self._sampler_epochs.begin()
        try:
            entry = self._epoch.next_entry(self.meter)
        except StopIteration:
            if not self._persistent_workers:
                self._shutdown_workers()
            self._sampler_epochs.end()
            raise
        if entry.outcome == "error":
            reraise(entry.value)
        return entry.value

    def _draw_again(self) -> None:
        """Replace the epoch: the indices drawn before ``set_epoch()`` belong to another epoch."""
        assert self._epoch is not None
        try:
            self._sampler_iter = iter(self._index_sampler)
            self.meter.count_samples_of(self._epoch_progress)
            if not self._persistent_workers:
                self._version = self._versions.new()
            self._begin()
        except BaseException:  # an interrupt, or Ray was shut down: there is no run
            self._epoch.cancel(None)
            raise


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except Exception:  # torch does not call len() here, so its error must not end the iteration
        return None
