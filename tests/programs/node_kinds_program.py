"""A program for ``test_built_on_node.py``: all kinds of datasets, on a node without data files.

Usage: node_kinds_program.py HOST:PORT CACHE FILE
       node_kinds_program.py HOST:PORT CACHE KIND MARK FILE

The second form reads one kind of dataset, and kills a worker process once.
"""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data_files import PICTURES, ROWS
from idx_files import TEST
from living import KillsWhileReading
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from dpex import DpexDataLoader, NodeDataError
from dpex.datasets import FashionMNIST, ImageFolder, Parquet, cached, from_torchvision, on_node
from dpex.transforms import MappedDataset, Stage

BATCH_SIZE = 3
COLUMNS = ["number", "share", "name"]


def to_tensor(image: Any) -> torch.Tensor:
    return v2.functional.pil_to_tensor(image) / 255


def darker(image: torch.Tensor) -> torch.Tensor:
    return image / 2


def centred(images: torch.Tensor) -> torch.Tensor:
    return images - images.mean()


def noisy(images: torch.Tensor) -> torch.Tensor:
    return images + torch.rand(images.shape)


def with_mask(image: Any, label: int) -> Any:
    """Return a picture, the mask of its bright pixels, and its label."""
    pixels = tv_tensors.Image(v2.functional.pil_to_tensor(image))
    return pixels, tv_tensors.Mask(pixels[0] > 128), label


COMPOSE = v2.Compose([v2.ToImage(), v2.Resize(20), v2.ToDtype(torch.float32, scale=True)])
FIXED = [v2.ToImage(), v2.Resize((6, 5))]
JOINT = [with_mask, v2.RandomHorizontalFlip(1.0), v2.Resize((12, 10))]
# A stage with other options than the part before it runs in separate tasks.
STAGES = [to_tensor, Stage(darker, num_cpus=0.5), Stage(centred, batched=True)]
CROPPED = [*FIXED, v2.RandomCrop(4)]
RANDOM_STAGES = [*FIXED, Stage(v2.RandomCrop(4), num_cpus=0.5), Stage(noisy, batched=True)]


def of_node(make: Callable[..., Any], name: str, **options: Any) -> Any:
    """Return a dataset of this node's files."""
    return make(str(Path(os.environ["NODE_FILES"]) / name), **options)


def apart(folder: str) -> Any:
    whole = datasets.FashionMNIST(folder, train=False, transform=COMPOSE, target_transform=float)
    return from_torchvision(whole)


def kinds(cache: str) -> dict[str, Any]:
    pictures = on_node(of_node, datasets.ImageFolder, "pictures", length=len(PICTURES))
    fixed = MappedDataset(pictures, FIXED)
    digits: dict[str, Any] = {"train": False, "transform": to_tensor}
    return {
        "FashionMNIST": on_node(of_node, datasets.FashionMNIST, "digits", length=TEST, **digits),
        "ImageFolder": MappedDataset(pictures, to_tensor),
        "cached in memory": cached(fixed),
        "cached in a directory": cached(fixed, at=cache),
        "random behind a cache": MappedDataset(cached(fixed), v2.RandomCrop(4)),
        "from_torchvision": on_node(of_node, apart, "digits", length=TEST),
        "joint transforms": MappedDataset(pictures, transforms=JOINT),
        "stages": MappedDataset(pictures, STAGES),
        "random stages": MappedDataset(pictures, RANDOM_STAGES),
        "Parquet": on_node(of_node, Parquet, "rows", columns=COLUMNS, length=ROWS),
        "FashionMNIST in a store": FashionMNIST("s3://bucket/zipped", **digits),
        "ImageFolder in a store": ImageFolder("s3://bucket/pictures", to_tensor),
        "Parquet in a store": Parquet("s3://bucket/rows", COLUMNS),
    }


def two_epochs(dataset: Any, address: str, **options: Any) -> dict[str, Any]:
    loader: Any = DpexDataLoader(
        dataset,
        BATCH_SIZE,
        num_workers=2,
        generator=torch.Generator().manual_seed(0),
        distribute_mode=True,
        head_address=address,
        **options,
    )
    epochs = [list(loader) for _ in range(2)]
    report = {"epochs": epochs, "hit_rate": loader.stats().cache_hit_rate}
    loader.close()
    return report


def main() -> None:
    address, cache, *one, out = sys.argv[1:]
    report: dict[str, Any] = {}
    if one:
        kind, mark = one
        # The second sample of the second batch.
        dataset = KillsWhileReading(kinds(cache)[kind], BATCH_SIZE + 1, Path(mark))
        report = two_epochs(dataset, address)
    else:
        try:
            on_node(of_node, datasets.ImageFolder, "pictures")
        except NodeDataError as error:
            report["here"] = str(error)
        for name, dataset in kinds(cache).items():
            # torch's default_collate turns torchvision's tensors into plain ones.
            collate_fn = list if name == "joint transforms" else None
            report[name] = two_epochs(dataset, address, collate_fn=collate_fn)
    Path(out).write_bytes(pickle.dumps(report))


if __name__ == "__main__":
    main()
