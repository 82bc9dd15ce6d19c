"""Batches in pinned (page-locked) memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dpex.compat.torch_names import pin_memory
from dpex.wire.pickling import Pickled, load

__all__ = ["pinned"]


def pinned(batch: Pickled) -> Any:
    """Return an unpickled batch in pinned memory; each large array is copied once.

    Source:
        torch's ``pin_memory``. It keeps tensors that are pinned, pins small tensors, and calls
        ``pin_memory()`` of user classes.
    """
    return pin_memory(load(batch, _copy))


def _copy(buffer: np.ndarray[Any, Any]) -> torch.Tensor:
    own = torch.empty(buffer.nbytes, dtype=torch.uint8, pin_memory=True)
    np.copyto(own.numpy(), buffer)
    return own
