"""torchvision's datasets, their transforms beside them."""

from __future__ import annotations

import copy
from typing import Any

from dpex.transforms import MappedDataset
from dpex.transforms.splitting import flattened

__all__ = ["from_torchvision"]


def from_torchvision(dataset: Any) -> MappedDataset:
    """Return a torchvision dataset whose transforms are a chain of its own.

    Args:
        dataset: A ``VisionDataset``, or what ``wrap_dataset_for_transforms_v2`` made of one. It
            is left as it is.

    Returns:
        The same samples. ``source`` is the dataset without transforms; what was in a ``Compose``
        is in the chain one by one.

    Raises:
        TypeError: ``dataset`` keeps its transforms elsewhere than torchvision's datasets do.
    """
    names = ("transform", "target_transform", "transforms")
    missing = [name for name in names if not hasattr(dataset, name)]
    if missing:
        raise TypeError(
            f"{type(dataset).__name__} has no attribute {missing[0]!r}, as torchvision's datasets "
            "have: give its transforms to MappedDataset(dataset, [...]) instead"
        )
    bare = copy.copy(dataset)
    for name in names:
        setattr(bare, name, None)
    if dataset.transform is None and dataset.target_transform is None:
        joint = dataset.transforms
        return MappedDataset(bare, transforms=None if joint is None else flattened(joint))
    return MappedDataset(
        bare,
        [] if dataset.transform is None else flattened(dataset.transform),
        target_transform=dataset.target_transform,
    )
