"""Memory of a batch that is filled while its samples are read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dpex import tuning
from dpex.compat.torch_names import (
    collate,
    collate_tensor_fn,
    default_collate_fn_map,
    set_worker_info,
)
from dpex.wire.segments import OWN_SEGMENTS

__all__ = ["BatchMemory"]


class BatchMemory:
    """Memory into which the large tensors of a batch's samples are copied, one sample at a time.

    The result is the batch that ``default_collate`` makes. A new sample of half a megabyte is in
    the processor's cache, but no longer once the whole batch has been read. An immediate copy
    therefore saves a second read from memory. The next sample can then reuse the sample's memory,
    which is cached too. ``BatchMemory`` copies nothing if samples are small or another function
    collates them.

    Args:
        collate_fn: Function that makes the batch of its samples; None if a later stage calls it.
        samples: Maximum number of samples.
    """

    def __init__(self, collate_fn: Callable[[Any], Any] | None, samples: int) -> None:
        self._samples = samples
        # One entry for each tensor of a sample; None for a small tensor.
        self._stacks: list[_Stack | None] = []
        # torch documents that users may replace the function that collates tensors in this map.
        self._torchs_own = default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
        self._used = collate_fn is default_collate and self._torchs_own

    def take(self, sample: Any) -> Any:
        """Copy the large tensors of the next sample into the batch's memory.

        Args:
            sample: A tensor, or tuples, lists and dicts of tensors and other values.

        Returns:
            The sample with the copies in place of its large tensors.
        """
        if self._used and not self._stacks:
            tensors: list[torch.Tensor] = []
            _map_tensors(tensors.append, sample)
            self._stacks = [_Stack.like(tensor, self._samples) for tensor in tensors]
            self._used = any(self._stacks)
        if not self._used:
            return sample
        stacks = iter(self._stacks)

        def put(tensor: torch.Tensor) -> torch.Tensor:
            stack = next(stacks, None)
            return tensor if stack is None else stack.put(tensor)

        return _map_tensors(put, sample)

    def collate(self, samples: list[Any]) -> Any:
        """Collate the samples as ``default_collate`` does.

        Args:
            samples: The return values of ``take``.
        """
        if not self._torchs_own:
            return default_collate(samples)
        return collate(
            samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stack}
        )

    def _stack(self, tensors: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
        for stack in filter(None, self._stacks):
            if (whole := stack.whole(tensors)) is not None:
                return whole
        return _stacked(tensors)


class _Stack:
    """Memory for one tensor of a batch, and its parts that already hold a sample's tensor.

    Args:
        first: The tensor of the first sample.
        samples: Maximum number of samples.
    """

    def __init__(self, first: torch.Tensor, samples: int) -> None:
        self._shape, self._dtype = first.shape, first.dtype
        shared = _in_segment(first, samples)
        if shared is None:
            shared = torch.empty((samples, *first.shape), dtype=first.dtype, device="cpu")
        self._memory = shared
        self._parts: list[torch.Tensor] = []

    @classmethod
    def like(cls, tensor: torch.Tensor, samples: int) -> _Stack | None:
        """Return a stack for tensors like ``tensor``, or None if it is small or not plain."""
        is_large = _is_plain(tensor) and tensor.nbytes >= tuning.COLLATE_BYTES
        return cls(tensor, samples) if is_large else None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the next sample's tensor and return the copy; return an unfit tensor unchanged."""
        if not _fits(tensor, self._shape, self._dtype):
            return tensor
        part = self._memory[len(self._parts)].copy_(tensor)
        self._parts.append(part)
        return part

    def whole(self, tensors: Sequence[Any]) -> torch.Tensor | None:
        """Return the batch's tensor if its parts are exactly ``tensors``, else None."""
        parts = self._parts
        same = len(tensors) == len(parts) and all(map(operator.is_, tensors, parts))
        return self._memory[: len(parts)] if same else None


def _in_segment(first: torch.Tensor, samples: int) -> torch.Tensor | None:
    """Return memory of a segment for tensors like ``first``, or None if there should be none."""
    memory = OWN_SEGMENTS.empty(samples * first.nbytes)
    if memory is None:
        return None
    return torch.from_numpy(memory).view(first.dtype).view(samples, *first.shape)


def _stacked(tensors: Sequence[Any]) -> torch.Tensor:
    """Stack tensors as torch's ``collate_tensor_fn`` does in a worker.

    In a worker, torch stacks into shared memory that it allocates like the first tensor. So the
    batch has the first tensor's dtype. torch raises an error if a tensor cannot be cast to it or
    requires a gradient. dpex uses a segment, or memory of this process.
    """
    first = tensors[0]
    if _is_plain(first) and len(tensors) * first.nbytes >= tuning.SEGMENT_BYTES:
        shared = _in_segment(first, len(tensors)) if _are_alike(tensors) else None
        if shared is not None:
            return torch.stack(list(tensors), out=shared)
    info = set_worker_info(None)
    try:
        batch: torch.Tensor = collate_tensor_fn(tensors)
    finally:
        set_worker_info(info)
    if batch.dtype == first.dtype and not batch.requires_grad:
        return batch
    return torch.stack(list(tensors), out=first.new_empty((len(tensors), *first.shape)))


def _are_alike(tensors: Sequence[Any]) -> bool:
    """Return whether tensors are plain, of one shape and dtype, and require no gradient."""
    first = tensors[0]
    return all(
        type(tensor) is torch.Tensor and _fits(tensor, first.shape, first.dtype)
        for tensor in tensors
    )


def _fits(tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return whether a copy of a tensor may be part of a batch's memory."""
    alike = tensor.shape == shape and tensor.dtype == dtype
    return alike and _is_plain(tensor) and not tensor.requires_grad


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, on the CPU, and neither quantized nor nested."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_nested)
    )


def _map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a sample with the results of ``function`` in place of its tensors.

    The function is called in the order of the tensors. Containers of user-defined classes stay
    unchanged.
    """
    kind = type(value)
    if kind is torch.Tensor:
        return function(value)
    if kind is tuple or kind is list:
        return kind([_map_tensors(function, part) for part in value])
    if kind is dict:
        return {key: _map_tensors(function, part) for key, part in value.items()}
    return value
