"""Transforms as stages: a chain over any map-style dataset, with resources for each stage.

::

    from dpex.transforms import MappedDataset, Stage

    transforms = [decode, RandomCrop(224), Stage(mixup, batched=True, num_gpus=1)]
    dataset = MappedDataset(files, transforms)
"""

from dpex.transforms.mapped import MappedDataset
from dpex.transforms.splitting import split, split_deterministic
from dpex.transforms.stage import Stage

__all__ = ["MappedDataset", "Stage", "split", "split_deterministic"]
