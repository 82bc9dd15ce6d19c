"""A program for ``test_ddp.py`` and torchrun: it writes the batches of both loaders to a file.

Usage: ddp_program.py DIRECTORY HEAD_ADDRESS CASES

CASES is the number of ``CASES`` that it reads.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from dpex import DpexDataLoader

EPOCHS = 2
# Lengths and batch sizes. Only the last length is divisible by ranks and batch size.
CASES = ((37, 4), (3, 4), (37, 1), (37, 7), (48, 4))
NUM_WORKERS = 2


def epochs_of(
    loader_type: Any, length: int, batch_size: int, drop_last: bool, **ours: Any
) -> list[Any]:
    dataset = TensorDataset(torch.arange(length), torch.arange(length) * 0.5)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=drop_last, seed=3)
    torch.manual_seed(dist.get_rank())
    loader = loader_type(
        dataset, batch_size, sampler=sampler, num_workers=NUM_WORKERS, drop_last=drop_last, **ours
    )
    epochs = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epochs.append([(indices.tolist(), halves.tolist()) for indices, halves in loader])
        dist.barrier()
    assert all(len(batches) == len(loader) for batches in epochs)
    return epochs


def after_breaks(loader_type: Any, **ours: Any) -> list[Any]:
    """Return the batches of an epoch that follows an epoch with a ``break``.

    The ranks break one after the other, each at another batch.
    """
    dataset = TensorDataset(torch.arange(48))
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = loader_type(dataset, 4, sampler=sampler, num_workers=NUM_WORKERS, **ours)
    batches = []
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            for number, _ in enumerate(loader):
                if number == rank:
                    break
            batches = [indices.tolist() for (indices,) in loader]
        dist.barrier()
    return batches


class Processes(Dataset[tuple[int, int]]):
    """Samples that are the IDs of their process and of its parent."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.getpid(), os.getppid()


def connection() -> dict[str, str] | None:
    """Return the Ray that this process is connected to; None if the process has not loaded Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None:
        return None
    context = ray.get_runtime_context()
    return {
        "address": context.gcs_address,
        "node": context.get_node_id(),
        "job": context.get_job_id(),
    }


def main() -> None:
    dist.init_process_group("gloo")
    ours: dict[str, Any] = {"distribute_mode": True, "head_address": sys.argv[2]}
    streams = [
        {
            "length": length,
            "batch_size": batch_size,
            "drop_last": drop_last,
            "torch": epochs_of(DataLoader, length, batch_size, drop_last),
            "dpex": epochs_of(DpexDataLoader, length, batch_size, drop_last, **ours),
        }
        for length, batch_size in CASES[: int(sys.argv[3])]
        for drop_last in (False, True)
    ]
    given_up = {
        "torch": after_breaks(DataLoader),
        "dpex": after_breaks(DpexDataLoader, **ours),
    }
    made_by = DpexDataLoader(Processes(), None, num_workers=NUM_WORKERS, **ours)
    report = {
        "pid": os.getpid(),
        "ray": connection(),
        "workers": sorted({tuple(pids) for pids in made_by}),
        "streams": streams,
        "after_breaks": given_up,
    }
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
