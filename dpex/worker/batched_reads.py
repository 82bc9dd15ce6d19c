"""Batched reads: torch calls ``__getitems__`` where a dataset defines it, else ``__getitem__``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from typing import Any

from torch.utils.data import Subset

__all__ = ["read_at_once", "reads_batches"]


def reads_batches(dataset: Any) -> bool:
    """Return whether a dataset reads a whole batch in one call.

    torch's ``Subset`` always defines ``__getitems__``, but reads sample by sample if the dataset
    that it wraps does not define it.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def read_at_once(dataset: Any, indices: list[Any]) -> Collection[Any]:
    """Return the samples that a dataset's ``__getitems__`` reads for a list of indices.

    Raises:
        TypeError: ``__getitems__`` did not return a list, or another sized iterable, with one
            sample for each index.
    """
    samples: Collection[Any] = dataset.__getitems__(indices)
    several = isinstance(samples, Sized) and not isinstance(samples, Mapping)
    if not several or len(samples) != len(indices):
        got = type(samples).__name__
        if several:
            got += f" of {len(samples)}"
        raise TypeError(
            f"__getitems__ of {type(dataset).__name__} must return a list of {len(indices)} "
            f"samples, one for each index, got {got}"
        )
    return samples
