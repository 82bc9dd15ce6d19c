"""A program that trains a model on two devices, with one loader.

Run it with ``python examples/two_devices.py``. With fewer than two GPUs, both halves are on the
CPU.
"""

import argparse

import torch
from mnist import Net, train


class SplitNet(Net):
    """The network of the MNIST examples, with features and classifier on different devices.

    Args:
        first: Device of the batches, the features and the returned logits.
        second: Device of the classifier.
    """

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.features.to(first)
        self.classifier.to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.classifier(self.features(images).to(self.second))
        return logits.to(self.first)


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST with a model on two devices.")
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    names = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")
    first, second = map(torch.device, names)
    model = SplitNet(first, second)
    print(f"features on {first}, classifier on {second}")
    train(model, options.data, options.epochs, first)


if __name__ == "__main__":
    main()
