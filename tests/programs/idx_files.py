"""Files in the format of MNIST and FashionMNIST, with scikit-learn's digits."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

TRAINING, TEST = 1_200, 300


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return digits like MNIST's: ``"train"`` and ``"t10k"``, uint8 (N, 28, 28), int64 (N,)."""
    content = load_digits()
    pictures = torch.from_numpy(content.images).unsqueeze(1) * (255 / 16)
    grown = torch.nn.functional.interpolate(pictures, size=(28, 28), mode="bilinear")
    images, labels = grown.squeeze(1).to(torch.uint8), torch.from_numpy(content.target).long()
    parts = {"train": slice(TRAINING), "t10k": slice(TRAINING, TRAINING + TEST)}
    return {name: (images[part], labels[part]) for name, part in parts.items()}


def write_idx(folder: Path, name: str) -> None:
    """Write the files that ``torchvision.datasets`` reads as dataset ``name`` (``"MNIST"``)."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    for part, (images, labels) in digits().items():
        (raw / f"{part}-images-idx3-ubyte").write_bytes(_idx(images.numpy()))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(_idx(labels.numpy().astype(np.uint8)))


def _idx(array: np.ndarray) -> bytes:
    """Encode an array of bytes: type (8) and dimensions, big-endian, then the bytes."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()
