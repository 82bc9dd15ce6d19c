"""A ResNet-50 on a GPU, fed by torch's loader and by dpex: how much of its time it stands still.

Pictures leave the workers as uint8, in pinned memory, and become floating point on the GPU. What
the same steps take over a batch that stays there is what they would take if batches cost nothing.
Without a CUDA device nothing is measured, and that is said.
"""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet50

from benchmarks.goals import Goal
from benchmarks.harness import arguments, close, describe_machine, say, spread, summarise, write
from benchmarks.plots import bars
from benchmarks.workloads import IMAGENET_MEAN, IMAGENET_STD
from dpex import DpexDataLoader

STORED_SIDE = 256
PICTURES = 256
CLASSES = 1_000
SIDE = 224
BATCH_SIZE = 256
STEPS = 100
GOAL_STALL = 5.0

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], None]


class Crops(Dataset[tuple[torch.Tensor, int]]):
    """Pictures in memory, uint8 (3, ``side``, ``side``): a random part of a random one of them.

    Args:
        samples: How many there are in an epoch.
        side: In pixels.
    """

    def __init__(self, samples: int, side: int) -> None:
        shape = (PICTURES, 3, STORED_SIDE, STORED_SIDE)
        self.pictures = torch.randint(256, shape, dtype=torch.uint8)
        self.samples = samples
        self.side = side

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left = (random.randrange(STORED_SIDE - self.side + 1) for _ in range(2))
        picture = self.pictures[index % PICTURES, :, top : top + self.side, left : left + self.side]
        return picture.contiguous(), index % CLASSES


def make_step(device: torch.device) -> Step:
    """Make a ResNet-50's training step, from uint8 pictures in pinned memory."""
    model = resnet50(num_classes=CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean = torch.tensor(IMAGENET_MEAN, device=device).view(3, 1, 1)
    std = torch.tensor(IMAGENET_STD, device=device).view(3, 1, 1)

    def step(batch: Batch) -> None:
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        images = ((images / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_of(batches: Iterable[Batch], step: Step, device: torch.device) -> float:
    """Train for an epoch; the GPU has done with it when this returns."""
    began = time.perf_counter()
    for batch in batches:
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(
    device: torch.device, *, workers: int, rounds: int, steps: int, batch_size: int, side: int
) -> dict[str, list[float]]:
    """Train in turns from both loaders and from a batch that stays on the device.

    Args:
        device: Where the model is.
        workers: Of either loader.
        rounds: Counted epochs; one more, the first, starts workers and tunes kernels.
        steps: In an epoch.
        batch_size: In samples.
        side: Of a picture, in pixels.

    Returns:
        Seconds of each epoch: ``"resident"``, ``"torch"`` and ``"dpex"``.
    """
    torch.backends.cudnn.benchmark = True
    crops = Crops(steps * batch_size, side)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": True,
        "pin_memory": device.type == "cuda",
    }
    loaders: dict[str, DataLoader[Any]] = {
        "torch": DataLoader(crops, **options),
        "dpex": DpexDataLoader(crops, **options, distribute_mode=True),
    }
    for loader in loaders.values():  # workers are forked, and that comes before the GPU's first use
        first = next(iter(loader))
    step = make_step(device)
    stays: Any = tuple(part.to(device) for part in first)
    found: dict[str, list[float]] = {"resident": [], **{peer: [] for peer in loaders}}
    try:
        for number in range(rounds + 1):
            for peer, seconds in found.items():
                batches = [stays] * steps if peer == "resident" else loaders[peer]
                took = seconds_of(batches, step, device)
                say(f"gpu, {peer}: {took:.2f} s")
                if number:
                    seconds.append(took)
    finally:
        for loader in loaders.values():
            close(loader)
    return found


def main() -> None:
    options = arguments(__doc__, "gpu")
    if not torch.cuda.is_available():
        say("gpu: nothing measured, torch finds no CUDA device here")
        return
    found = measure(
        torch.device("cuda"),
        workers=options.workers,
        rounds=options.rounds,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        side=SIDE,
    )
    stalls = {
        peer: [
            100 * max(0.0, 1 - least / took)
            for least, took in zip(found["resident"], found[peer], strict=True)
        ]
        for peer in ("torch", "dpex")
    }
    record = describe_machine("gpu")
    record["device"] = torch.cuda.get_device_name()
    record["seconds"] = {peer: summarise(seconds) for peer, seconds in found.items()}
    record["stall_percent"] = {peer: summarise(shares) for peer, shares in stalls.items()}
    goal = Goal.of(
        f"gpu: share of its time that a ResNet-50 on {record['device']} stands still",
        stalls["dpex"],
        "<=",
        GOAL_STALL,
        "percent",
        f"torch {spread(record['stall_percent']['torch'])} %; {options.workers} workers",
    )
    record["goals"] = [asdict(goal)]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"A ResNet-50's epoch of {STEPS} steps of {BATCH_SIZE}, {record['device']}",
        found,
        "s",
    )
    print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


if __name__ == "__main__":
    main()
