"""A program that trains a small CNN with torch's loader and with dpex, and compares them.

1. Both loaders have the same dataset: only the loader changes.
2. The pictures are large JPEG files, and both loaders keep the decoded pictures in memory.

In each part, two trainings alternate, one epoch each, so that changes of the machine's speed affect
both. The models start with the same weights, and the loaders have the same seed, workers and cores.
Everything runs on the CPU.

Run it with ``make demo``, or ``make demo DEMO_ARGS=--quick``. ``make demo DEMO_ARGS=--cluster``
trains on a cluster of three simulated nodes, one of which dies.
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
from demo_cluster import train_on_cluster
from demo_data import AUGMENT, KeptByWorker, Scans, find_pictures, first
from demo_training import SEED, Epoch, Training, conclude, sample_cpu_s, step_cpu_s
from torch.utils.data import Dataset
from torchvision import transforms

import dpex
from dpex.datasets import cached
from dpex.transforms import MappedDataset

NUM_WORKERS = 2


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
        if not options.cluster:
            change_the_loader(first(make_set(True, AUGMENT), options.samples), test_set, options)
        scans = make_scans(make_set(True, None), folder, options)
        if options.cluster:
            train_on_cluster(MappedDataset(scans, AUGMENT), options.batch_size)
        else:
            keep_decoded_pictures(scans, test_set, options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN with torch's loader and dpex.")
    parser.add_argument("--cluster", action="store_true", help="three nodes, one of which dies")
    parser.add_argument("--quick", action="store_true", help="fewer samples and epochs, for CI")
    parser.add_argument("--epochs", type=int, help="counted epochs of each, after the start-up")
    parser.add_argument("--samples", type=int, help="training samples an epoch; JPEGs: a fifth")
    parser.add_argument("--batch-size", type=int, default=50)
    options = parser.parse_args()
    options.epochs = options.epochs or (2 if options.quick else 4)
    options.samples = options.samples or (5_000 if options.quick else 20_000)
    return options


def cores() -> int:
    return len(os.sched_getaffinity(0))


def change_the_loader(
    dataset: Dataset[Any], test_set: Dataset[Any], options: argparse.Namespace
) -> None:
    """Train with the same dataset in both loaders."""
    print(f"\n1. Both loaders have the same dataset and {NUM_WORKERS} workers.")
    torchs, ours = train_both(dataset, dataset, options)
    ours.loader.close()
    print_table(torchs, ours, test_set)
    sample_s = sample_cpu_s(dataset, options.batch_size)
    step_s = step_cpu_s(dataset, options.batch_size)
    limit, what, advice = min(
        (
            NUM_WORKERS / sample_s,
            f"{NUM_WORKERS} workers make",
            "raise num_workers, because cores are free: docs/num_workers.md.",
        ),
        (
            options.batch_size / step_s,
            "the training loop takes",
            "stay with torch's loader for a model as slow as this one: docs/do_i_need_it.md.",
        ),
        (
            cores() / (sample_s + step_s / options.batch_size),
            f"{cores()} cores make and train on",
            "add the cores of other machines: docs/plain_machines.md. "
            "`make demo DEMO_ARGS=--cluster` shows a training that loses a node.",
        ),
    )
    conclude(
        verdict(torchs, ours),
        f"a sample takes {1e3 * sample_s:.2f} ms of CPU time, and a step {1e3 * step_s:.1f} ms. "
        f"So {what} about {limit:,.0f} samples/s. torch reached "
        f"{rate(torchs.counted) / limit:.0%} of that, and dpex {rate(ours.counted) / limit:.0%}. "
        "The rest is the overhead of the loaders, and what other programs take.",
        advice,
    )


def keep_decoded_pictures(
    scans: Scans, test_set: Dataset[Any], options: argparse.Namespace
) -> None:
    """Train on large JPEG files, and keep the decoded pictures in memory."""
    print(
        f"2. Both loaders have {NUM_WORKERS} workers and keep decoded pictures in memory.\n"
        "   With torch, each worker has a dict. With dpex, all workers have one cache."
    )
    torchs, ours = train_both(
        KeptByWorker(scans, AUGMENT), MappedDataset(cached(scans), AUGMENT), options
    )
    hits = ours.loader.stats().cache_hit_rate
    ours.loader.close()
    print_table(torchs, ours, test_set)
    whole_s = sample_cpu_s(MappedDataset(scans, AUGMENT), options.batch_size)
    rest_s = sample_cpu_s(KeptByWorker(scans, AUGMENT), options.batch_size)
    conclude(
        verdict(torchs, ours),
        f"decoding takes {1e3 * (whole_s - rest_s):.1f} of a sample's {1e3 * whole_s:.1f} ms of "
        f"CPU time. dpex decodes a picture once: in the last epoch, {hits:.0%} of them came from "
        "the cache. torch decodes a picture once in each worker that gets it.",
        "docs/datasets.md describes the cache, which can also be on a disk.",
    )


def make_scans(pictures: Dataset[Any], folder: str, options: argparse.Namespace) -> Scans:
    count = options.samples // 5
    print(f"\nWriting {count:,} pictures as JPEG files of 1200x1200 pixels ...")
    return Scans(first(pictures, count), Path(folder))


def train_both(
    torchs: Dataset[Any], ours: Dataset[Any], options: argparse.Namespace
) -> tuple[Training, Training]:
    """Train with both loaders, which have the same arguments, in alternating epochs."""

    def arguments() -> dict[str, Any]:
        return {
            "batch_size": options.batch_size,
            "shuffle": True,
            "num_workers": NUM_WORKERS,
            "persistent_workers": True,
            "generator": torch.Generator().manual_seed(SEED),
        }

    both = (
        Training("torch", torch.utils.data.DataLoader(torchs, **arguments())),
        Training("dpex", dpex.DataLoader(ours, **arguments(), head_address="local")),
    )
    for _ in range(options.epochs + 1):
        for training in both:
            training.train_epoch()
    return both


def print_table(torchs: Training, ours: Training, test_set: Dataset[Any]) -> None:
    """Print the results of both trainings, with separate rows for the start-up epoch."""
    print(f"\n{'':22}{'torch':>12}{'dpex':>12}")
    rows: list[tuple[str, Callable[[Training], str]]] = [
        ("samples/s", lambda training: f"{rate(training.counted):,.0f}"),
        ("waiting for data", lambda training: f"{waiting(training.counted):.1%}"),
        ("start-up epoch", lambda training: f"{training.epochs[0].seconds:.1f} s"),
        ("  its first batch", lambda training: f"{training.epochs[0].first_batch_s:.1f} s"),
        ("test accuracy", lambda training: f"{training.accuracy(test_set):.1%}"),
    ]
    for title, figure in rows:
        print(f"{title:22}{figure(torchs):>12}{figure(ours):>12}")


def verdict(torchs: Training, ours: Training) -> str:
    """Return a sentence about which loader fed its model faster, after the start-up epoch."""
    ratios = sorted(
        rate([one]) / rate([other]) for one, other in zip(ours.counted, torchs.counted, strict=True)
    )
    return (
        f"dpex fed the model {in_words(rate(ours.counted) / rate(torchs.counted))}. The loop "
        f"waited {waiting(ours.counted):.0%} instead of {waiting(torchs.counted):.0%} of its "
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
