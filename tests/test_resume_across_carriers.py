"""Tests that a state taken on one carrier is that of the other, which resumes from it."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import seed_everything
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from dpex import DpexDataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

CARRIERS = ("local", "processes")
OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "local"}
TAKEN = 3


class Drawing(Dataset[Any]):
    """Samples of their index and random numbers."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random()


class DrawingLate(Drawing):
    """Samples of which only later ones draw."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index > 9 else (index, torch.zeros(2), 0.0)


class Stream(IterableDataset[Any]):
    """The shard of the worker, with random numbers."""

    done = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        for number in range(worker.id, 40, worker.num_workers)[self.done :]:
            self.done += 1
            yield number, torch.rand(2), self.done


class StatefulStream(Stream):
    """A stream that continues at the number that its state has."""

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


DATASETS: dict[str, dict[str, Any]] = {
    "map": {"dataset": Drawing(), "shuffle": True},
    "map, draws late": {"dataset": DrawingLate()},
    "stream": {"dataset": Stream()},
    "stateful stream": {"dataset": StatefulStream()},
}


def plain(value: Any) -> Any:
    """Return a batch as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def read(
    arguments: dict[str, Any], state: Any = None, taken: int | None = None
) -> list[tuple[Any, Any]]:
    """Return batches, each with the loader's state after it."""
    seed_everything(0 if state is None else 99)
    with DpexDataLoader(**copy.deepcopy(arguments), batch_size=4, num_workers=2) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [
            (plain(batch), json.loads(json.dumps(loader.state_dict())))
            for batch in itertools.islice(loader, taken)
        ]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", DATASETS)
def test_a_state_resumes_on_the_other_carrier(kind: str, persistent: bool, carrier: str) -> None:
    [other] = {*CARRIERS} - {carrier}
    arguments = {**DATASETS[kind], "persistent_workers": persistent, **OURS}
    elsewhere = {**arguments, "head_address": other}
    whole = read(arguments)
    taken = read(elsewhere, taken=TAKEN)
    assert taken == whole[:TAKEN], "the same batches and states on both"
    rest = read(arguments, state=taken[-1][1])
    assert [batch for batch, _ in rest] == [batch for batch, _ in whole[TAKEN:]]
    assert rest[-1][1] == whole[-1][1]
