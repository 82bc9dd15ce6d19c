"""A program that trains on MNIST with ``nn.DataParallel``: one process with all GPUs, or the CPU.

Run it with ``python examples/mnist_data_parallel.py``.
"""

import argparse

import torch
from mnist import Net, train
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST under DataParallel.")
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.DataParallel(Net()).to(device)
    train(model, options.data, options.epochs, device)


if __name__ == "__main__":
    main()
