"""Tests of ``on_error="skip"``: dpex leaves out, counts and names samples that it cannot read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader, TooManySkippedError
from dpex.transforms import MappedDataset, Stage

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

LENGTH = 24
BAD = {3, 8, 9, 10, 11, 17}
GOOD = [index for index in range(LENGTH) if index not in BAD]
CARRIERS = ("local", pytest.param("processes", marks=pytest.mark.extended))
OURS = {
    "distribute_mode": True,
    "head_address": "local",
    "num_workers": 2,
    "batch_size": 4,
    "on_error": "skip",
}


class Broken(Dataset[Any]):
    """Samples of their index and a random number; those in ``bad`` cannot be read."""

    def __init__(self, bad: set[int] = BAD) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(())
        if index in self.bad:
            raise OSError(f"sample {index} is broken\nbeyond repair")
        return index, drawn


class BrokenAtOnce(Broken):
    """A dataset that reads a batch's samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def breaks(index: int) -> int:
    if index in BAD:
        raise OSError(f"sample {index} is broken\nbeyond repair")
    return index


def loader_of(dataset: Any, **changes: Any) -> DpexDataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DpexDataLoader(dataset, generator=generator, **{**OURS, **changes})


SOURCES: dict[str, Any] = {
    "one by one": lambda: Broken(),
    "at once": lambda: BrokenAtOnce(),
    "in the chain": lambda: MappedDataset(Broken(set()), [breaks]),
    "in the chain, at once": lambda: MappedDataset(BrokenAtOnce(set()), [breaks]),
    "in a stage": lambda: MappedDataset(Broken(set()), [Stage(breaks)]),
    "in two stages": lambda: MappedDataset(
        Broken({3, 9, 17}), [Stage(breaks), Stage(int), Stage(abs)]
    ),
    "before a batched stage": lambda: MappedDataset(
        Broken(), [Stage(breaks), Stage(abs, batched=True)]
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_others_come_in_their_batches(source: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dpex"), loader_of(SOURCES[source]()) as loader:
        batches = [batch[0].tolist() for batch in loader]
        assert batches == [
            [0, 1, 2],
            [4, 5, 6, 7],  # the batch of 8 to 11 has no samples
            [12, 13, 14, 15],
            [16, 18, 19],
            [20, 21, 22, 23],
        ]
        assert loader.stats().skipped == len(BAD)
        assert (loader.stats().batches, loader.stats().samples) == (5, LENGTH)
        assert loader.state_dict()["in_progress"] is False
    named = [record.args[0] for record in caplog.records if "left out" in record.message]
    assert sorted(named) == sorted(BAD)
    [line] = [record.message for record in caplog.records if "sample 17" in record.message]
    assert line.startswith("sample 17 is left out of batch 4: OSError: sample 17 is broken")


@pytest.mark.parametrize("source", ["one by one", "in a stage", "in two stages"])
def test_the_others_draw_what_they_would_have_drawn(source: str) -> None:
    def drawn(dataset: Any, **changes: Any) -> dict[int, float]:
        with loader_of(dataset, **changes) as loader:
            return {int(i): float(d) for batch in loader for i, d in zip(*batch, strict=True)}

    whole = drawn(Broken(set()))
    assert drawn(SOURCES[source]()) == {index: whole[index] for index in GOOD}
    assert drawn(SOURCES[source](), num_workers=3) == {index: whole[index] for index in GOOD}


def test_without_batches() -> None:
    for dataset in (Broken(), MappedDataset(Broken(set()), [Stage(breaks)])):
        with loader_of(dataset, batch_size=None) as loader:
            assert [index for index, _ in loader] == GOOD
            assert loader.stats().skipped == len(BAD)


def test_with_every_sample_broken_nothing_comes() -> None:
    with loader_of(Broken(set(range(LENGTH)))) as loader:
        assert list(loader) == []
        assert loader.stats().skipped == LENGTH


@pytest.mark.parametrize("most", [0, 3])
def test_too_many_end_the_epoch_and_the_next_epoch_is_whole(most: int) -> None:
    with loader_of(Broken(), max_skipped=most) as loader:
        for _ in range(2):
            seen = []
            iterator = iter(loader)
            with pytest.raises(
                TooManySkippedError,
                match=rf"{most + 1} samples .*max_skipped={most}\. The last is sample .*OSError",
            ):
                seen.extend(iterator)
            assert len(seen) < 3
            with pytest.raises(TooManySkippedError):
                next(iterator)


def test_errors_that_are_no_sample_s_are_raised() -> None:
    def fails(samples: Any) -> Any:
        raise OSError("not a sample's")

    for arguments in (
        {"dataset": Broken(), "collate_fn": fails},
        {"dataset": MappedDataset(Broken(), [Stage(fails, batched=True)])},
    ):
        with loader_of(**arguments) as loader, pytest.raises(OSError, match="not a sample's"):
            next(iter(loader))


def test_a_worker_that_dies_is_no_error_to_skip() -> None:
    from dpex import BatchLostError

    with loader_of(Deadly()) as loader, pytest.raises(BatchLostError):
        list(loader)


class Deadly(Broken):
    def __getitem__(self, index: int) -> Any:
        import os
        import signal

        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "ignore"}, '"raise" or "skip", got \'ignore\''),
        ({"on_error": "skip"}, "needs distribute_mode=True and num_workers > 0"),
        ({"on_error": "skip", "distribute_mode": True}, "num_workers > 0"),
        ({"max_skipped": -1}, "integer >= 0, got -1"),
        ({"max_skipped": 0.5}, "integer >= 0, got 0.5"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DpexDataLoader(Broken(), **arguments)
