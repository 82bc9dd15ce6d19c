"""Loaders, network, training and test of the MNIST examples."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torchvision import datasets, transforms

from dpex import DpexDataLoader


def make_loaders(
    folder: str, device: torch.device
) -> tuple[DpexDataLoader[Any], DpexDataLoader[Any]]:
    """Return the loaders of the training set and the test set; download missing data."""
    to_tensor = transforms.ToTensor()
    train_set = datasets.MNIST(folder, train=True, download=True, transform=to_tensor)
    test_set = datasets.MNIST(folder, train=False, transform=to_tensor)
    train_loader = DpexDataLoader(
        train_set,
        batch_size=128,
        shuffle=True,
        num_workers=4,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
        distribute_mode=True,
    )
    test_loader = DpexDataLoader(
        test_set, batch_size=512, num_workers=4, persistent_workers=True, distribute_mode=True
    )
    return train_loader, test_loader


class Net(nn.Module):
    """A small convolutional network, from (N, 1, 28, 28) to the logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def train(model: nn.Module, folder: str, epochs: int, device: torch.device) -> None:
    """Train in one process, and print the loss and the accuracy after each epoch."""
    train_loader, test_loader = make_loaders(folder, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(epochs):
        loss, samples = train_epoch(model, train_loader, optimizer, device)
        right = accuracy(model, test_loader, device)
        print(f"epoch {epoch}: {samples} samples, loss {loss:.3f}, accuracy {right:.2%}")


def train_epoch(
    model: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> tuple[float, int]:
    """Train on all batches.

    Returns:
        The mean loss of a sample, and the number of samples.
    """
    model.train()
    total, count = 0.0, 0
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
        count += len(labels)
    return total / max(1, count), count


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Any], device: torch.device) -> float:
    """Return the fraction of digits that the model reads correctly."""
    model.eval()
    right = count = 0
    for images, labels in batches:
        right += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
        count += len(labels)
    return right / max(1, count)
