"""Tests of the epochs that ``dpex doctor --loader`` reads in turns, and of their speeds."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpex import DpexDataLoader, LoaderStats
from dpex.doctor.loader_trial import Epoch, loaders_like, speeds, take_turns

pytestmark = pytest.mark.timeout(60)

CUT = Epoch(
    whole=False,
    first_batch_s=1.0,
    seconds=3.0,
    samples=40,
    steady_s=2.0,
    steady_samples=30,
    encode_s=0.4,
    receive_s=0.8,
)
WHOLE = dataclasses.replace(CUT, whole=True)
START = dataclasses.replace(CUT, first_batch_s=9.0, seconds=29.0, steady_s=20.0)


class Slow(Dataset[Any]):
    def __init__(self, length: int, pause_s: float = 0.001) -> None:
        self.length = length
        self.pause_s = pause_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause_s)
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(30))


def turns_of(given: DataLoader[Any], total_s: float = 0.3) -> tuple[Any, Any]:
    loaders = loaders_like(given, num_workers=2, head_address=None)
    del loaders["dpex"]
    return take_turns(loaders, total_s=total_s)


def test_the_start_of_ray_and_of_workers_is_not_in_the_rate() -> None:
    turns = {"torch": [[CUT], [CUT], [CUT]], "dpex": [[START], [CUT], [CUT]]}
    found = speeds(turns)
    assert found["torch"].samples_per_s == found["dpex"].samples_per_s == pytest.approx(15)
    assert found["dpex"].counts == "steady"
    assert found["dpex"].first_batch_s == 9
    assert found["dpex"].later_first_batch_s == 1
    assert found["dpex"].samples == 120
    assert found["dpex"].encode_s == pytest.approx(0.01)
    assert found["dpex"].receive_s == pytest.approx(0.02)


def test_whole_epochs_count_with_their_start_if_all_loaders_have_them() -> None:
    turns = {"torch": [[CUT], [WHOLE, CUT]], "dpex": [[START], [WHOLE]]}
    found = speeds(turns)
    assert found["torch"].counts == found["dpex"].counts == "epochs"
    assert found["torch"].samples_per_s == pytest.approx(40 / 3)
    turns["dpex"] = [[START], [CUT]]
    assert {speed.counts for speed in speeds(turns).values()} == {"steady"}


def test_too_few_batches_count_from_the_start() -> None:
    few = dataclasses.replace(CUT, steady_s=0.0, steady_samples=0)
    found = speeds({"torch": [[few], [few]]})["torch"]
    assert found.counts == "all"
    assert found.samples_per_s == pytest.approx(40 / 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_longer_than_a_turn_is_cut(workers: int) -> None:
    turns, errors = turns_of(DataLoader(Slow(100_000), batch_size=4, num_workers=workers))
    assert not errors
    assert set(turns) == ({"torch", "given"} if not workers else {"torch"})
    for own in turns.values():
        assert len(own) == 3
        for [epoch] in own:
            assert not epoch.whole
            assert 0 < epoch.first_batch_s <= epoch.seconds
            assert 0 < epoch.steady_samples < epoch.samples < 100_000
            assert epoch.steady_samples % 4 == 0
    assert all(speed.counts == "steady" for speed in speeds(turns).values())


class InGroups:
    """A loader whose batches of four samples arrive in groups of five, with a pause before each."""

    num_workers = 2
    distribute_mode = True
    pause_s = 0.05

    def __init__(self) -> None:
        self.delivered = 0

    def __iter__(self) -> Iterator[int]:
        self.delivered = 0
        while True:
            if self.delivered % 5 == 2:  # the first two batches come alone
                time.sleep(self.pause_s)
            self.delivered += 1
            yield self.delivered

    def stats(self) -> LoaderStats:
        return LoaderStats(samples=4 * self.delivered)


def test_a_turn_that_ends_within_a_group_of_batches_counts_whole_groups() -> None:
    turns, _ = take_turns({"dpex": cast("Any", InGroups())}, total_s=1.0)
    for epoch in itertools.chain(*turns["dpex"]):
        assert epoch.steady_samples > 0
        assert epoch.steady_samples % (5 * 4) == 0


def test_a_short_epoch_is_repeated() -> None:
    turns, _ = turns_of(DataLoader(Slow(8, 0.0), batch_size=4, num_workers=2), total_s=1.5)
    [first, *_] = turns["torch"][0]
    assert first.whole
    assert first.samples == 8
    assert len(turns["torch"][1]) > 1
    assert speeds(turns)["torch"].counts == "epochs"


def test_an_empty_epoch_ends_its_turn() -> None:
    turns, errors = turns_of(DataLoader(Slow(0), batch_size=4, num_workers=2, sampler=[]))
    assert not errors
    assert [epoch.samples for turn in turns["torch"] for epoch in turn] == [0, 0, 0]
    assert speeds(turns)["torch"].samples_per_s == 0


def test_a_stream_is_read() -> None:
    turns, errors = turns_of(DataLoader(Stream(), batch_size=10, num_workers=2))
    assert not errors
    assert turns["torch"][0][0].whole
    assert turns["torch"][0][0].samples == 60, "each worker reads the whole stream"


class Broken(Slow):
    def __getitem__(self, index: int) -> Any:
        raise ValueError("a broken file")


def test_a_loader_that_raises_has_no_further_turn() -> None:
    turns, errors = turns_of(DataLoader(Broken(8), batch_size=4, num_workers=2))
    assert turns == {"torch": []}
    assert "a broken file" in str(errors["torch"])


def test_persistent_workers_of_a_cut_epoch_end() -> None:
    given = DataLoader(Slow(100_000), batch_size=4, num_workers=2, persistent_workers=True)
    loaders = loaders_like(given, num_workers=2, head_address=None)
    del loaders["dpex"]
    before = set(multiprocessing.active_children())  # of loaders that are still to be collected
    take_turns(loaders, total_s=0.2)
    assert loaders["torch"]._iterator is None
    assert set(multiprocessing.active_children()) <= before


def test_the_loaders_have_the_user_s_arguments() -> None:
    given = DpexDataLoader(
        Slow(8),
        batch_size=4,
        shuffle=True,
        drop_last=True,
        num_workers=3,
        prefetch_factor=5,
        on_error="skip",
        distribute_mode=True,
        head_address="local",
        prefetch_bytes=1000,
    )
    loaders = loaders_like(given, num_workers=3, head_address=None)
    assert set(loaders) == {"torch", "dpex"}
    for loader in loaders.values():
        assert loader.dataset is given.dataset
        assert loader.batch_sampler is given.batch_sampler
        assert (loader.num_workers, loader.prefetch_factor) == (3, 5)
    assert not loaders["torch"].distribute_mode
    assert loaders["torch"].on_error == "raise"
    dpex = loaders["dpex"]
    assert dpex.distribute_mode
    assert (dpex.on_error, dpex.prefetch_bytes, dpex.head_address) == ("skip", 1000, "local")
    other = loaders_like(given, num_workers=3, head_address="10.0.0.5:6379")
    assert other["dpex"].head_address == "10.0.0.5:6379"
