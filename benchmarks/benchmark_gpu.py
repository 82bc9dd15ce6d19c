"""The benchmark ``gpu``: the share of time that a ResNet-50's GPU is idle, with torch and dpex.

The workers make uint8 pictures. The GPU gets them from pinned memory, and converts them to floating
point. The same steps with a batch that stays on the GPU show the time without a loader. Without a
CUDA device, the benchmark prints a message and measures nothing.
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

from benchmarks.addresses import address_of
from benchmarks.goals import Goal
from benchmarks.harness import (
    arguments,
    close,
    describe_machine,
    say,
    spread,
    summarise,
    wait_for_ray,
    write,
)
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
    """Random crops of pictures in memory, uint8 of shape (3, ``side``, ``side``).

    Args:
        samples: Number of samples in an epoch.
        side: Side of a crop, in pixels.
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
    """Return a ResNet-50's training step, which takes uint8 pictures in pinned memory."""
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
    """Train for an epoch, and return the seconds until the device has finished."""
    began = time.perf_counter()
    for batch in batches:
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(
    device: torch.device, *, workers: int, rounds: int, steps: int, batch_size: int, side: int
) -> dict[str, list[float]]:
    """Train in turns with both loaders, and with a batch that stays on the device.

    Args:
        device: Device of the model.
        workers: Number of workers of each loader.
        rounds: Number of counted epochs. One more epoch comes first, which starts workers and tunes
            kernels.
        steps: Number of steps in an epoch.
        batch_size: Samples in a batch.
        side: Side of a picture, in pixels.

    Returns:
        Seconds of each epoch, for ``"resident"``, ``"torch"`` and ``"dpex"``.
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
        "dpex": DpexDataLoader(
            crops, **options, distribute_mode=True, head_address=address_of("dpex")
        ),
    }
    wait_for_ray(loaders["dpex"])  # in earlier revisions
    for loader in loaders.values():  # both must fork before the first use of the GPU
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
        "throughput",
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
