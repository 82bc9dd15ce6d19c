"""Tests of the warning about a forgotten ``set_epoch``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from dpex import DpexDataLoader

pytestmark = pytest.mark.usefixtures("shared_ray")

DATASET = TensorDataset(torch.arange(40))


def make_loader(sampler: Any, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(
        DATASET, batch_size=4, sampler=sampler, num_workers=1, distribute_mode=True, **options
    )


@pytest.fixture
def sampler() -> DistributedSampler[Any]:
    return DistributedSampler(DATASET, num_replicas=2, rank=0)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_forgotten_set_epoch_warns_once(
    sampler: DistributedSampler[Any], persistent_workers: bool
) -> None:
    with make_loader(sampler, persistent_workers=persistent_workers) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            first = [batch.tolist() for (batch,) in loader]
        with pytest.warns(UserWarning, match=r"epoch=0.*set_epoch\(epoch\)") as caught:
            second = [batch.tolist() for (batch,) in loader]
        assert first == second
        [warning] = caught
        assert warning.filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            list(loader)


def test_one_in_a_batch_sampler_is_seen(sampler: DistributedSampler[Any]) -> None:
    batch_sampler = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
    with DpexDataLoader(
        DATASET, batch_sampler=batch_sampler, num_workers=1, distribute_mode=True
    ) as loader:
        list(loader)
        with pytest.warns(UserWarning, match="set_epoch"):
            list(loader)


def test_who_calls_set_epoch_hears_nothing(sampler: DistributedSampler[Any]) -> None:
    with make_loader(sampler) as loader, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            list(loader)
            # An epoch of which only one batch is read does not count.
            sampler.set_epoch(epoch + 1)
            next(iter(loader))


def test_a_look_at_the_first_batch_is_no_epoch(sampler: DistributedSampler[Any]) -> None:
    with make_loader(sampler) as loader, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        next(iter(loader))
        list(loader)


def test_without_shuffling_there_is_nothing_to_forget() -> None:
    sampler = DistributedSampler(DATASET, num_replicas=2, rank=0, shuffle=False)
    with make_loader(sampler) as loader, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        list(loader)
        list(loader)


def test_one_rank_speaks_for_all() -> None:
    sampler = DistributedSampler(DATASET, num_replicas=2, rank=1)
    with make_loader(sampler) as loader, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        list(loader)
        list(loader)
