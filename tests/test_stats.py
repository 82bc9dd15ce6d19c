"""Tests of ``DpexDataLoader.stats()``, after an epoch and during one."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from dpex import DpexDataLoader, LoaderStats
from dpex.datasets import cached
from dpex.transforms import MappedDataset, Stage
from dpex.wire.timings import Costs, count, noted, spent

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

CARRIERS = ("local", "processes")
OURS = {"distribute_mode": True, "head_address": "local", "num_workers": 2}
MODES: Any = pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, OURS], ids=["here", "torch", "dpex"]
)
PAUSE_S = 0.005


class Slow:
    """Samples that take a while to read; with a mark, sample 30 kills its process once."""

    def __init__(self, length: int = 40, mark: Path | None = None) -> None:
        self.length = length
        self.mark = mark

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.mark is not None and index == 30 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PAUSE_S)
        return torch.full((1000,), float(index))


def pause(value: Any) -> Any:
    time.sleep(2 * PAUSE_S)
    return value


def collate(samples: list[Any]) -> Any:
    time.sleep(3 * PAUSE_S)
    return torch.stack(samples)


@pytest.mark.parametrize("transform", [[pause], [Stage(pause)], [Stage(pause, num_cpus=0.5)]])
def test_seconds_are_where_they_were_spent(transform: list[Any]) -> None:
    dataset = MappedDataset(Slow(), transform)
    with DpexDataLoader(dataset, batch_size=4, collate_fn=collate, **OURS) as loader:
        for _ in range(2):
            assert len(list(loader)) == 10
            stats = loader.stats()
            assert (stats.batches, stats.samples, stats.in_flight) == (10, 40, 0)
            assert stats.size_bytes >= 40 * 4000
            assert stats.read_s >= 40 * PAUSE_S
            assert stats.transform_s >= 40 * 2 * PAUSE_S
            assert stats.collate_s >= 10 * 3 * PAUSE_S
            assert stats.encode_s > 0
            assert stats.decode_s > 0
            assert sum(stats.worker_shares.values()) == pytest.approx(1)
            assert 0 < stats.first_batch_s <= stats.waiting_s <= stats.seconds
            assert stats.retries == stats.skipped == 0
            assert stats.cache_hit_rate is None


@MODES
def test_delivered_batches_count_and_the_loop_s_own_time_does_not(options: Any) -> None:
    with DpexDataLoader(Slow(), batch_size=4, **options) as loader:
        assert loader.stats() == LoaderStats()
        iterator = iter(loader)
        assert loader.stats().batches == 0
        for number in range(1, 4):
            next(iterator)
            time.sleep(20 * PAUSE_S)
            assert (loader.stats().batches, loader.stats().samples) == (number, 4 * number)
        stats = loader.stats()
        assert stats.seconds - stats.waiting_s >= 2 * 20 * PAUSE_S
        if options is OURS:
            assert stats.in_flight > 0


class Broken(Slow):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("a broken file")
        return index


@MODES
def test_a_batch_that_raised_does_not_count(options: Any) -> None:
    with DpexDataLoader(Broken(), batch_size=4, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(OSError, match="a broken file"):
            next(iterator)
        assert (loader.stats().batches, loader.stats().samples) == (1, 4)
        list(iterator)
        assert (loader.stats().batches, loader.stats().samples) == (9, 36)


@MODES
def test_an_epoch_drawn_again_counts(options: Any) -> None:
    sampler = DistributedSampler(Slow(), num_replicas=1, rank=0)
    with DpexDataLoader(Slow(), batch_size=4, sampler=sampler, **options) as loader:
        iterator = iter(loader)
        sampler.set_epoch(1)
        next(iterator)
        assert (loader.stats().batches, loader.stats().samples) == (1, 4)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@MODES
def test_batches_of_a_stream_that_are_read_again_do_not_count(options: Any) -> None:
    with DpexDataLoader(Stream(), batch_size=4, **options) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        state = loader.state_dict()
        batches = 4 + len(list(iterator))
        assert (loader.stats().batches, loader.stats().in_flight) == (batches, 0)
        loader.load_state_dict(state)
        iterator = iter(loader)
        assert (loader.stats().batches, loader.stats().samples) == (0, 0)
        next(iterator)
        assert (loader.stats().batches, loader.stats().samples) == (1, 4)


@MODES
def test_a_batch_of_unknown_length_counts_no_samples(options: Any) -> None:
    sampler: Any = [map(int, (0, 1)), map(int, (2, 3))]
    with DpexDataLoader(Slow(4), batch_sampler=sampler, **options) as loader:
        assert len(list(loader)) == 2
        assert (loader.stats().batches, loader.stats().samples) == (2, 0)


def test_a_loaded_state_leaves_the_statistics_of_the_last_epoch() -> None:
    loader = DpexDataLoader(Slow(8), batch_size=4)
    list(loader)
    loader.load_state_dict({})
    assert (loader.stats().batches, loader.stats().samples) == (2, 8)


def test_the_newest_epoch_counts() -> None:
    with DpexDataLoader(Slow(), batch_size=4, **OURS) as loader:
        list(loader)
        next(iter(loader))
        assert loader.stats().batches == 1


def test_a_cache_s_hits_count(carrier: str) -> None:
    dataset = cached(Slow(), version=carrier)  # carriers of this process share its cache
    with DpexDataLoader(dataset, batch_size=4, persistent_workers=True, **OURS) as loader:
        list(loader)
        assert (loader.stats().cache_hits, loader.stats().cache_misses) == (0, 40)
        list(loader)
        assert loader.stats().cache_hit_rate == 1
        assert "100% of the samples from the cache" in repr(loader.stats())


def test_what_was_recomputed_counts(tmp_path: Path) -> None:
    with DpexDataLoader(Slow(mark=tmp_path / "killed"), batch_size=4, **OURS) as loader:
        assert len(list(loader)) == 10
        assert loader.stats().retries > 0
        assert "retries" in repr(loader.stats())


def test_one_line_says_what_bounds_the_loop() -> None:
    waits = LoaderStats(
        seconds=10, waiting_s=3.1, batches=20, samples=2000, transform_s=84, read_s=16
    )
    assert repr(waits) == (
        "<20 batches, 2,000 samples in 10 s (200 samples/s); waits 31% of its time for data; "
        "transforms: 84% of the workers' time>"
    )
    in_time = LoaderStats(
        seconds=10, waiting_s=0.1, batches=20, samples=2000, skipped=3, in_flight=1024
    )
    assert repr(in_time).endswith(
        "the data is in time (waits 1.0%); 3 samples skipped; 1,024 batches in flight>"
    )
    assert repr(LoaderStats()) == "<0 batches, 0 samples in 0 s (0 samples/s)>"


def test_jupyter_gets_a_table() -> None:
    table = LoaderStats(seconds=10, waiting_s=3.1, batches=2000)._repr_html_()
    assert "<th>batches</th><td>2,000</td>" in table
    assert "<th>waiting_share</th><td>31.0%</td>" in table
    assert "<th>first_batch_s</th><td>-</td>" in table


def test_costs_are_noted_for_who_asked_last() -> None:
    count("samples", 7)
    with noted() as outer:
        count("samples", 2)
        with noted() as inner:
            count("cache_hits")
        spent("read_s", time.perf_counter() - 5)
    assert (inner.samples, inner.cache_hits, inner.read_s) == (0, 1, 0)
    assert (outer.samples, outer.cache_hits) == (2, 0)
    assert outer.read_s >= 5
    assert outer.seconds >= inner.seconds
    total = Costs()
    for costs in (outer, inner, outer):
        total.add(costs)
    assert (total.samples, total.cache_hits) == (4, 1)


def test_torch_s_profiler_sees_next_under_torch_s_name() -> None:
    with (
        DpexDataLoader(Slow(8), batch_size=4, **OURS) as loader,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        list(itertools.islice(loader, 2))
    names = {event.name for event in profile.events()}
    assert any(name.startswith("enumerate(DataLoader)#") for name in names)


def test_a_progress_bar_knows_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    with DpexDataLoader(Slow(8), batch_size=4, **OURS) as loader:
        list(tqdm(loader, mininterval=0))
    assert "2/2" in capsys.readouterr().err
