"""Tests of collation: a batch equals that of torch's worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from samples import Pair, TaggedTensor, image
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import (
    collate_tensor_fn,
    default_collate,
    default_collate_fn_map,
)

from dpex import DpexDataLoader
from dpex.transforms import MappedDataset, Stage
from dpex.wire.machine import machine
from dpex.wire.segments import SegmentPool
from dpex.worker import collation
from dpex.worker.collation import collated

pytestmark = [pytest.mark.timeout(60)]

Same = Callable[[Any, Any], None]

CARRIERS = ("local", pytest.param("processes", marks=pytest.mark.extended))
OURS = {"distribute_mode": True, "head_address": "local", "num_workers": 2}
SIDE = 192  # SIDE**2 floats are large; 3 * SIDE**2 bytes are not


def picture(index: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return image(index, *(size or (3, SIDE, SIDE)), dtype=dtype)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": picture,
    "bytes": lambda i: picture(i, 3, SIDE, SIDE, dtype=torch.uint8),
    "complex": lambda i: picture(i, SIDE, SIDE, dtype=torch.complex64),
    "with a label": lambda i: (picture(i), i),
    "list": lambda i: [picture(i), str(i), picture(-i)],
    "dict": lambda i: {"image": picture(i), "label": i, "mask": picture(i, SIDE, 2 * SIDE)},
    "nested": lambda i: ({"views": [picture(i), picture(i + 1)]}, (picture(i), float(i))),
    "the same twice": lambda i: [picture(i)] * 2,
    "large and small": lambda i: (picture(i), torch.tensor(i), picture(i, 3)),
    "small": lambda i: (picture(i, 3), i),
    "one after the other": lambda i: torch.arange(12 * SIDE**2).view(12, SIDE, SIDE)[i],
    "one pixel high": lambda i: picture(i, 3, 1, SIDE**2),
    "one pixel": lambda i: picture(i, SIDE**2, 1, 1),
    "channels last": lambda i: picture(i, SIDE, SIDE, 3).permute(2, 0, 1),
    "repeated": lambda i: torch.tensor(float(i)).expand(SIDE, SIDE),
    "array": lambda i: np.full((SIDE, SIDE), i, dtype=np.float32),
    "named tuple": lambda i: Pair(picture(i), i),
    "ordered": lambda i: OrderedDict(label=i, image=picture(i)),
    "another class": lambda i: picture(i).as_subclass(TaggedTensor),
    "sparse": lambda i: torch.eye(SIDE).mul(i).to_sparse(),
    "learnt": lambda i: picture(i).requires_grad_(),
    "conjugate": lambda i: picture(i, SIDE, SIDE, dtype=torch.complex64).mul(1j).conj(),
    "quantized": lambda i: torch.quantize_per_tensor(
        picture(i, 6, SIDE, SIDE), 1.0, 0, torch.quint8
    ),
    "ragged": lambda i: torch.nested.nested_tensor([picture(i), picture(i, 1, 2, 3)]),
    "ragged and jagged": lambda i: torch.nested.nested_tensor([picture(i)], layout=torch.jagged),
    "sparse only later": lambda i: (picture(i, SIDE, SIDE), torch.eye(SIDE).to_sparse())[i > 0],
    "types that differ": lambda i: picture(i, dtype=(torch.float32, torch.float64)[i % 2]),
    "large only later": lambda i: (picture(i), picture(i, 3 if i == 0 else SIDE**2))[i % 2],
    "another structure": lambda i: (picture(i), {"image": picture(i)})[i == 3],
    "shapes that differ": lambda i: picture(i, SIDE, SIDE + i),
    "more in one": lambda i: [picture(i)] * (2 if i == 2 else 1),
}


# Samples that torch collates otherwise, or refuses, in its worker processes. The test compares only
# these with torch's worker, because its error for shapes that differ names no shape.
OTHERWISE_IN_WORKERS = {"learnt", "types that differ"}


def outcome(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return a batch, or the error's class and text."""
    try:
        return collate(samples)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("taken", [6, 1])
@pytest.mark.parametrize("reader", [machine(), ""], ids=["segments", "no segments"])
def test_a_batch_is_default_collates(kind: str, taken: int, reader: str, assert_same: Same) -> None:
    samples = [SAMPLES[kind](i) for i in range(taken)]
    with pytest.MonkeyPatch.context() as patch:
        if kind in OTHERWISE_IN_WORKERS:
            info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
            patch.setattr(torch_worker, "_worker_info", info)
        expected = outcome(default_collate, samples)
    segments = SegmentPool()
    segments.serve("pipeline", "run", reader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collation, "OWN_SEGMENTS", segments)
        assert_same(outcome(collated, samples), expected)


def test_a_refilled_tensor_repeats_as_in_torch(assert_same: Same) -> None:
    tensor = picture(0)
    samples = [tensor.copy_(picture(i)) for i in range(3)]
    assert_same(collated(samples), default_collate(samples))


def test_a_users_way_to_stack_tensors_is_kept(
    monkeypatch: pytest.MonkeyPatch, assert_same: Same
) -> None:
    def summed(tensors: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map).sum(0)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, summed)
    assert_same(collated([picture(1), picture(2)]), picture(1) + picture(2))


class Pictures(Dataset[Any]):
    """Images, some of which cannot be read if ``broken`` is given."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 5 == self.broken:
            raise ValueError(f"no picture {index}")
        return {"image": picture(index), "views": [picture(-index), index]}


def flipped(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"].flip(-1)}


LOADERS: dict[str, tuple[Dataset[Any], dict[str, Any]]] = {
    "plain": (Pictures(), {"batch_size": 4}),
    "drop_last": (Pictures(), {"batch_size": 4, "drop_last": True}),
    "in a stage": (MappedDataset(Pictures(), Stage(flipped)), {"batch_size": 4}),
}


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_give_torchs_batches(name: str, assert_same: Same) -> None:
    dataset, options = LOADERS[name]
    ours: DpexDataLoader[Any] = DpexDataLoader(dataset, **OURS, **options)
    assert_same(list(ours), list(DataLoader(dataset, **options)))


@pytest.mark.usefixtures("shared_ray")
def test_what_is_left_out_leaves_no_gap(assert_same: Same) -> None:
    dataset = Pictures(broken=2)
    ours = DpexDataLoader(dataset, batch_size=4, on_error="skip", **OURS)
    whole = Pictures()
    left = [
        [i for i in range(begin, min(begin + 4, 23)) if i % 5 != 2] for begin in range(0, 23, 4)
    ]
    assert_same(list(ours), [default_collate([whole[i] for i in batch]) for batch in left])
