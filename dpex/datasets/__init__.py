"""Datasets that each node reads itself: from its own files, from a store, or from a cache.

::

    from dpex.datasets import ImageFolder, cached, on_node

    dataset = on_node(FashionMNIST, root="/data", train=True, transform=ToTensor())
    dataset = cached(ImageFolder("s3://bucket/train", transform=Resize(256)))
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpex.datasets.built_on_node import on_node
from dpex.datasets.cache import cached
from dpex.datasets.parquet import Parquet
from dpex.datasets.vision import from_torchvision

if TYPE_CHECKING:
    from dpex.datasets.digits import MNIST, FashionMNIST
    from dpex.datasets.folder import ImageFolder

__all__ = [
    "FashionMNIST",
    "ImageFolder",
    "MNIST",
    "Parquet",
    "cached",
    "from_torchvision",
    "on_node",
]

# Subclasses of torchvision's datasets: torchvision is an extra, and takes a while to import.
_OF_TORCHVISION = {"FashionMNIST": "digits", "ImageFolder": "folder", "MNIST": "digits"}


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCHVISION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_OF_TORCHVISION[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ModuleNotFoundError(
            f"{name} needs torchvision, which is not installed: pip install torchvision",
            name="torchvision",
        ) from error
    return getattr(module, name)
