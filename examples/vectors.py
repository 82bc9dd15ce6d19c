"""A random dataset, and a linear model that prints the shapes of its input and output."""

import torch
from torch import nn
from torch.utils.data import Dataset

INPUT_SIZE = 5
OUTPUT_SIZE = 2


class RandomVectors(Dataset[torch.Tensor]):
    """Random vectors, which are the same in every process.

    Args:
        length: Number of vectors.
    """

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.vectors = torch.randn(length, INPUT_SIZE, generator=generator)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.vectors[index]


class Model(nn.Module):
    """One linear layer.

    Args:
        talks: Whether ``forward`` prints the shapes of its input and output.
    """

    def __init__(self, talks: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUT_SIZE, OUTPUT_SIZE)
        self.talks = talks

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Map (N, 5) to (N, 2)."""
        output: torch.Tensor = self.linear(vectors)
        if self.talks:
            print(f"  in the model: {tuple(vectors.shape)} -> {tuple(output.shape)}")
        return output
