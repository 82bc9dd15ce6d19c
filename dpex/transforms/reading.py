"""Samples of another dataset, read as torch would read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["read_at_once"]


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
