"""A program that trains a small CNN twice: with batches from torch's loader, and from dpex.

The two trainings alternate, one epoch each, so that changes of the machine's speed affect both. The
models start with the same weights, and the loaders have the same seed. Everything runs on the CPU.

The program uses FashionMNIST if it is in ``$DPEX_DATA`` or ``./data``, or if it can be downloaded.
Otherwise it uses the digits of scikit-learn.

Run it with ``make demo``, or ``make demo DEMO_ARGS=--quick``.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import datasets, transforms
from tqdm import tqdm

from dpex import DpexDataLoader

SEED = 0
NUM_WORKERS = 2
LEARNING_RATE = 0.002
PROBE_S = 5
DOWNLOAD_S = 90

AUGMENT = transforms.Compose(
    [
        transforms.RandomAffine(degrees=8, translate=(0.08, 0.08), scale=(0.9, 1.1)),
        transforms.ToTensor(),
    ]
)


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """scikit-learn's 8x8 digits as 28x28 pictures; each read applies the transform.

    Args:
        train: Whether to use the first four fifths of the pictures, or the rest.
        transform: Maps a PIL image to a tensor.
        repeats: Number of times that an epoch has each picture.
    """

    def __init__(self, train: bool, transform: Any, repeats: int = 1) -> None:
        digits = load_digits()
        cut = len(digits.images) * 4 // 5
        part = slice(0, cut) if train else slice(cut, None)
        self.pictures = (digits.images[part] * 15).astype("uint8")
        self.labels = digits.target[part]
        self.transform = transform
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.pictures) * self.repeats

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        index %= len(self.pictures)
        picture = transforms.functional.to_pil_image(self.pictures[index])
        return self.transform(picture.resize((28, 28))), int(self.labels[index])


@dataclass
class Contestant:
    """A loader, the model that it feeds, and the results so far."""

    name: str
    loader: DataLoader[Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer = field(init=False)
    epochs: list["EpochResult"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)


@dataclass(frozen=True)
class EpochResult:
    """The times, the number of samples and the mean loss of one training epoch."""

    seconds: float
    waiting_s: float
    first_batch_s: float
    samples: int
    loss: float


def main() -> None:
    options = parse_arguments()
    cores = len(os.sched_getaffinity(0))
    # Leave cores for the workers.
    torch.set_num_threads(max(1, min(4, cores - NUM_WORKERS)))
    name, train_set, test_set = find_data(options.samples)
    print(
        f"Data: {name}; {len(train_set)} training samples an epoch, batch {options.batch_size}, "  # type: ignore[arg-type]
        f"{NUM_WORKERS} workers, {cores} cores."
    )
    contestants = [
        Contestant("torch", make_torch_loader(train_set, options.batch_size), make_model()),
        Contestant("dpex", make_dpex_loader(train_set, options.batch_size), make_model()),
    ]
    # One epoch more: the first one includes the loader's start-up, and is reported separately.
    total = (options.epochs + 1) * len(contestants)
    with tqdm(total=total * len(contestants[0].loader), unit="batch", disable=None) as bar:
        for epoch in range(options.epochs + 1):
            for contestant in contestants:
                bar.set_description(f"epoch {epoch} {contestant.name:>5}")
                result = train_epoch(contestant, bar)
                contestant.epochs.append(result)
                bar.write(describe(epoch, contestant.name, result))
    report(contestants, test_set)
    for contestant in contestants:
        if isinstance(contestant.loader, DpexDataLoader):
            contestant.loader.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN with torch's loader and dpex.")
    parser.add_argument("--quick", action="store_true", help="fewer samples and epochs, for CI")
    parser.add_argument("--epochs", type=int, help="counted epochs of each, after the start-up")
    parser.add_argument("--samples", type=int, help="training samples an epoch, at most")
    parser.add_argument("--batch-size", type=int, default=100)
    options = parser.parse_args()
    options.epochs = options.epochs or (2 if options.quick else 4)
    options.samples = options.samples or (4_000 if options.quick else 30_000)
    return options


def find_data(samples: int) -> tuple[str, Dataset[Any], Dataset[Any]]:
    """Return name, training set and test set: FashionMNIST if available, else digits."""
    folder = Path(os.environ.get("DPEX_DATA", "data"))
    if fashion_is_in(folder) or fetch_fashion(folder):
        train: Dataset[Any] = datasets.FashionMNIST(folder, train=True, transform=AUGMENT)
        test = datasets.FashionMNIST(folder, train=False, transform=transforms.ToTensor())
        return f"FashionMNIST in {folder}", Subset(train, range(min(samples, 60_000))), test
    once = len(Digits(train=True, transform=None))
    train = Digits(train=True, transform=AUGMENT, repeats=max(1, samples // once))
    test = Digits(train=False, transform=transforms.ToTensor())
    return "the digits of scikit-learn (no FashionMNIST on disk, none to be fetched)", train, test


def fashion_is_in(folder: Path) -> bool:
    try:
        datasets.FashionMNIST(folder, train=True)
        datasets.FashionMNIST(folder, train=False)
    except RuntimeError:
        return False
    return True


def fetch_fashion(folder: Path) -> bool:
    """Download FashionMNIST, and return whether it is there.

    The download starts only if the server sends its smallest file within ``PROBE_S`` seconds.
    """

    def probe() -> None:
        smallest = datasets.FashionMNIST.mirrors[0] + "t10k-labels-idx1-ubyte.gz"
        urllib.request.urlopen(smallest, timeout=PROBE_S).read()

    if not finishes(probe, PROBE_S):
        return False
    print(f"Fetching FashionMNIST (30 MB) into {folder} ...")
    folder.mkdir(parents=True, exist_ok=True)
    # An interrupted download must not look like complete data, so it has a folder of its own.
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as aside:
        if not finishes(lambda: datasets.FashionMNIST(aside, download=True), DOWNLOAD_S):
            return False
        shutil.move(Path(aside) / "FashionMNIST", folder / "FashionMNIST")
    return fashion_is_in(folder)


def finishes(action: Any, timeout_s: float) -> bool:
    """Run an action in a thread, and return whether it succeeds in time.

    Without the thread, the action could hang: a name look-up has no timeout.
    """
    done = threading.Event()

    def run() -> None:
        try:
            action()
        except (OSError, RuntimeError):
            return
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return done.is_set()


def make_torch_loader(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(SEED),
    )


def make_dpex_loader(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    return DpexDataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(SEED),
        distribute_mode=True,
    )


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


def train_epoch(contestant: Contestant, bar: Any) -> EpochResult:
    """Train for one epoch, and measure every wait for a batch."""
    model, optimizer = contestant.model.train(), contestant.optimizer
    waiting_s = first_batch_s = total_loss = 0.0
    samples = 0
    started = asked = time.perf_counter()
    for image, label in contestant.loader:
        waited_s = time.perf_counter() - asked
        waiting_s += waited_s
        first_batch_s = first_batch_s or waited_s
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += len(label)
        total_loss += loss.item() * len(label)
        bar.update()
        asked = time.perf_counter()
    seconds = time.perf_counter() - started
    return EpochResult(seconds, waiting_s, first_batch_s, samples, total_loss / samples)


def describe(epoch: int, name: str, result: EpochResult) -> str:
    first = f", first batch after {result.first_batch_s:.1f} s (start-up)" if epoch == 0 else ""
    return f"epoch {epoch} {name:>5}: loss {result.loss:.3f}, {result.seconds:.1f} s{first}"


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset[Any]) -> float:
    right = total = 0
    for image, label in DataLoader(dataset, batch_size=500):
        right += int((model.eval()(image).argmax(1) == label).sum())
        total += len(label)
    return right / total


def report(contestants: list[Contestant], test_set: Dataset[Any]) -> None:
    """Print a table of the results, with separate rows for the start-up epoch."""
    print(f"\n{'':22}" + "".join(f"{contestant.name:>12}" for contestant in contestants))
    rows: dict[str, list[str]] = {
        "test accuracy": [],
        "samples/s": [],
        "waiting for data": [],
        "start-up epoch": [],
        "  its first batch": [],
    }
    for contestant in contestants:
        start_up, *counted = contestant.epochs
        seconds = sum(epoch.seconds for epoch in counted)
        figures = (
            f"{accuracy(contestant.model, test_set):.2%}",
            f"{sum(epoch.samples for epoch in counted) / seconds:,.0f}",
            f"{sum(epoch.waiting_s for epoch in counted) / seconds:.1%}",
            f"{start_up.seconds:.1f} s",
            f"{start_up.first_batch_s:.1f} s",
        )
        for row, figure in zip(rows.values(), figures, strict=True):
            row.append(figure)
    for title, row in rows.items():
        print(f"{title:22}" + "".join(f"{figure:>12}" for figure in row))
    print(
        "\nSame weights, same order of samples. Augmentations differ: torch seeds each worker,\n"
        "dpex each sample, so the accuracies agree to within noise and not to the digit."
    )


if __name__ == "__main__":
    main()
