"""The files of MNIST and FashionMNIST, in their own format, with scikit-learn's digits in them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

TRAINING, TEST = 1_200, 300


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Digits as MNIST has them: ``"train"`` and ``"t10k"``, uint8 (N, 28, 28) and int64 (N,)."""
    content = load_digits()
    pictures = torch.from_numpy(content.images).unsqueeze(1) * (255 / 16)
    grown = torch.nn.functional.interpolate(pictures, size=(28, 28), mode="bilinear")
    images, labels = grown.squeeze(1).to(torch.uint8), torch.from_numpy(content.target).long()
    parts = {"train": slice(TRAINING), "t10k": slice(TRAINING, TRAINING + TEST)}
    return {name: (images[part], labels[part]) for name, part in parts.items()}


def write_idx(folder: Path, name: str) -> None:
    """Write what ``torchvision.datasets`` finds as data set ``name`` (``"MNIST"``) in a folder."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    for part, (images, labels) in digits().items():
        (raw / f"{part}-images-idx3-ubyte").write_bytes(_idx(images.numpy()))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(_idx(labels.numpy().astype(np.uint8)))


def _idx(array: np.ndarray) -> bytes:
    """Encode bytes: a magic number with their type (8) and the dimensions, big-endian."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()
