"""Tests that need a CUDA device: pinned memory, and random numbers of stages on a GPU."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from living import Plain
from torch.utils.data import DataLoader

from dpex import DpexDataLoader
from dpex.transforms import MappedDataset, Stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CARRIERS = ("local", "processes")
OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "local"}

Pair = namedtuple("Pair", "large small")


class Images(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 64, 64), float(index)), index


class Boxed:
    """A user's batch type with a ``pin_memory`` method."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def pin_memory(self) -> Boxed:
        return Boxed(self.tensor.pin_memory())


def as_pair(samples: list[Any]) -> Pair:
    images, labels = zip(*samples, strict=True)
    return Pair(torch.stack(images), torch.tensor(labels))


def as_dict(samples: list[Any]) -> dict[str, Any]:
    return {"text": "unchanged", "tensors": list(as_pair(samples))}


def as_box(samples: list[Any]) -> Boxed:
    return Boxed(as_pair(samples).large)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Boxed):
        return [value.tensor]
    if isinstance(value, dict):
        return tensors_of(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


@pytest.mark.parametrize("collate", [None, as_pair, as_dict, as_box])
def test_batches_are_pinned_and_the_same(
    assert_same: Callable[[Any, Any], None], collate: Callable[[Any], Any] | None
) -> None:
    arguments: dict[str, Any] = {"batch_size": 8, "collate_fn": collate, "pin_memory": True}
    ours = list(DpexDataLoader(Images(40), **arguments, num_workers=2, **OURS))
    torchs = list(DataLoader(Images(40), **arguments, num_workers=0))
    assert len(ours) == 5
    for our, their in zip(ours, torchs, strict=True):
        tensors = tensors_of(our)
        assert tensors
        assert all(tensor.is_pinned() for tensor in tensors)
        if collate is not as_box:
            assert_same(our, their)
        for tensor in tensors:
            assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)


def noisy(value: torch.Tensor) -> torch.Tensor:
    return value + torch.rand(value.shape, device="cuda").cpu()


def uses_cuda(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, torch.cuda.is_initialized())


def two_epochs(stage: Stage, batch_size: int, num_workers: int) -> list[torch.Tensor]:
    loader: Any = DpexDataLoader(
        MappedDataset(Plain(40), [stage]),
        batch_size,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(5),
        **OURS,
    )
    try:
        return [torch.cat([values for values, _ in loader]) for _ in range(2)]
    finally:
        loader.close()  # the next loader needs the GPU


@pytest.mark.only_ray
@pytest.mark.parametrize(("batched", "batch_size"), [(False, 8), (True, 5)])
def test_what_a_stage_draws_on_its_gpu_depends_on_its_place_alone(
    batched: bool, batch_size: int
) -> None:
    stage = Stage(noisy, batched=batched, num_gpus=1)
    first = two_epochs(stage, 5, 1)
    assert not torch.equal(*first), "every epoch draws new numbers"
    noise = first[0] - first[0].floor()
    assert len(noise.unique()) > noise.numel() // 2
    for epoch, again in zip(first, two_epochs(stage, batch_size, 3), strict=True):
        assert torch.equal(epoch, again)


@pytest.mark.only_ray
def test_seeds_do_not_initialize_cuda() -> None:
    assert not torch.cat(two_epochs(Stage(uses_cuda, num_gpus=1), 5, 1)).any()
