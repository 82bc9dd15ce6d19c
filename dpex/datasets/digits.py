"""torchvision's ``MNIST`` and ``FashionMNIST``, which can also read from an object store."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import datasets

from dpex.datasets.store import Store

__all__ = ["FashionMNIST", "MNIST"]

_UNSIGNED_BYTES = 8


class MNIST(datasets.MNIST):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ``MNIST``, which can also read from an object store.

    It is a subclass, so everything but the reading of files is torchvision's. Nothing is
    downloaded.

    Args:
        root: torchvision's ``root``, the folder that contains ``MNIST/raw``, or the folder that
            contains the files. It is a path or a URI such as ``s3://bucket/path``;
            ``docs/datasets.md`` lists the schemes.
        train: Whether to read the training set or the test set.
        transform: Transform of the image, a PIL image of mode "L" and size 28x28.
        target_transform: Transform of the label.
        download: torchvision's argument; it must be False.
        filesystem: A filesystem of pyarrow or fsspec, if the environment does not configure the
            store.

    Raises:
        FileNotFoundError: A file does not exist, neither plain nor with ``.gz``.
        OSError: The store refuses access, or does not answer after several tries.
        ValueError: A file is not in IDX format, the numbers of images and labels differ, or
            ``download`` is True.

    Source:
        ``torchvision.datasets.MNIST``; the IDX format, http://yann.lecun.com/exdb/mnist.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        download: bool = False,
        *,
        filesystem: Any = None,
    ) -> None:
        if download:
            raise ValueError(
                "download=True is not supported, because dpex downloads nothing. Download the "
                f"files once with torchvision's {type(self).__name__}, and pass its root"
            )
        store = Store(root, filesystem)
        # Not torchvision's own constructor: it looks for the files on the disk.
        datasets.VisionDataset.__init__(
            self, store.root(root), transform=transform, target_transform=target_transform
        )
        self.train = train
        self.targets = self._read(store, "labels-idx1-ubyte", 1).long()
        self.data = self._read(store, "images-idx3-ubyte", 3)
        if len(self.data) != len(self.targets):
            raise ValueError(
                f"{store.uri} has {len(self.data):,} images, but {len(self.targets):,} labels"
            )

    def _read(self, store: Store, name: str, dimensions: int) -> torch.Tensor:
        file = f"{'train' if self.train else 't10k'}-{name}"
        folders = (f"{type(self).__name__}/raw/", "")
        tried = [folder + file + ending for folder in folders for ending in ("", ".gz")]
        for path in tried:
            try:
                content = store.read(path)
            except FileNotFoundError:
                continue
            return _parse(content, f"{store.uri}/{path}", dimensions)
        raise FileNotFoundError(f"{store.uri} has none of the files {', '.join(tried)}")


class FashionMNIST(MNIST, datasets.FashionMNIST):  # type: ignore[misc]
    """torchvision's ``FashionMNIST``, which can also read from an object store; see ``MNIST``."""


def _parse(content: bytes, path: str, dimensions: int) -> torch.Tensor:
    if path.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unzipped: {error}") from error
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]):
        raise ValueError(
            f"{path} is not in IDX format: it begins with {content[:4].hex()} and has "
            f"{len(content):,} bytes"
        )
    shape = np.frombuffer(content, ">u4", dimensions, 4).astype(int)
    if len(content) - start != np.prod(shape):
        raise ValueError(
            f"{path} has {len(content) - start:,} bytes of content, but its header says "
            f"{shape.tolist()}. The file may be incomplete"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())
