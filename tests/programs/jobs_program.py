"""A program for ``test_launch.py``: a script that Hydra runs, or that submitit runs."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import submitit
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader


class Numbers(Dataset[Any]):
    def __init__(self, config: Any) -> None:
        self.config = config

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.config.factor * index, str(Path.cwd())


def compare(config: Any) -> None:
    ours = functools.partial(DpexDataLoader, distribute_mode=True, head_address="local", timeout=60)
    found = [
        list(make(Numbers(config), batch_size=4, num_workers=2, collate_fn=list))
        for make in (DataLoader, ours)
    ]
    assert found[0] == found[1], found
    print("rank 0 reads what torch's loader reads", flush=True)


def submit() -> None:
    executor = submitit.AutoExecutor(folder="jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(compare, SimpleNamespace(factor=2))
    job.result()
    print(job.stdout())


if __name__ == "__main__":
    if sys.argv[1] == "submitit":
        submit()
    else:
        hydra.main(version_base=None)(compare)()
