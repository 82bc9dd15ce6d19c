"""Ray Train: a loader that ``ray.train.torch.prepare_data_loader`` does not replace."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from dpex.dataloader import DpexDataLoader
from dpex.remaking import own_options, remake

__all__ = ["add_distributed_sampler"]


def add_distributed_sampler(loader: DpexDataLoader[Any]) -> DpexDataLoader[Any]:
    """Return the loader with the ``DistributedSampler`` that ``prepare_data_loader`` would add.

    To add a ``DistributedSampler``, ``prepare_data_loader`` makes a new torch ``DataLoader``. It
    keeps a loader that already has a ``DistributedSampler``.

    Args:
        loader: A loader in a training function of Ray Train.

    Returns:
        A new loader for this rank's share, shuffled if the given loader is shuffled. Returns the
        given loader if it has a ``DistributedSampler``, if there is only one rank, or if its
        dataset is an ``IterableDataset``. An ``IterableDataset`` divides its stream itself.

    Raises:
        ValueError: The loader has another kind of sampler, or a batch sampler. A
            ``DistributedSampler`` would replace it.

    Source:
        ``ray.train.torch.prepare_data_loader``, Ray 2.60.
    """
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    streams = isinstance(loader.dataset, IterableDataset)
    if ranks == 1 or streams or isinstance(loader.sampler, DistributedSampler):
        return loader
    sampler = loader.sampler
    batched_by_others = loader.batch_size is None and loader.batch_sampler is not None
    if batched_by_others or not isinstance(sampler, (RandomSampler, SequentialSampler)):
        given = loader.batch_sampler if batched_by_others else sampler
        raise ValueError(
            f"a DistributedSampler would replace the loader's own {type(given).__name__}. Let the "
            f"{type(given).__name__} divide the indices among the {ranks} ranks, and call "
            "prepare_data_loader with add_dist_sampler=False"
        )
    shuffle = isinstance(sampler, RandomSampler)
    sampling: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "sampler": DistributedSampler(loader.dataset, shuffle=shuffle),
        "drop_last": loader.drop_last,
    }
    return remake(loader, own_options(loader), sampling, kind=type(loader))
