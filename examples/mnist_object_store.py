"""A program that trains with DDP on MNIST from an object store, with a progress bar.

The store can be any server with S3's protocol. It holds ``training.pt`` and ``test.pt``, each a
tuple of uint8 images (N, 28, 28) and int64 labels (N,). The training processes and the workers read
the credentials from the environment::

    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_ENDPOINT_URL=https://...
    torchrun --nproc-per-node=2 examples/mnist_object_store.py BUCKET/FOLDER

Every worker process reads the data from the store. dpex sends it the path of the data and indices.
"""

import argparse
import os
from typing import Any

import pyarrow.fs
import torch
import torch.distributed as dist
from mnist import Net, accuracy, train_epoch
from ranks import join_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from dpex import DpexDataLoader


def open_store() -> pyarrow.fs.S3FileSystem:
    """Connect to the store that the environment names."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    scheme, _, address = endpoint.partition("://")
    return pyarrow.fs.S3FileSystem(
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        endpoint_override=address,
        scheme=scheme,
    )


class StoredMnist(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Digits in one file of an object store; each process that reads samples reads the file.

    Args:
        path: Bucket and path of the file: ``"bucket/folder/training.pt"``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._content: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = len(self.content[1])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that the workers get: the path of the data, without the data."""
        return {**self.__dict__, "_content": None}

    @property
    def content(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels, read on first use."""
        if self._content is None:
            with open_store().open_input_file(self.path) as file:
                self._content = torch.load(file, weights_only=True)
        return self._content

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.content
        return images[index].unsqueeze(0) / 255, labels[index]


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST from an object store, under DDP.")
    parser.add_argument("folder", help="BUCKET/FOLDER of training.pt and test.pt")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    device = join_group()
    rank = dist.get_rank()
    train_set = StoredMnist(f"{options.folder}/training.pt")
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    loader = DpexDataLoader(
        train_set,
        batch_size=64,
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
        bar = tqdm(loader, desc=f"epoch {epoch}", unit="batch", disable=rank > 0)
        loss, samples = train_epoch(model, bar, optimizer, device)
        print(f"rank {rank}, epoch {epoch}: {samples} samples, loss {loss:.3f}")
    if rank == 0:
        test_loader = DpexDataLoader(
            StoredMnist(f"{options.folder}/test.pt"),
            batch_size=512,
            num_workers=2,
            distribute_mode=True,
        )
        print(f"accuracy {accuracy(model.module, test_loader, device):.2%}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
