"""The benchmark ``cached``: photographs whose deterministic transforms are cached, against torch.

dpex reads the results of these transforms from a cache, which its first epoch fills. torch computes
them every time. The possible gain is known: for torch, a sample takes the time of the cached part
and of the rest. For dpex, it takes only the rest, which includes collating. Each round measures the
time of both parts in one process, without a loader. The record has the possible gain of each round
beside the measured gain.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate
from torchvision import transforms

from benchmarks.goals import Goal
from benchmarks.harness import (
    arguments,
    close,
    describe_machine,
    make_loader,
    summarise,
    take_turns,
    write,
)
from benchmarks.plots import bars
from benchmarks.workloads import (
    AUGMENT,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PhotographFiles,
    make_jpegs,
)
from dpex.datasets import cached
from dpex.transforms import MappedDataset

FOLDER = Path("build/bench-data")
LARGE = (1_600, 1_200)
BATCH_SIZE = 64
TIMED_BATCHES = 4
GOAL_OF_POSSIBLE = 0.9
GOAL_LARGE = 3.0

REST_OF_LARGE = transforms.Compose(
    [
        transforms.RandomCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
)


def seconds_a_sample(make: Callable[[range], Any], length: int) -> float:
    """Return the time of a sample: the median time of some batches, divided by their size."""
    times = []
    for start in range(0, length - BATCH_SIZE + 1, BATCH_SIZE)[:TIMED_BATCHES]:
        began = time.perf_counter()
        make(range(start, start + BATCH_SIZE))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / BATCH_SIZE


def measure(name: str, fixed: MappedDataset, rest: Any, options: Any) -> dict[str, Any]:
    """Run both loaders in turn.

    Args:
        name: Name of the workload.
        fixed: Photographs with the cached transforms.
        rest: The other transforms.
        options: ``workers`` and ``rounds``.
    """
    samples = [fixed[index] for index in range(min(len(fixed), TIMED_BATCHES * BATCH_SIZE))]
    fixed_s: list[float] = []
    rest_s: list[float] = []

    def make_fixed(batch: range) -> Any:
        return [fixed[index] for index in batch]

    def make_rest(batch: range) -> Any:
        return default_collate([rest(samples[index][0]) for index in batch])

    @contextmanager
    def with_parts_timed(peer: str) -> Iterator[None]:
        if peer == "torch":  # once a round
            fixed_s.append(seconds_a_sample(make_fixed, len(samples)))
            rest_s.append(seconds_a_sample(make_rest, len(samples)))
        yield

    loaders = {
        peer: make_loader(
            peer,
            MappedDataset(dataset, rest),
            batch_size=BATCH_SIZE,
            num_workers=options.workers,
            shuffle=True,
        )
        for peer, dataset in (("torch", fixed), ("dpex", cached(fixed)))
    }
    try:
        rates = take_turns(loaders, options.rounds, f"cached {name}", with_parts_timed)
    finally:
        for loader in loaders.values():
            close(loader)
    over = [ours / torchs for ours, torchs in zip(rates["dpex"], rates["torch"], strict=True)]
    # Without the first round, in which workers start and dpex fills the cache.
    fixed_s, rest_s = fixed_s[1:], rest_s[1:]
    possible = [1 + cached_s / left_s for cached_s, left_s in zip(fixed_s, rest_s, strict=True)]
    return {
        "fixed_ms": 1e3 * statistics.median(fixed_s),
        "rest_ms": 1e3 * statistics.median(rest_s),
        "possible": summarise(possible),
        "over_possible": summarise([r / p for r, p in zip(over, possible, strict=True)]),
        "samples_per_s": {peer: summarise(rate) for peer, rate in rates.items()},
        "over_torch": summarise(over),
    }


def main() -> None:
    options = arguments(__doc__, "cached")
    torch.set_num_threads(1)
    small = PhotographFiles(make_jpegs((FOLDER / "jpeg").resolve()))
    large = PhotographFiles(make_jpegs((FOLDER / "large").resolve(), 256, LARGE))
    record = describe_machine("cached")
    record["workloads"] = {
        "500x375": measure("500x375", MappedDataset(small), AUGMENT, options),
        "1600x1200": measure(
            "1600x1200", MappedDataset(large, transforms.Resize(256)), REST_OF_LARGE, options
        ),
    }
    goals = []
    for name, bound in (("500x375", None), ("1600x1200", GOAL_LARGE)):
        found = record["workloads"][name]
        note = (
            f"{found['fixed_ms']:.1f} ms are cached, {found['rest_ms']:.1f} ms are not: "
            f"{found['possible']['median']:.2f} is possible"
        )
        what = f"cached {name}: samples/s over torch's"
        if bound is None:
            what += ", of what is possible"
            values, bound = found["over_possible"]["all"], GOAL_OF_POSSIBLE
        else:
            values = found["over_torch"]["all"]
        goals.append(Goal.of("storage", what, values, ">=", bound, "ratio", note))
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Photographs with a cached beginning, {options.workers} workers",
        {
            f"{peer}, {name}": rate["all"]
            for name, found in record["workloads"].items()
            for peer, rate in found["samples_per_s"].items()
        },
        "samples/s",
        None,
    )
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


if __name__ == "__main__":
    main()
