"""Comparison of two samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["same"]


def same(one: Any, other: Any) -> bool:
    """Return whether two samples are the same; tensors, arrays and images bit for bit.

    Dataclasses, and objects whose class does not define ``__eq__``, are compared by their
    attributes. Sparse tensors are compared by dtype and shape alone. Comparing pickles would not
    work: the pickle of a tensor subclass contains a random number.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        dense = one.layout is torch.strided
        return alike and (not dense or same(_bytes_of(one), _bytes_of(other)))
    if isinstance(one, np.ndarray) and one.dtype != object:
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(one.tobytes() == other.tobytes())
    if type(one).__module__.startswith("PIL."):
        alike = (one.mode, one.size) == (other.mode, other.size)
        return alike and bool(one.tobytes() == other.tobytes())
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    equality: Any = type(one).__eq__
    if dataclasses.is_dataclass(one) or equality is object.__eq__:
        return same(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}))
    return bool(np.all(one == other)) or one != one  # NaN


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
    flat: np.ndarray[Any, Any] = plain.contiguous().flatten().view(torch.uint8).numpy()
    return flat
