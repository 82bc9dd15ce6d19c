"""torch's own iterators, extended to record how far an epoch has been delivered."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from dpex.compat.torch_names import (
    BaseDataLoaderIter,
    IterableDatasetFetcher,
    MultiProcessingDataLoaderIter,
    SingleProcessDataLoaderIter,
)
from dpex.compat.untraced import untraced, untraced_alone
from dpex.stats import Meter
from dpex.worker.seeding import generators_kept
from dpex.worker.stateful import StreamState, has_state

__all__ = ["TorchIter", "torch_iterator"]


def torch_iterator(loader: Any) -> TorchIter:
    """Return the iterator that torch's loader would create, extended by dpex."""
    if loader.num_workers == 0:
        return _SingleProcessDataLoaderIter(loader)
    loader.check_worker_number_rationality()
    return _MultiProcessingDataLoaderIter(loader)


class TorchIter(BaseDataLoaderIter):
    """Additions of dpex to torch's iterators.

    Attributes:
        meter: Statistics of the epoch.
    """

    @untraced
    def __init__(self, loader: Any) -> None:
        self.meter = Meter()
        super().__init__(loader)

    def read_on(self) -> None:
        """Read and discard the batches of a resumed stream that were delivered before.

        Raises:
            RuntimeError: A worker has died, or a batch has not come within the loader's timeout.
        """
        with self._sampler_iter.epoch.owner.rereading():
            for _ in range(self._sampler_iter.unread):
                received = self._received
                try:
                    next(self)
                except StopIteration:
                    return
                except Exception:
                    if not self._replaced_batch(received):
                        raise

    @property
    @untraced
    def _received(self) -> int | None:
        """Number of the next batch of torch's workers; None if there are none."""
        return getattr(self, "_rcvd_idx", None)

    def _replaced_batch(self, received: int | None) -> bool:
        """Return whether an error took the place of a batch.

        A timeout and the death of a worker do not.

        Args:
            received: ``_received`` before the error.
        """
        return received is None or received != self._received

    @untraced_alone
    def _next_data(self) -> Any:
        epoch = self._sampler_iter.epoch
        next_data: Callable[[], Any] = super()._next_data
        received = self._received
        with self.meter.asked():
            try:
                data = next_data()
            except StopIteration:
                epoch.finish()
                raise
            except Exception:
                if self._replaced_batch(received):
                    epoch.deliver_next()
                raise
            epoch.deliver_next()
            self.meter.in_flight = epoch.in_flight
            return data


class _Resumable(BaseDataLoaderIter):
    """Base class that loads a stream's state before torch creates the fetcher."""

    stream_state: StreamState | None = None

    def __init__(self, loader: Any) -> None:
        progress = loader._progress
        # torch draws a base_seed here, which the saved process had drawn before.
        own = None if progress.draws_base_seed else loader.generator
        with generators_kept(own) if progress.seeded else contextlib.nullcontext():
            super().__init__(loader)
        if self._num_workers or not isinstance(self._dataset, IterableDataset):
            return
        [saved] = self._sampler_iter.epoch.begin.stream_states or [None]
        self.stream_state = saved or progress.stream_at_end
        progress.stream_at_end = None
        if self.stream_state is not None:
            progress.note_fresh_stream(self._dataset)
            self.stream_state.give_dataset(self._dataset)


class _ResumedFetcher:
    """Fetcher of an epoch that starts where the dataset's last epoch has ended.

    A dataset may have nothing left to read there. Then it is read from its beginning, as it would
    be in the process that saved the state.

    Args:
        fetcher: torch's fetcher of the epoch.
        fresh: State of the dataset before a state was loaded into it.
    """

    def __init__(self, fetcher: Any, fresh: Any) -> None:
        self._fetcher = fetcher
        self._fresh = fresh
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, request: Any) -> Any:
        """Return the next batch, as torch's fetcher does."""
        is_first, self._is_first = self._is_first, False
        try:
            return self._fetcher.fetch(request)
        except StopIteration:
            if not is_first or not has_state(self.dataset):
                raise
        self.dataset.load_state_dict(copy.deepcopy(self._fresh))
        self._fetcher = IterableDatasetFetcher(
            self.dataset, self.auto_collation, self.collate_fn, self.drop_last
        )
        return self._fetcher.fetch(request)


# The names of these classes equal torch's, because profiles show them.
class _SingleProcessDataLoaderIter(TorchIter, SingleProcessDataLoaderIter, _Resumable):
    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        if isinstance(self._dataset, IterableDataset):
            state = self.stream_state
            if state is not None:
                state.give_iterator(self._dataset_fetcher)
            if state is None or state.epoch_over:
                for fresh in loader._progress.fresh_stream:
                    self._dataset_fetcher = _ResumedFetcher(self._dataset_fetcher, fresh)
            self._sampler_iter.epoch.read_here(self._dataset_fetcher)


class _MultiProcessingDataLoaderIter(TorchIter, MultiProcessingDataLoaderIter, _Resumable):
    _last_seed: tuple[int, int] | None = None

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        if not self._persistent_workers:
            return
        # Persistent workers draw one base_seed. A process that resumes must not draw another.
        epoch = self._sampler_iter.epoch
        if epoch.base_seed is None:
            base_seed, iteration = self._last_seed or (int(self._base_seed), -1)
            epoch.base_seed, epoch.iteration = base_seed, iteration + 1
        self._last_seed = epoch.base_seed, epoch.iteration
