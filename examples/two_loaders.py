"""A program that creates two loaders, uses them for a few batches and deletes them, three times.

Run it with ``python examples/two_loaders.py``. All loaders use the same Ray. When a loader is
deleted, dpex cancels its batches in flight.
"""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from dpex import DpexDataLoader


def make_loader(first: int) -> DpexDataLoader[Any]:
    dataset = TensorDataset(torch.arange(first, first + 1_000))
    return DpexDataLoader(dataset, batch_size=10, num_workers=2, distribute_mode=True)


def main() -> None:
    for attempt in range(3):
        training, validation = make_loader(0), make_loader(10_000)
        for step, ((numbers,), (others,)) in enumerate(zip(training, validation, strict=True)):
            if step == 5:
                break
            print(f"attempt {attempt}, step {step}: {numbers.tolist()} and {others.tolist()}")
        del training, validation


if __name__ == "__main__":
    main()
