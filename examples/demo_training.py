"""The model of the demo, and the training loop, which measures every wait for a batch."""

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

SEED = 0
LEARNING_RATE = 0.002
PROBES = 3


@dataclass(frozen=True)
class Epoch:
    """The measurements of one training epoch.

    Attributes:
        seconds: Duration of the epoch.
        waiting_s: The part of it in which the loop waited for batches.
        first_batch_s: Wait for the first batch.
        longest_wait_s: The longest wait for another batch.
        samples: Number of samples.
        losses: Loss of each step.
    """

    seconds: float
    waiting_s: float
    first_batch_s: float
    longest_wait_s: float
    samples: int
    losses: list[float]


class Training:
    """A loader of torch or dpex, the model that it feeds, and the results so far."""

    def __init__(self, name: str, loader: Any) -> None:
        self.name = name
        self.loader = loader
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.epochs: list[Epoch] = []

    @property
    def losses(self) -> list[float]:
        """The losses of all steps."""
        return [loss for epoch in self.epochs for loss in epoch.losses]

    def close(self) -> None:
        """End the loader's workers."""
        if hasattr(self.loader, "close"):
            self.loader.close()
        self.loader = None

    def train_epoch(self, halfway: Callable[[], None] | None = None) -> None:
        """Train for one epoch, and print a line about it.

        Args:
            halfway: Called once, after half of the batches.
        """
        losses, waits, samples = [], [], 0
        name = f"epoch {len(self.epochs)} {self.name:>7}"
        started = asked = time.perf_counter()
        total = len(self.loader)
        with tqdm(total=total, desc=name, unit="batch", leave=False, disable=None) as bar:
            for images, labels in self.loader:
                waits.append(time.perf_counter() - asked)
                losses.append(self.step(images, labels))
                samples += len(labels)
                bar.update()
                if halfway and len(losses) == total // 2:
                    halfway()
                asked = time.perf_counter()
        seconds = time.perf_counter() - started
        first, *others = waits
        longest = max(others, default=0.0)
        self.epochs.append(Epoch(seconds, sum(waits), first, longest, samples, losses))
        start_up = f", first batch after {first:.1f} s" if len(self.epochs) == 1 else ""
        print(f"{name}: loss {sum(losses) / len(losses):.3f}, {seconds:.1f} s{start_up}")

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on one batch, and return its loss."""
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self, test_set: Dataset[Any]) -> float:
        right = total = 0
        for images, labels in DataLoader(test_set, batch_size=500):
            right += int((self.model(images).argmax(1) == labels).sum())
            total += len(labels)
        return right / total


def make_model() -> nn.Module:
    """Return a new model, which always has the same weights."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def conclude(verdict: str, why: str, advice: str) -> None:
    """Print the end of a part of the demo."""
    print()
    for title, text in (("Verdict:", verdict), ("Why:", why), ("Next:", advice)):
        indent = f"{title:9}"
        print(textwrap.fill(text, 98, initial_indent=indent, subsequent_indent=" " * len(indent)))


def sample_cpu_s(dataset: Any, batch_size: int) -> float:
    """Return the processor time that a sample takes in this process, with its part of collating."""
    return cpu_s(lambda: read_batch(dataset, batch_size)) / batch_size


def step_cpu_s(dataset: Any, batch_size: int) -> float:
    """Return the processor time of a training step on one thread."""
    images, labels = read_batch(dataset, batch_size)
    training = Training("", DataLoader(dataset))
    return cpu_s(lambda: training.step(images, labels))


def read_batch(dataset: Any, batch_size: int) -> Any:
    return default_collate([dataset[index] for index in range(batch_size)])


def cpu_s(action: Callable[[], Any]) -> float:
    """Return the least processor time that an action takes in some attempts."""
    times = []
    for _ in range(PROBES):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)
