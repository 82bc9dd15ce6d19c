"""Datasets of torchvision, with their transforms as a separate chain."""

from __future__ import annotations

import copy
from typing import Any

from dpex.transforms import MappedDataset
from dpex.transforms.splitting import flattened
from dpex.wire.pickling import dump_in_band
from dpex.worker.seeding import generators_kept, seed_generators

__all__ = ["from_torchvision"]


def from_torchvision(dataset: Any) -> MappedDataset:
    """Separate a torchvision dataset into a dataset without transforms and a chain of transforms.

    Args:
        dataset: A ``VisionDataset``, or the result of ``wrap_dataset_for_transforms_v2``. It is
            not modified.

    Returns:
        A dataset with the same samples. Its ``source`` is ``dataset`` without transforms. Its chain
        contains the transforms of a ``Compose`` one by one.

    Raises:
        SerializationError: The first sample cannot be pickled.
        TypeError: ``dataset`` does not store or does not apply its transforms as torchvision's
            datasets do. To check this, ``from_torchvision`` reads the first sample twice.
    """
    names = ("transform", "target_transform", "transforms")
    missing = [name for name in names if not hasattr(dataset, name)]
    if missing:
        raise TypeError(
            f"{type(dataset).__name__} has no attribute {missing[0]!r}, unlike torchvision's "
            "datasets. Pass its transforms to MappedDataset(dataset, [...]) instead"
        )
    bare = copy.copy(dataset)
    for name in names:
        setattr(bare, name, None)
    if dataset.transform is None and dataset.target_transform is None:
        joint = dataset.transforms
        apart = MappedDataset(bare, joint_transforms=None if joint is None else flattened(joint))
    else:
        apart = MappedDataset(
            bare,
            [] if dataset.transform is None else flattened(dataset.transform),
            target_transform=dataset.target_transform,
        )
    if len(apart) and _first_sample(dataset) != _first_sample(apart):
        raise TypeError(
            f"{type(dataset).__name__} does not apply its transforms as torchvision's datasets do, "
            "to the first and the second item of a sample: its first sample would change. Pass its "
            "transforms to MappedDataset(dataset, joint_transforms=[...]) instead"
        )
    return apart


def _first_sample(dataset: Any) -> bytes:
    """Return the pickle of a dataset's first sample, made with a fixed seed."""
    with generators_kept():
        seed_generators(0)
        return dump_in_band(dataset[0], "sample")
