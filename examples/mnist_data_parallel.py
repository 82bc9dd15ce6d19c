"""MNIST under ``nn.DataParallel``: one process and all its GPUs, or the CPU.

Run it with ``python examples/mnist_data_parallel.py``.
"""

import argparse

import torch
from mnist import Net, accuracy, make_loaders, train_epoch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST under DataParallel.")
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, test_loader = make_loaders(options.data, device)
    model = nn.DataParallel(Net()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(options.epochs):
        loss, samples = train_epoch(model, train_loader, optimizer, device)
        right = accuracy(model, test_loader, device)
        print(f"epoch {epoch}: {samples} samples, loss {loss:.3f}, accuracy {right:.2%}")


if __name__ == "__main__":
    main()
