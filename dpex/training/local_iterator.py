"""torch's own iterators, which note how far they have got."""

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
    """Return what torch's loader would iterate with."""
    if loader.num_workers == 0:
        return _SingleProcessDataLoaderIter(loader)
    loader.check_worker_number_rationality()
    return _MultiProcessingDataLoaderIter(loader)


class PlainIter(BaseDataLoaderIter):
    """What dpex adds to torch's iterators.

    Attributes:
        meter: Counts the epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.meter = Meter()
        super().__init__(loader)

    def read_on(self) -> None:
        """Read what was delivered before, in an epoch of a stream that goes on."""
        for _ in range(self._sampler_iter.unread):
            with contextlib.suppress(Exception):  # StopIteration, or what was raised before too
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
                # Its batch is used up, unless it is a timeout, or a worker that died.
                if received is None or received != getattr(self, "_rcvd_idx", None):
                    epoch.deliver_next()
                raise
            epoch.deliver_next()
            self.meter.in_flight = epoch.in_flight
            return data


class _GoesOn(BaseDataLoaderIter):
    """Loads a stream's state when torch's base class is set up, before the fetcher is made."""

    stream_state: StreamState | None = None

    def __init__(self, loader: Any) -> None:
        # What an epoch has drawn before is not drawn a second time.
        with generators_kept() if loader._progress.goes_on else contextlib.nullcontext():
            super().__init__(loader)
        if not self._num_workers and isinstance(self._dataset, IterableDataset):
            [self.stream_state] = self._sampler_iter.epoch.begin.stream_states or [None]
            if self.stream_state is not None:
                self.stream_state.give_dataset(self._dataset)


# They have torch's names, which profiles show.
class _SingleProcessDataLoaderIter(PlainIter, SingleProcessDataLoaderIter, _GoesOn):
    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        if isinstance(self._dataset, IterableDataset):
            if self.stream_state is not None:
                self.stream_state.give_iterator(self._dataset_fetcher)
            self._sampler_iter.epoch.read_here(self._dataset_fetcher)


class _MultiProcessingDataLoaderIter(PlainIter, MultiProcessingDataLoaderIter, _GoesOn):
    pass
