"""Trainings with ``distribute_mode`` on and off, in one process, for the benchmark ``accuracy``.

The models of both modes start with the same weights and see the samples in the same order. The
trainings alternate, one epoch each. Data, model, process group and accuracy are those of the
example programs.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import torch
import torch.distributed as dist
from demo_data import Digits, fashion_is_in
from mnist import Net, accuracy
from ranks import join_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import datasets, transforms

from benchmarks.harness import say
from dpex import DpexDataLoader

LEARNING_RATE = 0.001
BATCH_SIZE = 100
DISTRIBUTE_MODE = {"off": False, "on": True}
WRAPPERS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "single device": lambda net: net,
    "DataParallel": nn.DataParallel,
    "DDP": DistributedDataParallel,
}


@dataclass
class Training:
    """The state of one training.

    Attributes:
        loader: Loader of the batches.
        net: The network.
        model: The network, wrapped for its devices.
        losses: Loss of every step so far.
    """

    loader: DpexDataLoader[Any]
    net: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def train_epoch(self, seed: int, device: torch.device) -> None:
        """Train on all batches, in the order that a seed determines."""
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(seed)
        else:
            self.loader.generator.manual_seed(seed)
        for images, labels in self.loader:
            logits = self.model(images.to(device))
            loss = nn.functional.cross_entropy(logits, labels.to(device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())


def train(setting: str, seeds: int, epochs: int, workers: int) -> dict[str, Any]:
    """Train with each seed, in this process or as one of several ranks of torchrun.

    Args:
        setting: One of ``WRAPPERS``.
        seeds: Number of seeds.
        epochs: Number of epochs with each seed.
        workers: Number of workers of each loader.

    Returns:
        ``data``, the number of its ``samples``, the number of ``gpus``, and ``runs``. A run has,
        for one seed, the ``steps`` of all ranks and the number of ``differing`` losses. It also
        has, by mode, the ``accuracy`` in per cent and the mean ``loss`` of the last epoch.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if ranks > 1:
        device = join_group()
    data, train_set, test_set = find_data()
    tests = DataLoader(test_set, batch_size=500)
    # The mode "off" comes first, so that torch forks its workers before Ray starts.
    loaders = {
        mode: make_loader(train_set, distribute_mode, ranks, workers)
        for mode, distribute_mode in DISTRIBUTE_MODE.items()
    }
    runs = []
    for seed in range(seeds):
        trainings = {}
        for mode, loader in loaders.items():
            torch.manual_seed(seed)
            net = Net().to(device)
            trainings[mode] = Training(loader, net, WRAPPERS[setting](net))
        for epoch in range(epochs):
            for training in trainings.values():
                training.train_epoch(seed * epochs + epoch, device)
        losses = gather({mode: training.losses for mode, training in trainings.items()}, ranks)
        runs.append(
            {
                **compare(losses, epochs),
                "accuracy": {
                    mode: 100 * accuracy(training.net, tests, device)
                    for mode, training in trainings.items()
                },
            }
        )
        say(f"{setting}, seed {seed}: {runs[-1]}")
    for loader in loaders.values():
        loader.close()
    if ranks > 1:
        dist.destroy_process_group()
    return {
        "data": data,
        "samples": len(train_set),  # type: ignore[arg-type]
        "gpus": torch.cuda.device_count(),
        "runs": runs,
    }


def find_data() -> tuple[str, Dataset[Any], Dataset[Any]]:
    """Return name, training set and test set: FashionMNIST if it is on disk, else digits."""
    folder = Path(os.environ.get("DPEX_DATA", "data"))
    to_tensor = transforms.ToTensor()
    if fashion_is_in(folder):
        return (
            "FashionMNIST",
            datasets.FashionMNIST(folder, train=True, transform=to_tensor),
            datasets.FashionMNIST(folder, train=False, transform=to_tensor),
        )
    return "scikit-learn's digits", Digits(True, to_tensor), Digits(False, to_tensor)


def make_loader(
    dataset: Dataset[Any], distribute_mode: bool, ranks: int, workers: int
) -> DpexDataLoader[Any]:
    """Return one rank's loader; the batches of all ranks together have ``BATCH_SIZE`` samples."""
    order: dict[str, Any] = {"shuffle": True, "generator": torch.Generator()}
    if ranks > 1:
        order = {"sampler": DistributedSampler(dataset)}
    return DpexDataLoader(
        dataset,
        batch_size=BATCH_SIZE // ranks,
        num_workers=workers,
        persistent_workers=True,
        distribute_mode=distribute_mode,
        **order,
    )


def gather(losses: Any, ranks: int) -> list[dict[str, list[float]]]:
    """Return the losses of all ranks."""
    if ranks == 1:
        return [losses]
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, losses)
    return gathered


def compare(losses: list[dict[str, list[float]]], epochs: int) -> dict[str, Any]:
    """Compare the losses of every rank step by step.

    Args:
        losses: Losses of each rank, by mode.
        epochs: Number of epochs of these losses.

    Returns:
        ``steps``, ``differing``, and by mode the mean ``loss`` of the last epoch.
    """
    pairs = [pair for rank in losses for pair in zip(rank["off"], rank["on"], strict=True)]
    steps_per_epoch = len(losses[0]["off"]) // epochs
    return {
        "steps": len(pairs),
        "differing": sum(off != on for off, on in pairs),
        "loss": {
            mode: sum(sum(rank[mode][-steps_per_epoch:]) for rank in losses)
            / (steps_per_epoch * len(losses))
            for mode in DISTRIBUTE_MODE
        },
    }
