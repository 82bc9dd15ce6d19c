"""Private names of torch: the parts of its loader and its workers that dpex uses too.

torch has no public API for these parts, and dpex needs them to deliver the same batches. So the
import of this module raises ``ImportError`` if torch lacks a name.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from dpex.compat.private_names import PrivateName, Shortcut

try:
    from torch._utils import ExceptionWrapper
    from torch.utils._pytree import tree_map_only
    from torch.utils.data._utils import worker as _worker
    from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map
    from torch.utils.data._utils.fetch import _IterableDatasetFetcher as IterableDatasetFetcher
    from torch.utils.data._utils.pin_memory import pin_memory
    from torch.utils.data._utils.worker import WorkerInfo
    from torch.utils.data._utils.worker import _generate_state as numpy_seed
    from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter
    from torch.utils.data.dataloader import _DatasetKind as DatasetKind
    from torch.utils.data.dataloader import (
        _MultiProcessingDataLoaderIter as MultiProcessingDataLoaderIter,
    )
    from torch.utils.data.dataloader import (
        _SingleProcessDataLoaderIter as SingleProcessDataLoaderIter,
    )
except ImportError as _error:
    raise ImportError(
        f"this dpex does not support torch {version('torch')}: {_error}. Install a newer dpex, or "
        "an older torch"
    ) from _error

__all__ = [
    "BaseDataLoaderIter",
    "DatasetKind",
    "ExceptionWrapper",
    "IterableDatasetFetcher",
    "MultiProcessingDataLoaderIter",
    "SingleProcessDataLoaderIter",
    "WorkerInfo",
    "collate",
    "collate_tensor_fn",
    "default_collate_fn_map",
    "numpy_seed",
    "pin_memory",
    "set_worker_info",
    "tree_map_only",
]

_DATALOADER = "torch.utils.data.dataloader:"
_ITERATOR = _DATALOADER + "_BaseDataLoaderIter"
_UTILS = "torch.utils.data._utils."
_PARITY = "tests compare batches with torch's"

_TORCH = Shortcut(
    "give torch's batches",
    "`import dpex` raises ImportError",
    "torch",
    iterator=PrivateName(_ITERATOR, "is the base class of dpex's iterators", _PARITY),
    next_data=PrivateName(_ITERATOR + "._next_data", "returns the next batch", _PARITY),
    reset=PrivateName(_ITERATOR + "._reset", "begins an epoch", _PARITY),
    sampler_iter=PrivateName(_ITERATOR + "._sampler_iter", "draws the indices", _PARITY, True),
    index_sampler=PrivateName(_ITERATOR + "._index_sampler", "draws the indices", _PARITY),
    kind=PrivateName(_ITERATOR + "._dataset_kind", "tells streams", _PARITY, True),
    arguments=PrivateName(
        _ITERATOR + "._num_workers",
        "is an argument of the loader; so are _dataset, _auto_collation, _base_seed, _pin_memory, "
        "_persistent_workers and _timeout",
        _PARITY,
        True,
    ),
    one_process=PrivateName(
        _DATALOADER + "_SingleProcessDataLoaderIter", "iterates with num_workers=0", _PARITY
    ),
    processes=PrivateName(
        _DATALOADER + "_MultiProcessingDataLoaderIter",
        "iterates with torch's own workers",
        _PARITY,
    ),
    received=PrivateName(
        _DATALOADER + "_MultiProcessingDataLoaderIter._rcvd_idx",
        "counts the batches that torch's own workers have delivered",
        "tests resume with torch's own workers",
        True,
    ),
    fetcher=PrivateName(
        _DATALOADER + "_SingleProcessDataLoaderIter._dataset_fetcher",
        "has a stream's iterator, whose state a checkpoint holds",
        "tests resume with num_workers=0",
        True,
    ),
    dataset_kind=PrivateName(_DATALOADER + "_DatasetKind", "tells streams", _PARITY),
    stream_fetcher=PrivateName(_UTILS + "fetch:_IterableDatasetFetcher", "reads a stream", _PARITY),
    worker_info=PrivateName(
        _UTILS + "worker:_worker_info",
        "is the value of get_worker_info",
        "tests read get_worker_info in a worker",
    ),
    worker_info_class=PrivateName(_UTILS + "worker:WorkerInfo", "is the value of get_worker_info"),
    numpy_seed=PrivateName(_UTILS + "worker:_generate_state", "seeds numpy's generator", _PARITY),
    wrapper=PrivateName(
        "torch._utils:ExceptionWrapper", "raises a worker's exception in the training process"
    ),
    pin_memory=PrivateName(
        _UTILS + "pin_memory:pin_memory", "copies a batch to page-locked memory"
    ),
    collate_tensors=PrivateName(_UTILS + "collate:collate_tensor_fn", "stacks tensors", _PARITY),
    collate=PrivateName(_UTILS + "collate:collate", "collates what has no tensors", _PARITY),
    collate_map=PrivateName(
        _UTILS + "collate:default_collate_fn_map", "has the user's ways to collate", _PARITY
    ),
    tree_map_only=PrivateName(
        "torch.utils._pytree:tree_map_only", "copies the tensors of a GPU stage to the CPU"
    ),
)


def set_worker_info(info: Any) -> Any:
    """Set the value of ``torch.utils.data.get_worker_info`` in this process.

    Args:
        info: A ``WorkerInfo``, or None.

    Returns:
        The previous value.
    """
    before, _worker._worker_info = _worker._worker_info, info
    return before
