"""Training of a small CNN with torch's loader, with dpex here, and with dpex on a cluster.

1. torch's loader and dpex with processes of this machine alternate, one epoch each, so that changes
   of the machine's speed affect both.
2. dpex runs on a Ray cluster of simulated nodes. One of them is killed in the middle of an epoch.

All three trainings have the same JPEG files, weights, seed and number of workers, and run on the
same cores of this machine. Their losses must be equal, so the transform draws no random numbers:
torch's loader would draw others than dpex. Everything runs on the CPU.

Run it with ``make demo``, or ``make demo DEMO_ARGS=--quick``.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo_cluster import NODES, train_on_cluster
from demo_data import Scans, find_pictures, first
from demo_training import SEED, Epoch, Training, conclude, sample_cpu_s, step_cpu_s
from torch.utils.data import Dataset
from torchvision import transforms

import dpex

NUM_WORKERS = NODES


def main() -> None:
    # Without this, `kill` or a closed terminal would leave the JPEG files behind.
    for request in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(request, lambda *_: sys.exit(1))
    options = parse_arguments()
    torch.set_num_threads(1)  # leaves the other cores to the workers
    name, make_set = find_pictures()
    print(f"Data: {name}. This machine has {cores()} cores.")
    test_set = make_set(False, transforms.ToTensor())
    with tempfile.TemporaryDirectory() as folder:
        print(f"Writing {options.samples:,} pictures as JPEG files of 1200x1200 pixels ...")
        pictures = Scans(
            first(make_set(True, None), options.samples), Path(folder), transforms.ToTensor()
        )
        print(f"\n1. torch and dpex on this machine, with {NUM_WORKERS} worker processes each.")
        torchs, ours = train_here(pictures, options)
        print(f"\n2. dpex on a Ray cluster of {NODES} nodes, with {NUM_WORKERS} workers.")
        on_cluster = train_on_cluster(pictures, loader_arguments(options), options.epochs)
        print_table([torchs, ours, on_cluster], test_set)
        check_losses([torchs, ours, on_cluster])
        explain(torchs, ours, on_cluster, pictures, options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer samples and epochs, for CI")
    parser.add_argument("--epochs", type=int, help="epochs of each training")
    parser.add_argument("--samples", type=int, help="pictures in an epoch")
    parser.add_argument("--batch-size", type=int, default=50)
    options = parser.parse_args()
    options.epochs = options.epochs or (2 if options.quick else 3)
    options.samples = options.samples or (400 if options.quick else 3_000)
    return options


def cores() -> int:
    return len(os.sched_getaffinity(0))


def loader_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that all three loaders have."""
    return {
        "batch_size": options.batch_size,
        "shuffle": True,
        "num_workers": NUM_WORKERS,
        "persistent_workers": True,
        "generator": torch.Generator().manual_seed(SEED),
    }


def train_here(pictures: Dataset[Any], options: argparse.Namespace) -> tuple[Training, Training]:
    """Train with both loaders of this machine in alternating epochs."""
    ours = dpex.DataLoader(pictures, **loader_arguments(options), head_address="processes")
    both = (
        Training("torch", torch.utils.data.DataLoader(pictures, **loader_arguments(options))),
        Training("dpex", ours),
    )
    for _ in range(options.epochs):
        for training in both:
            training.train_epoch()
    for training in both:
        training.close()
    return both


def print_table(trainings: list[Training], test_set: Dataset[Any]) -> None:
    """Print the results of all trainings."""
    rows: list[tuple[str, Callable[[Training], str]]] = [
        ("samples/s, all epochs", lambda training: f"{rate(training.epochs):,.0f}"),
        ("waiting for data", lambda training: f"{waiting(training.epochs):.1%}"),
        ("first epoch", lambda training: f"{training.epochs[0].seconds:.1f} s"),
        ("  its first batch", lambda training: f"{training.epochs[0].first_batch_s:.1f} s"),
        ("last epoch", lambda training: f"{training.epochs[-1].seconds:.1f} s"),
        ("test accuracy", lambda training: f"{training.accuracy(test_set):.1%}"),
    ]
    print(f"\n{'':22}" + "".join(f"{training.name:>12}" for training in trainings))
    for title, figure in rows:
        print(f"{title:22}" + "".join(f"{figure(training):>12}" for training in trainings))


def check_losses(trainings: list[Training]) -> None:
    """Check that the trainings have the same losses, bit for bit.

    Raises:
        SystemExit: They differ.
    """
    expected, *others = (training.losses for training in trainings)
    if any(losses != expected for losses in others):
        raise SystemExit("The losses of the trainings differ. This is a bug of dpex.")


def explain(
    torchs: Training,
    ours: Training,
    on_cluster: Training,
    pictures: Dataset[Any],
    options: argparse.Namespace,
) -> None:
    """Print what the trainings show."""
    sample_s = sample_cpu_s(pictures, options.batch_size)
    step_s = step_cpu_s(pictures, options.batch_size)
    limit, what = min(
        (NUM_WORKERS / sample_s, f"{NUM_WORKERS} workers make"),
        (options.batch_size / step_s, "the training loop takes"),
        (
            cores() / (sample_s + step_s / options.batch_size),
            f"{cores()} cores make and train on",
        ),
    )
    epoch = on_cluster.epochs[-1]
    conclude(
        f"{verdict(torchs, ours)} On the cluster, a node died in the middle of an epoch. All "
        f"{len(torchs.losses)} losses of the three trainings are equal.",
        f"a sample takes {1e3 * sample_s:.1f} ms of CPU time, and a step {1e3 * step_s:.1f} ms. "
        f"So {what} about {limit:,.0f} samples/s. torch reached {rate(torchs.epochs) / limit:.0%} "
        f"of that, and dpex {rate(ours.epochs) / limit:.0%}, with the start of the workers. The "
        "other node recomputed the lost batches: the longest wait of this epoch was "
        f"{epoch.longest_wait_s:.1f} s. The nodes share the cores of this machine, so the "
        "cluster's column shows its overhead, and not what other machines give.",
        "docs/plain_machines.md connects your machines. docs/do_i_need_it.md says when that helps. "
        "docs/faults.md lists the failures that a run survives.",
    )


def verdict(torchs: Training, ours: Training) -> str:
    """Return a sentence about which loader fed its model faster, over all epochs."""
    ratios = sorted(
        rate([one]) / rate([other]) for one, other in zip(ours.epochs, torchs.epochs, strict=True)
    )
    return (
        f"dpex fed the model {in_words(rate(ours.epochs) / rate(torchs.epochs))}. The loop "
        f"waited {waiting(ours.epochs):.0%} instead of {waiting(torchs.epochs):.0%} of its "
        f"time. Single epochs: from {in_words(ratios[0])} to {in_words(ratios[-1])}."
    )


def in_words(ratio: float) -> str:
    """Return the ratio of two rates as text, such as ``"38% faster"``."""
    percent = round(100 * (ratio - 1))
    if percent >= 100:
        return f"{ratio:.1f} times as fast"
    if percent == 0:
        return "equally fast"
    return f"{abs(percent)}% {'faster' if percent > 0 else 'slower'}"


def rate(epochs: list[Epoch]) -> float:
    """Return the samples per second of some epochs."""
    return sum(epoch.samples for epoch in epochs) / sum(epoch.seconds for epoch in epochs)


def waiting(epochs: list[Epoch]) -> float:
    """Return the fraction of some epochs that the loop waited for data."""
    return sum(epoch.waiting_s for epoch in epochs) / sum(epoch.seconds for epoch in epochs)


if __name__ == "__main__":
    main()
