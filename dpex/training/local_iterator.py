"""torch's own iterators, extended to record how far an epoch has been delivered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from dpex.compat.torch_names import (
    BaseDataLoaderIter,
    MultiProcessingDataLoaderIter,
    SingleProcessDataLoaderIter,
)
from dpex.stats import Meter
from dpex.worker.seeding import generators_kept
from dpex.worker.stateful import StreamState

__all__ = ["PlainIter", "plain_iterator"]


def plain_iterator(loader: Any) -> PlainIter:
    """Return the iterator that torch's loader would create, extended by dpex."""
    if loader.num_workers == 0:
        return _SingleProcessDataLoaderIter(loader)
    loader.check_worker_number_rationality()
    return _MultiProcessingDataLoaderIter(loader)


class PlainIter(BaseDataLoaderIter):
    """Additions of dpex to torch's iterators.

    Attributes:
        meter: Statistics of the epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.meter = Meter()
        super().__init__(loader)

    def read_on(self) -> None:
        """Read and discard the batches of a resumed stream that were delivered before."""
        for _ in range(self._sampler_iter.unread):
            with contextlib.suppress(Exception):  # StopIteration, or an error delivered before
                next(self)

    def _next_data(self) -> Any:
        epoch = self._sampler_iter.epoch
        next_data: Callable[[], Any] = super()._next_data
        received = getattr(self, "_rcvd_idx", None)
        with self.meter.asked():
            try:
                data = next_data()
            except StopIteration:
                epoch.finish()
                raise
            except Exception:
                # The error takes the place of a batch, unless it is a timeout or a worker's death.
                if received is None or received != getattr(self, "_rcvd_idx", None):
                    epoch.deliver_next()
                raise
            epoch.deliver_next()
            self.meter.in_flight = epoch.in_flight
            return data


class _GoesOn(BaseDataLoaderIter):
    """Base class that loads a stream's state before torch creates the fetcher."""

    stream_state: StreamState | None = None

    def __init__(self, loader: Any) -> None:
        # In a resumed epoch, torch's draws here must leave the generators unchanged.
        with generators_kept() if loader._progress.goes_on else contextlib.nullcontext():
            super().__init__(loader)
        if not self._num_workers and isinstance(self._dataset, IterableDataset):
            [self.stream_state] = self._sampler_iter.epoch.begin.stream_states or [None]
            if self.stream_state is not None:
                self.stream_state.give_dataset(self._dataset)


# The names of these classes equal torch's, because profiles show them.
class _SingleProcessDataLoaderIter(PlainIter, SingleProcessDataLoaderIter, _GoesOn):
    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        if isinstance(self._dataset, IterableDataset):
            if self.stream_state is not None:
                self.stream_state.give_iterator(self._dataset_fetcher)
            self._sampler_iter.epoch.read_here(self._dataset_fetcher)


class _MultiProcessingDataLoaderIter(PlainIter, MultiProcessingDataLoaderIter, _GoesOn):
    pass
