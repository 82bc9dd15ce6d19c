"""What samplers, datasets and their iterators say of where they stand.

Source:
    The protocol of torchdata's ``StatefulDataLoader``: ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from dpex.wire.pickling import dump_in_band
from dpex.worker.rng_state import Draws

__all__ = ["StreamState", "has_state", "state_of"]


def has_state(thing: Any) -> bool:
    """Tell whether something can say where it stands, and go there.

    Methods of these names that want to be told more are of another protocol.
    """
    told, load = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return _can_be_called(told) and _can_be_called(load, "state")


def _can_be_called(method: Any, *arguments: str) -> bool:
    # Asked for every batch, and slow to answer.
    if isinstance(method, MethodType):
        return _takes(method.__func__, "self", *arguments)
    return callable(method) and _takes.__wrapped__(method, *arguments)


@functools.lru_cache
def _takes(function: Callable[..., Any], *arguments: str) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # nothing is known of it
        return True
    return True


def state_of(thing: Any) -> Any:
    """Return a state that is not changed any more; None of what has none."""
    return copy.deepcopy(thing.state_dict()) if has_state(thing) else None


@dataclass(frozen=True)
class StreamState:
    """Where the stream of an ``IterableDataset`` stands, if it can say so.

    Attributes:
        batches: How many have been read in the epoch.
        dataset: What its dataset says.
        iterator: What the dataset's iterator says; if that is the dataset itself, only this.
        ended: Whether it has no more.
        generators: What the global generators were about to draw.
        epoch_over: Whether the dataset begins its next epoch from here.
    """

    batches: int
    dataset: Any
    iterator: Any
    ended: bool
    generators: Draws
    epoch_over: bool = False

    @classmethod
    def of(cls, fetcher: Any, batches: int) -> bytes | None:
        """Ask the dataset and the iterator of torch's ``_IterableDatasetFetcher``.

        Args:
            fetcher: What reads the stream.
            batches: How many it has read.

        Returns:
            The state as it travels; None if they have none.
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
        return state.packed()

    def at_end_of_epoch(self) -> StreamState:
        """Return the state with which the next epoch begins, if this one has been read."""
        return replace(self, batches=0, epoch_over=True)

    def give_dataset(self, dataset: Any) -> None:
        """Let a dataset stand there, before its iterator is made."""
        state = self.dataset
        if state is None and self.epoch_over and has_state(dataset):
            state = self.iterator  # which is the dataset itself
        if state is not None:
            dataset.load_state_dict(copy.deepcopy(state))

    def give_iterator(self, fetcher: Any) -> None:
        """Let the iterator of torch's ``_IterableDatasetFetcher`` stand there."""
        if self.epoch_over:
            return
        if self.iterator is not None:
            fetcher.dataset_iter.load_state_dict(copy.deepcopy(self.iterator))
        fetcher.ended = self.ended

    def packed(self) -> bytes:
        """Return it as it travels."""
        return dump_in_band(self, "state")

    @staticmethod
    def unpacked(packed: bytes) -> StreamState:
        """Make it from what ``packed`` returned."""
        state: StreamState = pickle.loads(packed)
        return state

    def plain(self) -> dict[str, Any]:
        """Return it as strings and numbers, and what dataset and iterator returned."""
        own = {"dataset": copy.deepcopy(self.dataset), "iterator": copy.deepcopy(self.iterator)}
        return {**vars(self), **own, "generators": self.generators.plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StreamState:
        """Make it from what ``plain`` returned."""
        rest = copy.deepcopy(dict(plain))
        return cls(**{**rest, "generators": Draws.from_plain(plain["generators"])})
