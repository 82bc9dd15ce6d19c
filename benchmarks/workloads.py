"""The datasets that the benchmarks read; in a module of their own, so that workers import them."""

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms

JPEG_SIZE = (500, 375)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class TinyImages(Dataset[tuple[torch.Tensor, int]]):
    """Grey 28x28 images kept in memory, each through PIL and ``ToTensor``, as torchvision's MNIST.

    Args:
        length: How many images.
    """

    def __init__(self, length: int = 60_000) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (length, 28, 28), dtype=np.uint8)
        self.labels = rng.integers(0, 10, length)
        self.transform = transforms.ToTensor()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[index])
        return self.transform(image), int(self.labels[index])


class JpegFiles(Dataset[tuple[torch.Tensor, int]]):
    """Photographs on disk, decoded and augmented as for training on ImageNet.

    Args:
        folder: Where :func:`make_jpegs` put them.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(path) for path in folder.glob("*.jpg"))
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB")), index % 2


class SameTensor(Dataset[torch.Tensor]):
    """One tensor, given again and again: what is left is collating and transport.

    Args:
        length: How often.
        shape: The tensor's.
    """

    def __init__(self, length: int = 4_096, shape: tuple[int, ...] = (3, 224, 224)) -> None:
        self.length = length
        self.sample = torch.rand(shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class SleepingSamples(Dataset[torch.Tensor]):
    """Samples that take time and no CPU, as from a remote store.

    Args:
        length: How many.
        sleep_s: What each one takes.
        shape: The shape of each.
    """

    def __init__(
        self, length: int, sleep_s: float = 0.005, shape: tuple[int, ...] = (3, 32, 32)
    ) -> None:
        self.length = length
        self.sleep_s = sleep_s
        self.sample = torch.rand(shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return self.sample


def make_jpegs(folder: Path, count: int = 1_024) -> Path:
    """Cut ``count`` photographs of 500x375 out of scikit-learn's two, once.

    Args:
        folder: Where they go; what is there already is kept.
        count: How many.

    Returns:
        ``folder``.
    """
    if len(list(folder.glob("*.jpg"))) == count:
        return folder
    from sklearn.datasets import load_sample_images

    folder.mkdir(parents=True, exist_ok=True)
    photographs: list[npt.NDArray[Any]] = load_sample_images().images
    rng = np.random.default_rng(0)
    for number in range(count):
        photograph = Image.fromarray(photographs[number % len(photographs)])
        width = int(rng.integers(320, photograph.width + 1))
        height = width * JPEG_SIZE[1] // JPEG_SIZE[0]
        if height > photograph.height:
            width, height = photograph.height * JPEG_SIZE[0] // JPEG_SIZE[1], photograph.height
        left = int(rng.integers(0, photograph.width - width + 1))
        top = int(rng.integers(0, photograph.height - height + 1))
        cut = photograph.crop((left, top, left + width, top + height)).resize(JPEG_SIZE)
        encoded = io.BytesIO()
        cut.save(encoded, format="JPEG", quality=90)
        (folder / f"{number:05d}.jpg").write_bytes(encoded.getvalue())
    return folder
