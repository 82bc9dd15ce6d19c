"""MNIST and FashionMNIST, from IDX files on a disk or in an object store."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpex.datasets.labelled import LabelledPictures
from dpex.datasets.store import Store

__all__ = ["FashionMNIST", "MNIST"]

_UNSIGNED_BYTES = 8


class MNIST(LabelledPictures):
    """torchvision's ``MNIST``, which can also read from an object store.

    The constructor reads the labels, which samplers may need. Each worker process reads the images
    when it first needs an image. Nothing is downloaded.

    Args:
        root: torchvision's ``root``, the folder that contains ``MNIST/raw``, or the folder that
            contains the files. It is a path or a URI such as ``s3://bucket/path``;
            ``docs/datasets.md`` lists the schemes.
        train: Whether to read the training set or the test set.
        transform: Transform of the image, a PIL image of mode "L" and size 28x28.
        target_transform: Transform of the label.
        filesystem: A filesystem of pyarrow or fsspec, if the environment does not configure the
            store.

    Attributes:
        targets: Labels, int64 (N,).
        classes: Name of each label's class, in the order of the labels.

    Raises:
        FileNotFoundError: A file does not exist, neither plain nor with ``.gz``.
        OSError: The store refuses access, or does not answer after several tries.
        ValueError: A file is not in IDX format. Reading the first image also raises it if the
            numbers of images and labels differ.

    Source:
        ``torchvision.datasets.MNIST``; the IDX format, http://yann.lecun.com/exdb/mnist.
    """

    classes: Sequence[str] = tuple(
        f"{digit} - {name}"
        for digit, name in enumerate(
            ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
        )
    )

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        filesystem: Any = None,
    ) -> None:
        super().__init__(transform, target_transform)
        self.train = train
        self._store = Store(root, filesystem)
        self._images: np.ndarray[Any, Any] | None = None
        self._images_given = False
        self.targets = torch.from_numpy(self._read("labels-idx1-ubyte", 1)).long()
        self._labels_read = len(self.targets)  # the user may replace ``targets`` with fewer labels

    def _read(self, name: str, dimensions: int) -> np.ndarray[Any, Any]:
        file = f"{'train' if self.train else 't10k'}-{name}"
        folders = (f"{type(self).__name__}/raw/", "")
        tried = [folder + file + ending for folder in folders for ending in ("", ".gz")]
        for path in tried:
            try:
                content = self._store.read(path)
            except FileNotFoundError:
                continue
            return _parse(content, f"{self._store.uri}/{path}", dimensions)
        raise FileNotFoundError(f"{self._store.uri} has none of {', '.join(tried)}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without images that were read from files: each process reads them."""
        return self.__dict__ if self._images_given else {**self.__dict__, "_images": None}

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class."""
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def data(self) -> torch.Tensor:
        """Images, uint8 (N, 28, 28). Images that are assigned here are pickled with the dataset."""
        return torch.from_numpy(self._pixels())

    @data.setter
    def data(self, images: torch.Tensor) -> None:
        self._images = np.asarray(images)
        self._images_given = True

    def _pixels(self) -> np.ndarray[Any, Any]:
        if self._images is None:
            images = self._read("images-idx3-ubyte", 3)
            if len(images) != self._labels_read:
                raise ValueError(
                    f"{self._store.uri} has {len(images):,} images, {self._labels_read:,} labels"
                )
            self._images = images
        return self._images

    def __len__(self) -> int:
        return len(self.targets)

    def _picture(self, index: Any) -> Any:
        from PIL import Image

        return Image.fromarray(self._pixels()[index])

    def _number(self, index: Any) -> int:
        return int(self.targets[index])


class FashionMNIST(MNIST):
    """torchvision's ``FashionMNIST``, which can also read from an object store; see ``MNIST``."""

    classes = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )


def _parse(content: bytes, path: str, dimensions: int) -> np.ndarray[Any, Any]:
    if path.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unzipped: {error}") from error
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]):
        raise ValueError(
            f"{path} is not in IDX format: it begins with {content[:4].hex()}, has "
            f"{len(content):,} bytes"
        )
    shape = np.frombuffer(content, ">u4", dimensions, 4).astype(int)
    if len(content) - start != np.prod(shape):
        raise ValueError(
            f"{path} has {len(content) - start:,} bytes of content; header: {shape.tolist()}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
