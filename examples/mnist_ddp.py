"""A program that trains on MNIST with ``DistributedDataParallel``.

Run it with ``torchrun --nproc-per-node=2 examples/mnist_ddp.py``, or with
``python examples/mnist_ddp.py --spawn 2``. With ``--spawn``, ``torch.multiprocessing`` starts the
ranks. Rank 0 prints how the ranks divide the 60,000 samples: how many no rank reads, and how many
are read twice.
"""

import argparse
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from mnist import Net, accuracy, train_epoch
from ranks import join_group
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

from dpex import DpexDataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST under DDP.")
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--spawn", type=int, default=0, metavar="RANKS")
    options = parser.parse_args()
    if options.spawn:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        spawn(run_rank, (options.spawn, options), nprocs=options.spawn)
    else:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options)


def run_rank(rank: int, ranks: int, options: argparse.Namespace) -> None:
    """Train as one rank; rank 0 also prints the accuracy."""
    device = join_group(rank, ranks)
    to_tensor = transforms.ToTensor()
    if rank == 0:
        datasets.MNIST(options.data, download=True)
    dist.barrier()
    train_set = datasets.MNIST(options.data, train=True, transform=to_tensor)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, shuffle=True)
    show_shares(sampler, len(train_set))
    loader = DpexDataLoader(
        train_set,
        batch_size=128 // ranks,
        sampler=sampler,
        num_workers=2,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
        distribute_mode=True,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss, samples = train_epoch(model, loader, optimizer, device)
        print(f"rank {rank}, epoch {epoch}: {samples} samples, loss {loss:.3f}")
    if rank == 0:
        test_set = datasets.MNIST(options.data, train=False, transform=to_tensor)
        test_loader = DpexDataLoader(test_set, batch_size=512, num_workers=2, distribute_mode=True)
        print(f"accuracy {accuracy(model.module, test_loader, device):.2%}")
    dist.barrier()
    dist.destroy_process_group()


def show_shares(sampler: DistributedSampler[Any], length: int) -> None:
    """Print in rank 0 how the ranks divide the dataset."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, list(sampler))
    if dist.get_rank() == 0:
        together = set().union(*shares)
        twice = sum(map(len, shares)) - len(together)
        print(
            f"{length} samples in shares of {[len(share) for share in shares]}: "
            f"{length - len(together)} left out, {twice} twice"
        )


if __name__ == "__main__":
    main()
