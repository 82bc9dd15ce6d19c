"""The datasets of the benchmarks, in a separate module that workers can import."""

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

TO_TENSOR = transforms.ToTensor()
AUGMENT = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
)


class TinyImages(Dataset[tuple[torch.Tensor, int]]):
    """Grey 28x28 images in memory, each through PIL and ``ToTensor``, as in torchvision's MNIST.

    Args:
        length: Number of images.
    """

    def __init__(self, length: int = 60_000) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (length, 28, 28), dtype=np.uint8)
        self.labels = rng.integers(0, 10, length)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[index])
        return TO_TENSOR(image), int(self.labels[index])

    def rows(self) -> list[dict[str, Any]]:
        """Return the samples before their transform, in the form that Ray Data takes."""
        pairs = zip(self.images, self.labels.tolist(), strict=True)
        return [{"image": image, "label": label} for image, label in pairs]

    @staticmethod
    def transform_row(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"image": TO_TENSOR(Image.fromarray(row["image"]))}


class PhotographFiles(Dataset[tuple[Any, int]]):
    """Photographs on disk, decoded but not transformed.

    Args:
        folder: Folder with the files of :func:`make_jpegs`.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(path) for path in folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.paths[index]) as image:
            return image.convert("RGB"), index % 2


class JpegFiles(PhotographFiles):
    """Photographs on disk, decoded and augmented as for training on ImageNet."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = super().__getitem__(index)
        return AUGMENT(image), label

    def rows(self) -> list[dict[str, Any]]:
        """Return the samples before they are read, in the form that Ray Data takes."""
        return [{"path": path, "label": index % 2} for index, path in enumerate(self.paths)]

    @staticmethod
    def transform_row(row: dict[str, Any]) -> dict[str, Any]:
        with Image.open(row["path"]) as image:
            return {"image": AUGMENT(image.convert("RGB")), "label": row["label"]}


class SameTensor(Dataset[torch.Tensor]):
    """The same tensor for every sample, so that only collating and transport remain.

    Args:
        length: Number of samples.
        shape: Shape of the tensor.
    """

    def __init__(self, length: int = 4_096, shape: tuple[int, ...] = (3, 224, 224)) -> None:
        self.length = length
        self.sample = torch.rand(shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class TokenLists(Dataset[torch.Tensor]):
    """Texts as int64 lists of tokens: many short texts, and a few long ones.

    The corpus is in memory as uint16, which is usual for tokenised corpora. A text is a part of it.

    Args:
        length: Number of texts.
        shortest: Number of tokens of the shortest text.
        longest: Number of tokens of the longest text.
    """

    def __init__(self, length: int = 300_000, shortest: int = 16, longest: int = 512) -> None:
        rng = np.random.default_rng(0)
        self.corpus = rng.integers(0, 50_257, 8_000_000, dtype=np.uint16)
        lengths = rng.lognormal(mean=4.7, sigma=0.8, size=length)
        self.lengths = np.clip(lengths, shortest, longest).astype(np.int64)
        self.starts = rng.integers(0, len(self.corpus) - longest, length)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return torch.from_numpy(self.corpus[start : start + self.lengths[index]].astype(np.int64))


def pad(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate texts, padded to the longest of them; a ``collate_fn``.

    Args:
        texts: One-dimensional tensors of any lengths.

    Returns:
        The tokens, shape ``(B, longest)``, padded with zeros; and the lengths.
    """
    lengths = torch.tensor([len(text) for text in texts])
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths


class TableRows(Dataset[npt.NDArray[np.float32]]):
    """Rows of a table in memory, which can be read a batch at a time.

    Args:
        length: Number of rows.
        columns: Number of float32 columns.
    """

    def __init__(self, length: int = 4_000_000, columns: int = 32) -> None:
        self.table = np.random.default_rng(0).random((length, columns), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> npt.NDArray[np.float32]:
        row: npt.NDArray[np.float32] = self.table[index]
        return row

    def __getitems__(self, indices: list[int]) -> list[npt.NDArray[np.float32]]:
        return list(self.table[indices])


def stack(rows: list[npt.NDArray[np.float32]]) -> torch.Tensor:
    """Collate rows into one tensor; a ``collate_fn``."""
    return torch.from_numpy(np.stack(rows))


class SleepingSamples(Dataset[torch.Tensor]):
    """Samples that take time and no processor time, as from a remote store.

    Args:
        length: Number of samples.
        sleep_s: Seconds that a sample takes.
        shape: Shape of a sample.
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


def make_jpegs(folder: Path, count: int = 1_024, size: tuple[int, int] = JPEG_SIZE) -> Path:
    """Cut ``count`` photographs out of scikit-learn's two, unless the folder already has them.

    Args:
        folder: Folder of the files.
        count: Number of photographs.
        size: Width and height in pixels.

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
        height = width * size[1] // size[0]
        if height > photograph.height:
            width, height = photograph.height * size[0] // size[1], photograph.height
        left = int(rng.integers(0, photograph.width - width + 1))
        top = int(rng.integers(0, photograph.height - height + 1))
        cut = photograph.crop((left, top, left + width, top + height)).resize(size)
        encoded = io.BytesIO()
        cut.save(encoded, format="JPEG", quality=90)
        (folder / f"{number:05d}.jpg").write_bytes(encoded.getvalue())
    return folder
