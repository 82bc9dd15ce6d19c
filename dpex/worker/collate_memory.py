"""A batch's memory, filled while its samples come."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dpex.compat.torch_names import (
    collate,
    collate_tensor_fn,
    default_collate_fn_map,
    set_worker_info,
)

__all__ = ["BatchMemory"]

# A smaller one is read from memory in less time than it takes to be put there alone.
_LARGE_BYTES = 1 << 17


class BatchMemory:
    """Copies the large tensors of a batch's samples to where ``default_collate`` would stack them.

    A sample of half a megabyte is in the processor's cache when it has been made, but not any more
    when the whole batch has been. Copied at once it is not read from memory again, and the next
    sample can take its place, which is in the cache too. Where samples are small, or another
    function collates them, nothing is done.

    Args:
        collate_fn: Makes the batch of its samples; None where a later stage does.
        samples: How many there are, at most.
    """

    def __init__(self, collate_fn: Callable[[Any], Any] | None, samples: int) -> None:
        self._samples = samples
        # One for each tensor of a sample; None where it is small.
        self._stacks: list[_Stack | None] = []
        # A user may put another way to stack tensors into torch's map, as its documentation says.
        self._torchs_own = default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
        self._used = collate_fn is default_collate and self._torchs_own

    def take(self, sample: Any) -> Any:
        """Take the batch's next sample.

        Args:
            sample: A tensor, or tuples, lists and dicts of tensors and other things.

        Returns:
            The same, with its large tensors in the batch's memory.
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
        """Do what ``default_collate`` does.

        Args:
            samples: What ``take`` returned for each.
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
    """One tensor of a batch, and those of its samples that have been put there.

    Args:
        first: The first sample's.
        samples: How many there are, at most.
    """

    def __init__(self, first: torch.Tensor, samples: int) -> None:
        self._shape, self._dtype = first.shape, first.dtype
        self._memory = torch.empty((samples, *first.shape), dtype=first.dtype, device="cpu")
        self._parts: list[torch.Tensor] = []

    @classmethod
    def like(cls, tensor: torch.Tensor, samples: int) -> _Stack | None:
        """Return one for tensors like this one, if that is of use."""
        is_large = _is_plain(tensor) and tensor.nbytes >= _LARGE_BYTES
        return cls(tensor, samples) if is_large else None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the next sample's there, and return the copy; or what does not fit as it is."""
        alike = tensor.shape == self._shape and tensor.dtype == self._dtype
        if not alike or not _is_plain(tensor) or tensor.requires_grad:
            return tensor
        part = self._memory[len(self._parts)].copy_(tensor)
        self._parts.append(part)
        return part

    def whole(self, tensors: Sequence[Any]) -> torch.Tensor | None:
        """Return the batch's tensor, if it is made of these and no others."""
        parts = self._parts
        same = len(tensors) == len(parts) and all(map(operator.is_, tensors, parts))
        return self._memory[: len(parts)] if same else None


def _stacked(tensors: Sequence[Any]) -> torch.Tensor:
    """Do what torch's ``collate_tensor_fn`` does in a worker, not in a shared memory file.

    There the first tensor has the memory made that the others are copied to. So the batch has its
    dtype, and an error says if another tensor cannot be cast to it or requires a gradient.
    """
    info = set_worker_info(None)
    try:
        batch: torch.Tensor = collate_tensor_fn(tensors)
    finally:
        set_worker_info(info)
    first = tensors[0]
    if batch.dtype == first.dtype and not batch.requires_grad:
        return batch
    return torch.stack(list(tensors), out=first.new_empty((len(tensors), *first.shape)))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its elements, which ``torch.stack`` would lay side by side."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_nested)
    )


def _map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a sample with what a function returns for each of its tensors, in order.

    Containers of the user's own classes are left as they are.
    """
    kind = type(value)
    if kind is torch.Tensor:
        return function(value)
    if kind is tuple or kind is list:
        return kind([_map_tensors(function, part) for part in value])
    if kind is dict:
        return {key: _map_tensors(function, part) for key, part in value.items()}
    return value
