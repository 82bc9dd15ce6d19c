"""How torch reads a batch: at once, where a dataset knows a way, or one sample after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

__all__ = ["read_at_once", "reads_batches"]


def reads_batches(dataset: Any) -> bool:
    """Tell whether a dataset has a way of its own to read a batch.

    torch's ``Subset`` always offers one, but may ask what it is of for one sample after the other.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def read_at_once(dataset: Any, indices: list[Any]) -> Sequence[Any]:
    """Return what a dataset's ``__getitems__`` gives for some indices.

    Raises:
        TypeError: It is not a list of one sample for each.
    """
    samples = dataset.__getitems__(indices)
    if not isinstance(samples, Sequence) or len(samples) != len(indices):
        raise TypeError(
            f"__getitems__ of {type(dataset).__name__} must return a list of {len(indices)} "
            f"samples, one for each index, got {type(samples).__name__}"
        )
    return samples
