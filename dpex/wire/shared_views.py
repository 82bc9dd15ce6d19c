"""Arrays and tensors of one dataset that share memory, as an array and its slices do.

A pickle of each by itself would give each its own memory. A sample that writes to one of them would
then not see its write in the others, as it does in a fork.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from dpex.wire.mapped_files import rebuild_array
from dpex.wire.memory_map import address_of

__all__ = ["SharedViews", "bounds_of"]

# Memory starts at a multiple of this many bytes from the start of its allocation, so that elements
# of every dtype stay aligned.
_ALIGNMENT = 64
# Limits for the exact comparison of objects whose bounds overlap, of which each pair is compared.
_MOST_COMPARED = 16
_MOST_WORK = 1000

_Bounds = tuple[int, int]
"""The first address of an object's elements, and the address behind the last one."""


def _layout(obj: np.ndarray[Any, Any] | torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return the address of an object's first element, the size of an element, and the strides."""
    if isinstance(obj, torch.Tensor):
        item = obj.element_size()
        return obj.data_ptr(), item, tuple(step * item for step in obj.stride())
    return address_of(obj), obj.itemsize, obj.strides


def bounds_of(obj: np.ndarray[Any, Any] | torch.Tensor) -> _Bounds | None:
    """Return the bounds of an array or a tensor; None if it has no elements."""
    if not obj.nbytes:
        return None
    first, item, strides = _layout(obj)
    last = first
    for length, step in zip(obj.shape, strides, strict=True):
        if step < 0:
            first += (length - 1) * step
        else:
            last += (length - 1) * step
    return first, last + item


def _whole(obj: np.ndarray[Any, Any] | torch.Tensor) -> np.ndarray[Any, Any] | None:
    """Return the whole memory that an object is a view of, as bytes; None if it is not writable."""
    if isinstance(obj, torch.Tensor):
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj.untyped_storage())
        return whole.numpy()
    while isinstance(obj.base, np.ndarray):
        obj = obj.base
    obj = np.asarray(obj)  # no memmap
    dense = obj.flags.c_contiguous or obj.flags.f_contiguous
    if not dense or not obj.flags.writeable or obj.dtype.hasobject:
        return None
    return obj.ravel(order="K").view(np.uint8)


def _overlap(objects: list[Any], span_bytes: int) -> bool:
    """Return whether objects with adjoining bounds have elements in common.

    Columns of a matrix have not, although their bounds overlap.
    """
    if span_bytes <= sum(obj.nbytes for obj in objects):
        return True
    if len(objects) > _MOST_COMPARED:
        return False
    try:
        return any(
            np.shares_memory(one, other, max_work=cast(Any, _MOST_WORK))
            for one, other in itertools.combinations(map(np.asarray, map(_Elements, objects)), 2)
        )
    except np.exceptions.TooHardError:
        return True


class _Elements:
    """The places of an object's elements, for numpy."""

    def __init__(self, obj: np.ndarray[Any, Any] | torch.Tensor) -> None:
        address, item, strides = _layout(obj)
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{item}",
            "data": (address, False),
            "shape": tuple(obj.shape),
            "strides": strides,
        }


@dataclass
class _Memory:
    """Memory that several objects share.

    Attributes:
        first: The first address of an object in it.
        end: The address behind the last object.
        content: Its bytes, from an aligned address on.
        address: The address of ``content``.
    """

    first: int
    end: int
    content: np.ndarray[Any, Any]
    address: int


class SharedViews:
    """The arrays and tensors of one object that share memory.

    The object is pickled twice if some of them do: ``note`` gets each of them the first time, and
    ``reduce`` the second time.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._any_view = False
        self._memories: list[_Memory] = []

    def note(self, obj: np.ndarray[Any, Any] | torch.Tensor) -> None:
        """Take an array or a tensor on the CPU, with its elements in memory, into account."""
        if isinstance(obj, torch.Tensor):
            self._tensors.append(obj)
        else:
            self._any_view = self._any_view or obj.base is not None
            self._arrays.append(obj)

    def find(self) -> bool:
        """Return whether some of the noted objects share memory; call it once."""
        # Arrays that are no views share memory only with tensors.
        noted: list[Any] = self._tensors
        if self._any_view or self._tensors:
            noted = [*noted, *self._arrays]
        placed = [(bounds, obj) for obj in noted if (bounds := bounds_of(obj)) is not None]
        placed.sort(key=lambda item: item[0])
        self._tensors, self._arrays = [], []
        together: list[Any] = []
        first = end = 0
        for (begins, ends), obj in [*placed, ((2**64, 2**64), None)]:
            if begins >= end:
                if len(together) > 1 and _overlap(together, end - first):
                    self._keep(first, end, together)
                together, first = [], begins
            together.append(obj)
            end = max(end, ends)
        return bool(self._memories)

    def _keep(self, first: int, end: int, objects: list[Any]) -> None:
        for obj in objects:
            whole = _whole(obj)
            bounds = bounds_of(whole) if whole is not None else None
            if whole is not None and bounds is not None and bounds[0] <= first and end <= bounds[1]:
                skipped = (first - bounds[0]) // _ALIGNMENT * _ALIGNMENT
                content = whole[skipped : end - bounds[0]]
                self._memories.append(_Memory(first, end, content, bounds[0] + skipped))
                return

    def reduce(self, obj: np.ndarray[Any, Any] | torch.Tensor) -> Any:
        """Return how to pickle an object in memory that others share; None for any other object."""
        bounds = bounds_of(obj)
        if bounds is None:
            return None
        place = bisect.bisect_right(self._memories, bounds[0], key=lambda memory: memory.first) - 1
        if place < 0 or bounds[1] > self._memories[place].end:
            return None
        memory = self._memories[place]
        if obj is memory.content:
            return None
        offset = _layout(obj)[0] - memory.address
        if isinstance(obj, torch.Tensor):
            details = (obj.dtype, tuple(obj.shape), obj.stride(), obj.requires_grad)
            return _tensor_in, (memory.content, offset, *details)
        layout = (obj.dtype, obj.shape, obj.strides, obj.flags.writeable)
        return rebuild_array, ("ndarray", memory.content, offset, *layout)


def _tensor_in(
    memory: np.ndarray[Any, Any],
    offset: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return a tensor in memory that others share."""
    left = (memory.nbytes - offset) // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=left, offset=offset)
    tensor = flat.as_strided(size, stride)
    return tensor.requires_grad_() if requires_grad else tensor
