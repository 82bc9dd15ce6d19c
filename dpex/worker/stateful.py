"""States of samplers, datasets and their iterators.

Source:
    The protocol of torchdata's ``StatefulDataLoader``: ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from dpex.wire.pickling import dump_in_band
from dpex.worker.rng_state import Draws

__all__ = ["StreamState", "check_takes_state", "give_state", "has_state", "state_of"]


def has_state(thing: Any) -> bool:
    """Return whether an object has ``state_dict()`` and ``load_state_dict(state)``.

    Methods of these names that require other arguments belong to another protocol.
    """
    told, load = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return _can_be_called(told) and _can_be_called(load, "state")


def _can_be_called(method: Any, *arguments: str) -> bool:
    # This runs for every batch, and inspect.signature is slow: results for methods are cached.
    if isinstance(method, MethodType):
        return _takes(method.__func__, "self", *arguments)
    return callable(method) and _takes.__wrapped__(method, *arguments)


@functools.lru_cache
def _takes(function: Callable[..., Any], *arguments: str) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # inspect finds no signature
        return True
    return True


def state_of(thing: Any) -> Any:
    """Return a deep copy of an object's state, or None if it has none."""
    return copy.deepcopy(thing.state_dict()) if has_state(thing) else None


def check_takes_state(thing: Any) -> None:
    """Raise ``ValueError`` unless an object can load a state."""
    if not has_state(thing):
        raise ValueError(
            f"the state contains a state for a {type(thing).__name__}, which has no state_dict() "
            "and load_state_dict(). Resume with the class that saved it, or start a new epoch with "
            "load_state_dict({})"
        )


def give_state(thing: Any, state: Any) -> None:
    """Load a deep copy of a state into an object.

    Raises:
        ValueError: The object cannot load a state, or its ``load_state_dict`` raised an exception.
    """
    check_takes_state(thing)
    kind = type(thing).__name__
    try:
        thing.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise ValueError(
            f"{kind}.load_state_dict did not accept its part of the state "
            f"({type(error).__name__}: {error}). Resume with the class that saved it, or start a "
            "new epoch with load_state_dict({})"
        ) from error


@dataclass(frozen=True)
class StreamState:
    """State of the stream of an ``IterableDataset``.

    Attributes:
        batches: Number of batches read in the epoch.
        dataset: The dataset's state; None if it has none or is its own iterator.
        iterator: The state of the dataset's iterator; None if it has none.
        ended: Whether the stream has no more batches.
        generators: States of the global generators.
        epoch_over: Whether the dataset starts its next epoch from this state.
    """

    batches: int
    dataset: Any
    iterator: Any
    ended: bool
    generators: Draws
    epoch_over: bool = False

    @classmethod
    def of(cls, fetcher: Any, batches: int) -> bytes | None:
        """Return the packed state of the stream that torch's ``_IterableDatasetFetcher`` reads.

        Args:
            fetcher: The ``_IterableDatasetFetcher``.
            batches: Number of batches that it has read.

        Returns:
            The packed state; None if neither the dataset nor its iterator has a state, or if their
            ``state_dict()`` returned None.
        """
        dataset, iterator = fetcher.dataset, fetcher.dataset_iter
        of_dataset = iterator is not dataset and has_state(dataset)
        of_iterator = has_state(iterator)
        if not (of_dataset or of_iterator):
            return None
        state = cls(
            batches=batches,
            dataset=dataset.state_dict() if of_dataset else None,
            iterator=iterator.state_dict() if of_iterator else None,
            ended=fetcher.ended,
            generators=Draws.now({}),
        )
        return None if state.dataset is state.iterator is None else state.packed()

    def at_end_of_epoch(self) -> StreamState:
        """Return this state, taken at the end of an epoch, as the start of the next epoch."""
        return replace(self, batches=0, epoch_over=True)

    def give_dataset(self, dataset: Any) -> None:
        """Load the state into a dataset, before its iterator is made."""
        state = self.dataset
        if state is None and self.epoch_over and has_state(dataset):
            state = self.iterator  # the dataset was its own iterator
        if state is not None:
            dataset.load_state_dict(copy.deepcopy(state))

    def give_iterator(self, fetcher: Any) -> None:
        """Load the state into the iterator of torch's ``_IterableDatasetFetcher``."""
        if self.epoch_over:
            return
        if self.iterator is not None:
            check_takes_state(fetcher.dataset_iter)
            fetcher.dataset_iter.load_state_dict(copy.deepcopy(self.iterator))
        fetcher.ended = self.ended

    def packed(self) -> bytes:
        """Return the state as bytes, to send it to another process."""
        return dump_in_band(self, "state")

    @staticmethod
    def unpacked(packed: bytes) -> StreamState:
        """Return the state from the result of ``packed``."""
        state: StreamState = pickle.loads(packed)
        return state
