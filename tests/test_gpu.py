"""Pinned memory, where there is a CUDA device to pin it for."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from living import Plain
from torch.utils.data import DataLoader

from dpex import DpexDataLoader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Pair = namedtuple("Pair", "large small")


class Images(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 64, 64), float(index)), index


class Boxed:
    """A batch type of the user's own that knows how to pin itself."""

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
    ours = list(DpexDataLoader(Images(40), **arguments, num_workers=2, distribute_mode=True))
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
