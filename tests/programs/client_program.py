"""A program for ``test_client.py``: a training process that uses Ray Client.

Usage: client_program.py ray://HOST:PORT FILE
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import beside_the_script  # a module that no node of the cluster has
import ray
import torch
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, beside_the_script.double(index)]), os.getpid()


class Draws(Numbers):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2), os.getpid()


class Where(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), ray.get_runtime_context().get_node_id()


class Large(Numbers):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((5_000_000,), index), os.getpid()


class Failing(Numbers):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(1 / (index - 30)), os.getpid()


def make(loader_type: Any, dataset: Any, num_workers: int = 2, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    return loader_type(
        dataset, batch_size=4, generator=generator, num_workers=num_workers, **options
    )


def main() -> None:
    ours = {"distribute_mode": True, "head_address": sys.argv[1]}

    def epochs(loader: Any) -> list[list[Any]]:
        return [[numbers.tolist() for numbers, _ in loader] for _ in range(2)]

    def outcome(batches: Iterator[Any]) -> str:
        try:
            while True:
                next(batches)
        except (ZeroDivisionError, StopIteration) as error:
            return f"{type(error).__name__}: {error}"

    loader = make(DpexDataLoader, Numbers(), shuffle=True, persistent_workers=True, **ours)
    report = {
        "dpex": epochs(loader),
        "torch": epochs(make(DataLoader, Numbers(), shuffle=True, persistent_workers=True)),
        "draws": [
            epochs(make(DpexDataLoader, Draws(), num_workers, **ours)) for num_workers in (1, 3)
        ],
        "large": [
            [int(numbers.min()), int(numbers.max()), numbers.numel()]
            for numbers, _ in make(DpexDataLoader, Large(), **ours)
        ],
        "failing": outcome(iter(make(DpexDataLoader, Failing(), **ours))),
        "client": ray.util.client.ray.is_connected(),
        "pid": os.getpid(),
        "head": ray.get_runtime_context().get_node_id(),
        "nodes": [n for _, nodes in make(DpexDataLoader, Where(), **ours) for n in nodes],
    }
    pids: set[int] = set()
    for step, (_, batch_pids) in enumerate(loader):  # cancelled early, then iterated again
        pids.update(batch_pids.tolist())
        if step == 2:
            break
    report["again"] = sum(len(numbers) for numbers, _ in loader)
    report["pids"] = sorted(pids)
    survived = []
    for step, (numbers, _) in enumerate(loader):
        survived.append(numbers.tolist())
        if step == 2:
            ray.kill(loader._cluster.session._actor.handle)
    report["survived"] = survived
    torchs = make(DataLoader, Numbers(), shuffle=True, persistent_workers=True)
    for batches in (50, 50, 3, 50):  # the same iterations as of dpex's loader
        list(zip(range(batches), torchs, strict=False))
    report["expected"] = [numbers.tolist() for numbers, _ in torchs]
    loader.close()
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
