"""The digits of scikit-learn and a small network, for the examples with training frameworks."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

TRAINING = 1_500


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures of handwritten digits, float32 of shape (64,), and their labels.

    Args:
        train: Whether to use the first 1,500 pictures, or the other 297.
    """

    def __init__(self, train: bool = True) -> None:
        content = load_digits()
        part = slice(TRAINING) if train else slice(TRAINING, None)
        self.images = torch.from_numpy(content.data[part]).float() / 16
        self.labels = torch.from_numpy(content.target[part]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    """Two linear layers, from (N, 64) to the logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.layers(images)
        return logits
