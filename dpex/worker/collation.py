"""Collation of tensors into memory that the training process reads."""

from __future__ import annotations

from collections.abc import Sequence
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

__all__ = ["collated"]


def collated(samples: Any) -> Any:
    """Collate samples as ``default_collate`` does in torch's worker, large tensors into segments.

    torch documents that users may replace the function that collates tensors in its map. Their
    function is called then.
    """
    if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return default_collate(samples)
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: _stacked})


def _stacked(tensors: Sequence[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors as torch's ``collate_tensor_fn`` does in a worker.

    In a worker, torch stacks into shared memory that it allocates like the first tensor. So the
    batch has the first tensor's dtype. torch raises an error if a tensor cannot be cast to it or
    requires a gradient. dpex uses a segment, or memory of this process.
    """
    first = tensors[0]
    if _is_plain(first) and len(tensors) * first.nbytes >= tuning.SEGMENT_BYTES:
        shared = _in_segment(tensors)
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


def _in_segment(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return memory of a segment for a batch of tensors, or None if there should be none.

    The tensors must be plain, of one shape and dtype, and require no gradient.
    """
    first = tensors[0]
    alike = all(
        type(tensor) is torch.Tensor
        and tensor.shape == first.shape
        and tensor.dtype == first.dtype
        and _is_plain(tensor)
        and not tensor.requires_grad
        for tensor in tensors
    )
    memory = OWN_SEGMENTS.empty(len(tensors) * first.nbytes) if alike else None
    if memory is None:
        return None
    return torch.from_numpy(memory).view(first.dtype).view(len(tensors), *first.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, on the CPU, and neither quantized nor nested."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_nested)
    )
