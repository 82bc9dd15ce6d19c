"""Tests of the costs of samples, and of the part that can be cached, in a worker of torch."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from dpex import DpexDataLoader
from dpex.doctor.facts import Problem
from dpex.doctor.fixed_part import FixedPart, RandomSample
from dpex.doctor.sample_costs import SampleCosts, measure
from dpex.transforms import MappedDataset

pytestmark = pytest.mark.timeout(60)

PAUSE_S = 0.004
BUDGET_S = 0.5


class Numbers(Dataset[Any]):
    """Samples that wait; sample 7 raises, if asked to."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.shift = 0.0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self.broken and index == 7:
            raise ValueError("a broken file")
        time.sleep(PAUSE_S)
        return torch.full((500,), float(index) + self.shift)


class Batches(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        assert worker.dataset is self
        for number in range(40):
            time.sleep(PAUSE_S)
            yield number


def compute(value: Any) -> Any:
    until = time.process_time() + 2 * PAUSE_S
    while time.process_time() < until:
        pass
    return value


def pause(value: Any) -> Any:
    time.sleep(PAUSE_S)
    return value


def double(value: Any) -> Any:
    return 2 * value


def noise(value: Any) -> Any:
    return value + torch.rand(())


def rarely(value: Any) -> Any:
    """Draw a number, and use it rarely."""
    return -value if random.random() < 1e-6 else value


def own_noise(value: Any) -> Any:
    return value + np.random.default_rng().random()


def measured(dataset: Any, **options: Any) -> SampleCosts:
    return measure(DataLoader(dataset, **{"batch_size": 5, **options}), budget_s=BUDGET_S)


def fixed(dataset: Any, **options: Any) -> FixedPart | None:
    found = measured(dataset, **options).fixed
    assert not isinstance(found, RandomSample)
    return found


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(), {}),
        (Numbers(), {"batch_size": None}),
        (Batches(), {}),
        (Stream(), {}),
        (Stream(), {"batch_size": None}),
    ],
    ids=["map-style", "unbatched", "getitems", "stream", "unbatched stream"],
)
def test_waiting_and_collating_are_told_apart(dataset: Any, options: Any) -> None:
    costs = measured(dataset, **options, collate_fn=pause)
    parts = costs.batch_samples
    assert parts == (1 if options else 5)
    assert costs.samples % parts == 0
    assert costs.read_s >= PAUSE_S
    assert costs.collate_s >= PAUSE_S / parts
    assert costs.transform_s == 0
    assert costs.wall_s == pytest.approx(costs.read_s + costs.collate_s)
    assert costs.idle_s >= 0.9 * PAUSE_S
    assert costs.cpu_s + costs.idle_s + costs.queued_s == pytest.approx(costs.wall_s)


def test_computing_is_no_waiting() -> None:
    costs = measured(MappedDataset([torch.zeros(3)] * 40, [compute]))
    assert costs.transform_s >= 2 * PAUSE_S
    assert costs.cpu_s >= 2 * PAUSE_S


def test_this_process_reads_no_sample_and_worker_init_fn_sees_the_dataset() -> None:
    dataset = Numbers()

    def begin(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert (info.id, info.num_workers, worker) == (0, 3, 0)
        info.dataset.shift = 0.5

    def collate(samples: list[Any]) -> None:
        assert all(sample[0] % 1 == 0.5 for sample in samples)

    measured(dataset, num_workers=3, worker_init_fn=begin, collate_fn=collate)
    assert dataset.shift == 0


def test_a_sample_that_raises_is_named() -> None:
    with pytest.raises(Problem, match=r"^sample 7 raises ValueError: a broken file$") as raised:
        measured(Numbers(broken=True))
    assert "in __getitem__" in raised.value.details
    with pytest.raises(Problem, match=r"^the batch of samples \[5, 6, 7, 8, 9\] raises ValueError"):
        measured(Batches(broken=True))


def test_a_collate_fn_that_raises_is_named() -> None:
    with pytest.raises(Problem, match=r"^collate_fn, after sample 4, raises TypeError"):
        measured([object()] * 40)


def test_a_sample_that_is_skipped_is_counted() -> None:
    loader = DpexDataLoader(
        Numbers(broken=True), batch_size=5, num_workers=2, distribute_mode=True, on_error="skip"
    )
    costs = measure(loader, budget_s=BUDGET_S)
    assert costs.skipped == 1
    assert costs.samples < 40


def test_a_batch_without_samples_is_not_collated() -> None:
    loader = DpexDataLoader(
        Numbers(broken=True), batch_size=1, num_workers=2, distribute_mode=True, on_error="skip"
    )
    assert measure(loader, budget_s=BUDGET_S).skipped == 1


class Endless(Sampler[int]):
    """A sampler without an end, whose ``len()`` raises."""

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0)


def test_a_sampler_needs_no_length() -> None:
    assert measured(Numbers(), sampler=Endless()).samples > 0


def test_an_empty_loader_has_no_sample() -> None:
    with pytest.raises(Problem, match="has no sample"):
        measured(Subset(Numbers(), []))


@pytest.mark.parametrize(
    ("transforms", "fixed_ones"),
    [
        ([double, pause, noise], ("double", "pause")),
        ([double, rarely], ("double",)),
        ([double, own_noise], ("double",)),
        ([noise, double], ()),
        ([double], ("double",)),
        ([double, v2.RandomHorizontalFlip(0.0), pause], ("double",)),
    ],
    ids=["torch", "same result", "own generator", "first", "none", "torchvision"],
)
def test_the_part_before_the_first_random_transform_is_fixed(
    transforms: list[Any], fixed_ones: tuple[str, ...]
) -> None:
    part = fixed(MappedDataset(Numbers(), transforms))
    assert part is not None
    assert part.has_chain
    assert part.transforms == fixed_ones
    assert part.later_transforms == len(transforms) - len(fixed_ones)
    assert part.make_s >= PAUSE_S * (1 + ("pause" in fixed_ones))
    assert part.size_bytes >= 500 * 4
    assert 0 < part.samples <= 8


def test_a_whole_sample_may_be_fixed_and_a_subset_of_it() -> None:
    for dataset in (Numbers(), Subset(Numbers(), range(20, 40))):
        part = fixed(dataset)
        assert part is not None
        assert not part.has_chain
        assert (part.transforms, part.later_transforms) == ((), 0)
    part = fixed(Subset(MappedDataset(Numbers(), [double, noise]), range(20, 40)))
    assert part is not None
    assert part.transforms == ("double",)


class Random(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(2)


def test_no_part_of_a_random_sample_is_fixed() -> None:
    assert measured(Random()).fixed == RandomSample()
    assert fixed(MappedDataset(Random(), [double])) is None
    assert fixed(Stream()) is None


def test_a_dataset_of_torchvision_is_taken_apart() -> None:
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(8), v2.RandomHorizontalFlip()])
    part = fixed(FakeData(40, (3, 16, 16), transform=chain))
    assert part is not None
    assert part.transforms == ("ToImage", "CenterCrop")
    assert part.later_transforms == 1


class Unpicklable(Numbers):
    def __getitem__(self, index: int) -> Any:
        return (i for i in range(3))


def test_what_cannot_be_pickled_cannot_be_cached() -> None:
    assert fixed(Unpicklable(), collate_fn=list) is None
