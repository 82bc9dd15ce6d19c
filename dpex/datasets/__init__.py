"""Datasets that each node reads itself: from its own files, from a store, or from a cache.

::

    from dpex.datasets import ImageFolder, cached, on_node

    dataset = on_node(FashionMNIST, root="/data", train=True, transform=ToTensor())
    dataset = cached(ImageFolder("s3://bucket/train", transform=Resize(256)))
"""

from dpex.datasets.built_on_node import on_node
from dpex.datasets.cache import cached
from dpex.datasets.digits import MNIST, FashionMNIST
from dpex.datasets.folder import ImageFolder
from dpex.datasets.parquet import Parquet
from dpex.datasets.vision import from_torchvision

__all__ = [
    "FashionMNIST",
    "ImageFolder",
    "MNIST",
    "Parquet",
    "cached",
    "from_torchvision",
    "on_node",
]
