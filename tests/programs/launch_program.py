"""A program for ``test_launch.py``: a script that defines its own dataset."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from typing import Any

import PIL.ImageFile
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader


class Kind(Enum):
    EVEN = 0
    ODD = 1


def scaled(index: int) -> int:
    return 3 * index


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(scaled(index)), Kind(index % 2)


def collate(samples: list[Any]) -> Any:
    numbers, kinds = zip(*samples, strict=True)
    return torch.stack(numbers), list(kinds)


def read(loader: Any) -> list[Any]:
    return [(numbers.tolist(), kinds) for numbers, kinds in loader]


def compare(rank: int = 0) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": collate}
    expected = read(DataLoader(Numbers(), **arguments))
    for carrier in ("processes", "local"):
        loader = DpexDataLoader(
            Numbers(), distribute_mode=True, head_address=carrier, timeout=60, **arguments
        )
        for _ in range(2):
            assert read(loader) == expected
    print("rank", rank, "reads what torch's loader reads", flush=True)


class Told(Dataset[Any]):
    """Samples that are settings of their process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        import launch_config as config

        mask = os.umask(0)
        os.umask(mask)
        switches = PIL.ImageFile.LOAD_TRUNCATED_IMAGES, config.size, vars(config).get("name")
        switches += config.Config.scale, vars(config.Config).get("crop")
        return os.environ.get("KIND"), os.environ.get("ROOT"), mask, *switches


def settings_change() -> None:
    import launch_config as config  # not above: `python -I` finds no module beside the script

    os.environ["KIND"] = "first"
    for persistent in (False, True):
        loaders = [
            make(Told(), num_workers=2, batch_size=None, persistent_workers=persistent)
            for make in (
                DataLoader,
                functools.partial(DpexDataLoader, distribute_mode=True, head_address="processes"),
            )
        ]
        for kind, root, mask in (("a", "/data", 0o022), ("b", None, 0o077), ("first", "/", 0o022)):
            os.umask(mask)
            os.environ["KIND"] = kind
            os.environ.pop("ROOT", None)
            if root is not None:
                os.environ["ROOT"] = root
            PIL.ImageFile.LOAD_TRUNCATED_IMAGES = kind == "b"
            config.size = config.Config.scale = len(kind)
            if kind != "b":
                config.name = config.Config.crop = kind  # type: ignore[attr-defined]
            else:
                del config.name, config.Config.crop
            torchs, ours = [list(loader) for loader in loaders]
            assert ours == torchs, (persistent, ours, torchs)
    print("rank 0 reads what torch's loader reads", flush=True)


def pooled() -> None:
    context = torch.multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(compare).result()


if __name__ == "__main__":
    how = sys.argv[1]
    if how == "alone":
        compare()
    elif how == "warnings are errors":
        warnings.simplefilter("error")
        compare()
    elif how == "spawn":
        torch.multiprocessing.spawn(compare, nprocs=2)  # type: ignore[no-untyped-call]
    elif how == "settings":
        settings_change()
    elif how == "pool":
        pooled()
