"""The benchmark ``uint8``: photographs that leave the workers as uint8 or as float32.

The transforms are the same, except that the workers convert only ``float32`` to floating point.
With ``uint8``, the training process would convert. On a GPU, the conversion takes a fraction of a
millisecond for a batch. Here it takes time of a core, and is reported separately.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torchvision import transforms
from torchvision.transforms import v2

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
from benchmarks.workloads import IMAGENET_MEAN, IMAGENET_STD, PhotographFiles, make_jpegs
from dpex.transforms import MappedDataset

FOLDER = Path("build/bench-data/jpeg")
BATCH_SIZE = 64
GOAL_BYTES = 4.0

CROP = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
FINISH = v2.Compose(
    [v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
)


def main() -> None:
    options = arguments(__doc__, "uint8")
    torch.set_num_threads(1)
    files = PhotographFiles(make_jpegs(FOLDER.resolve()))
    chains: dict[str, list[Any]] = {
        "float32": [*CROP, transforms.PILToTensor(), FINISH],
        "uint8": [*CROP, transforms.PILToTensor()],
    }
    loaders = {
        kind: make_loader(
            "dpex",
            MappedDataset(files, chain),
            batch_size=BATCH_SIZE,
            num_workers=options.workers,
            shuffle=True,
        )
        for kind, chain in chains.items()
    }
    sizes = {}
    try:
        rates = take_turns(loaders, options.rounds, "uint8")
        for kind, loader in loaders.items():
            images, _ = next(iter(loader))
            sizes[kind] = images.nbytes / len(images)
    finally:
        for loader in loaders.values():
            close(loader)
    began = time.perf_counter()
    FINISH(images)
    record = describe_machine("uint8")
    record["finish_ms_per_batch"] = 1e3 * (time.perf_counter() - began)
    record["bytes_per_sample"] = sizes
    record["samples_per_s"] = {kind: summarise(rate) for kind, rate in rates.items()}
    over = [late / early for late, early in zip(rates["uint8"], rates["float32"], strict=True)]
    note = f"the end takes {record['finish_ms_per_batch']:.0f} ms a batch on one core here"
    goals = [
        Goal.of(
            "uint8: bytes that a sample needs less, times",
            [sizes["float32"] / sizes["uint8"]],
            ">=",
            GOAL_BYTES,
            "ratio",
        ),
        Goal.of("uint8: samples/s over float32's", over, ">=", 1.0, "ratio", note),
    ]
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Photographs out of dpex's workers, {options.workers} workers",
        {f"dpex, {kind}": rate for kind, rate in rates.items()},
        "samples/s",
    )
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


if __name__ == "__main__":
    main()
