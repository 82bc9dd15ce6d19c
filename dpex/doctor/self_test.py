"""A small dataset, and loaders of torch and of dpex that read it for comparison."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from dpex.dataloader import DpexDataLoader
from dpex.stats import LoaderStats

__all__ = ["Epoch", "Noise", "difference", "make_loader", "read"]

_SAMPLES = 4_000
_BATCH_SIZE = 50
_NUM_WORKERS = 2


class Noise(Dataset[tuple[torch.Tensor, str, int]]):
    """Pictures of noise, each with the host name and the pid of the process that made it.

    A picture depends on its index alone. Its values are integers, because a sum of floats may
    differ in the last bit between processors.
    """

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str, int]:
        generator = torch.Generator().manual_seed(index)
        noise = torch.randint(256, (3, 16, 4, 16, 4), generator=generator, dtype=torch.uint8)
        return noise.amax((2, 4)), socket.gethostname(), os.getpid()


@dataclass(frozen=True)
class Epoch:
    """The batches and statistics of one epoch.

    Attributes:
        batches: The batches of pictures.
        makers: Host name and pid of each process that made pictures.
        stats: The loader's statistics of the epoch.
    """

    batches: list[torch.Tensor]
    makers: set[tuple[str, int]]
    stats: LoaderStats


def make_loader(
    *, distribute_mode: bool, head_address: str, timeout_s: float
) -> DpexDataLoader[tuple[torch.Tensor, str, int]]:
    """Return a loader whose batches do not depend on ``distribute_mode``.

    Args:
        distribute_mode: Whether dpex makes the batches; torch does if False.
        head_address: What runs dpex's workers.
        timeout_s: Seconds to wait for a batch.
    """
    return DpexDataLoader(
        Noise(),
        batch_size=_BATCH_SIZE,
        shuffle=True,
        num_workers=_NUM_WORKERS,
        timeout=timeout_s,
        generator=torch.Generator().manual_seed(0),
        persistent_workers=True,
        distribute_mode=distribute_mode,
        head_address=head_address if distribute_mode else "auto",
    )


def read(loader: DpexDataLoader[Any], batches: Iterator[Any]) -> Epoch:
    """Read an epoch of a loader to its end.

    Args:
        loader: The loader.
        batches: The iterator that ``iter(loader)`` returned.
    """
    pictures: list[torch.Tensor] = []
    makers: set[tuple[str, int]] = set()
    for batch, hosts, pids in batches:
        pictures.append(batch)
        makers.update(zip(hosts, pids.tolist(), strict=True))
    return Epoch(pictures, makers, loader.stats())


def difference(ours: Epoch, torchs: Epoch) -> str | None:
    """Return a text that names the first difference of two epochs; None if all bits are equal."""
    if len(ours.batches) != len(torchs.batches):
        return f"{len(ours.batches)} batches, and torch's loader gives {len(torchs.batches)}"
    for number, (one, other) in enumerate(zip(ours.batches, torchs.batches, strict=True)):
        if one.dtype != other.dtype or not torch.equal(one, other):
            return f"batch {number} is not the one that torch's loader gives"
    return None
