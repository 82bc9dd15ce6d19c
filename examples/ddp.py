"""A program with ``DistributedDataParallel``: each rank has a loader and a share of the dataset.

Run it with ``torchrun --nproc-per-node=2 examples/ddp.py``. The ranks on a node share one local
Ray, or use the cluster that ``RAY_ADDRESS`` names.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from ranks import join_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from vectors import Model, RandomVectors

from dpex import DpexDataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="A linear model under DDP.")
    parser.add_argument("--samples", type=int, default=90_000)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()

    device = join_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dataset = RandomVectors(options.samples)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DpexDataLoader(
        dataset,
        batch_size=1,
        sampler=sampler,
        num_workers=2,
        persistent_workers=True,
        distribute_mode=True,
    )
    model = DistributedDataParallel(Model(talks=False).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        began = time.monotonic()
        steps = 0
        for vectors in loader:
            output = model(vectors.to(device))
            loss = nn.functional.mse_loss(output, torch.zeros_like(output))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        print(
            f"rank {rank} of {ranks}, epoch {epoch}: {steps} steps in "
            f"{time.monotonic() - began:.1f} s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
