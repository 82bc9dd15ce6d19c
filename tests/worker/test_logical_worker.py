"""Tests of the state that torch and the user's code expect in a DataLoader worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dpex import DpexDataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

CARRIERS = ("local", "processes")
OURS = {"distribute_mode": True, "head_address": "local"}
# Fields of ``WorkerInfo`` whose values do not depend on the process.
FIELDS = ("id", "num_workers", "seed", "rng", "worker_method")


def seen() -> dict[str, Any]:
    """Return what a worker learns about itself, as far as the installed torch defines it."""
    info = get_worker_info()
    assert info is not None
    found = {name: getattr(info, name) for name in FIELDS if hasattr(info, name)}
    found["names"] = sorted(name for name in dir(info) if not name.startswith("_"))
    found["type"] = type(info)
    found["dataset"] = type(info.dataset)
    if hasattr(torch, "thread_safe_generator"):
        generator = torch.thread_safe_generator()
        found["generator"] = generator
        # A transform of torchvision draws in this way.
        found["drawn"] = torch.randint(1 << 30, (2,), generator=generator).tolist()
    return found


def as_is(samples: list[Any]) -> list[Any]:
    return [*samples, {**seen(), "drawn": None}]


class Informed(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        # dpex seeds each sample of a map-style dataset by itself.
        return {**seen(), "drawn": None}


class InformedStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            yield seen()


@pytest.mark.parametrize("dataset", [Informed(), InformedStream()], ids=["map", "stream"])
def test_workers_see_the_worker_info_that_torchs_see(dataset: Any) -> None:
    batches = []
    for kind, options in ((DataLoader, {}), (DpexDataLoader, OURS)):
        torch.manual_seed(7)
        loader = kind(dataset, batch_size=2, num_workers=2, collate_fn=as_is, **options)
        batches.append(list(loader))
    assert batches[1] == batches[0]
    assert len(batches[0]) >= 3


def test_the_process_outside_of_workers_has_no_generator_of_a_worker() -> None:
    loader = DpexDataLoader(Informed(), num_workers=2, collate_fn=as_is, **OURS)
    assert list(loader)
    assert get_worker_info() is None
    if hasattr(torch, "thread_safe_generator"):
        assert torch.thread_safe_generator() is None
