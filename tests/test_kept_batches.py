"""Tests of batches that the loop keeps, while it leaves epochs early and begins others."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dpex import DpexDataLoader

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    # dpex may map no more memory of worker processes if the loop keeps more than this many.
    pytest.mark.filterwarnings("error:batches are copied"),
]

CARRIERS = ("local", "processes")
OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "local"}
KEPT = 40
LONG_S = 90.0


class Large(torch.utils.data.Dataset[Any]):
    """Sample i is a tensor of 1.6 MB that is full of i, and ``objects`` small objects."""

    def __init__(self, objects: int = 0) -> None:
        self.objects = objects

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        boxes = [{"box": [index] * 4, "label": f"l{n}", "set": {n}} for n in range(self.objects)]
        return torch.full((400_000,), float(index)), index, boxes


def listed(samples: list[Any]) -> Any:
    tensors, indices, boxes = zip(*samples, strict=True)
    return torch.stack(tensors), torch.tensor(indices), list(boxes)


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """Keep this process's GIL busy, so that its other threads are late."""
    over = threading.Event()

    def compute() -> None:
        count = 0
        while not over.is_set():
            count += 1

    running = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join()


def is_whole(batch: Any) -> bool:
    tensor, indices, _ = batch
    return bool((tensor == indices.float()[:, None]).all())


def check_kept_batches(loader: DpexDataLoader[Any], rounds: int, seconds: float) -> int:
    """Leave epochs early and keep the last ``KEPT`` batches; return the number of rounds."""
    kept: collections.deque[Any] = collections.deque(maxlen=KEPT)
    began = time.monotonic()
    done = 0
    while done < rounds and time.monotonic() - began < seconds:
        for number, batch in enumerate(loader):
            assert is_whole(batch)
            if len(kept) == KEPT:
                assert is_whole(kept[0]), f"a batch changed before round {done}"
            kept.append(batch)
            if number == done % 3:
                break
        done += 1
    assert all(map(is_whole, kept))
    return done


def loader_of(objects: int, **arguments: Any) -> DpexDataLoader[Any]:
    common = {"num_workers": 2, "prefetch_factor": 8, "collate_fn": listed}
    return DpexDataLoader(Large(objects), **OURS, **{**common, **arguments})


@pytest.mark.extended
def test_kept_batches_stay_while_epochs_are_left_early() -> None:
    with busy(2):
        assert check_kept_batches(loader_of(3000), rounds=60, seconds=60) > 20


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize(
    ("objects", "arguments"),
    [
        (0, {}),
        (3000, {}),
        (50, {"persistent_workers": True}),
        (0, {"num_workers": 4, "batch_size": 3}),
        (0, {"in_order": False}),
    ],
)
def test_kept_batches_stay_for_long(threads: int, objects: int, arguments: dict[str, Any]) -> None:
    with busy(threads):
        check_kept_batches(loader_of(objects, **arguments), rounds=1_000_000, seconds=LONG_S)
