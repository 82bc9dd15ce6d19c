"""A program that trains on FashionMNIST with one device and ten workers.

Run it with ``python examples/single_device.py``. For comparison, ``--no-distribute-mode`` trains
with torch's own loader. The program downloads the data to ``--data`` if it is not there.
"""

import argparse
import time
from typing import Any

import torch
from torch import nn
from torchvision import datasets, transforms

from dpex import DpexDataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="FashionMNIST on one device.")
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=10)
    parser.add_argument("--distribute-mode", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    to_tensor = transforms.ToTensor()
    train_set = datasets.FashionMNIST(options.data, train=True, download=True, transform=to_tensor)
    test_set = datasets.FashionMNIST(options.data, train=False, transform=to_tensor)
    loaders = [
        DpexDataLoader(
            dataset,
            batch_size=100,
            shuffle=shuffle,
            num_workers=options.num_workers,
            persistent_workers=True,
            pin_memory=device == "cuda",
            distribute_mode=options.distribute_mode,
        )
        for dataset, shuffle in ((train_set, True), (test_set, False))
    ]
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 6 * 6, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(options.epochs):
        began = time.monotonic()
        loss = train(model, loaders[0], optimizer, device)
        print(
            f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy(model, loaders[1], device):.2%}, "
            f"{time.monotonic() - began:.1f} s"
        )


def train(
    model: nn.Module, loader: DpexDataLoader[Any], optimizer: torch.optim.Optimizer, device: str
) -> float:
    """Train one epoch, and return the mean loss of a batch."""
    model.train()
    total = 0.0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DpexDataLoader[Any], device: str) -> float:
    """Return the fraction of pictures that the model classifies correctly."""
    model.eval()
    right = count = 0
    for images, labels in loader:
        right += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
        count += len(labels)
    return right / count


if __name__ == "__main__":
    main()
