"""Datasets that are read where they are processed.

from dpex.datasets import on_node

dataset = on_node(FashionMNIST, root="/data", train=True, transform=ToTensor())
"""

from dpex.datasets.cache import cached
from dpex.datasets.node import on_node
from dpex.datasets.vision import from_torchvision

__all__ = ["cached", "from_torchvision", "on_node"]
