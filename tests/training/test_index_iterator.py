"""Tests of an epoch's indices, new or resumed, which must be those of torch's loader."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from altered_states import altered
from samplers import INDICES, LENGTH, SAMPLERS, own
from samples import seed_everything
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from dpex.training.checkpoint import Progress
from dpex.training.index_iterator import IndexIterator, IndexSampler
from dpex.training.index_source import IndexSource
from dpex.worker.seeding import generators_kept

EPOCHS = 3
AHEAD = [0, 3]
KINDS: dict[str, Any] = {
    **SAMPLERS,
    "torchdata's random": lambda seed: {
        "batch_size": 4,
        "sampler": StatefulRandomSampler(INDICES, generator=own(seed)),
    },
    "torchdata's distributed": lambda seed: {
        "batch_size": 4,
        "sampler": StatefulDistributedSampler(INDICES, num_replicas=2, rank=0),
    },
}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(INDICES)


class Reader:
    """A loader that only draws indices, as far ahead of their delivery as it is told.

    Args:
        ahead: Number of batches that are drawn before the first of them is delivered.
        dataset: The loader's dataset.
        num_workers: The loader's ``num_workers``.
        **arguments: The arguments of torch's loader that choose its sampler.
    """

    def __init__(
        self, ahead: int = 0, dataset: Any = INDICES, num_workers: int = 1, **arguments: Any
    ) -> None:
        loader: DataLoader[Any] = DataLoader(dataset, **arguments)
        batched = loader.batch_sampler is not None
        self.sampler: Any = loader.sampler
        self.source = IndexSource(
            loader.batch_sampler if batched else loader.sampler,
            batched,
            loader.generator,
            dataset,
            num_workers=num_workers,
        )
        self.progress = Progress()
        self._ahead = ahead

    def iterator(self) -> IndexIterator:
        return iter(IndexSampler(self.source, self.progress))

    def epoch(self) -> Iterator[Any]:
        """Draw the first batches, and return an iterator that delivers them all in order."""
        keeping = generators_kept() if self.progress.resumes else contextlib.nullcontext()
        drawing = self.iterator()
        with keeping:  # torch draws the workers' seed between the iterator and its first batch
            torch.empty((), dtype=torch.int64).random_(generator=self.source.generator)
        return self._delivered(drawing, deque(itertools.islice(drawing, self._ahead)))

    def _delivered(self, drawing: IndexIterator, drawn: deque[Any]) -> Iterator[Any]:
        for number in itertools.count():
            drawn.extend(itertools.islice(drawing, 1))
            if not drawn:
                return drawing.epoch.finish()
            drawing.epoch.deliver(number)
            yield drawn.popleft()

    def state(self) -> Any:
        """Return the state, as a file would hold it."""
        return json.loads(
            json.dumps(self.progress.state_dict(self.source, persistent_workers=False))
        )

    def load(self, state: Any) -> None:
        self.progress.load_state_dict(state, self.source)


def resumed(state: Any, **arguments: Any) -> Reader:
    reader = Reader(**arguments)
    reader.load(state)
    return reader


def interrupted(batches: int, **arguments: Any) -> Any:
    """Return the state of a loader that has delivered some batches of its first epoch."""
    reader = Reader(**arguments)
    list(itertools.islice(reader.epoch(), batches))
    return reader.state()


def epoch_of(reader: Any, number: int) -> Iterator[Any]:
    """Start an epoch of a ``Reader`` or of torch's loader, as a training loop does."""
    if hasattr(reader.sampler, "set_epoch"):
        reader.sampler.set_epoch(number)
    return reader.epoch() if isinstance(reader, Reader) else iter(reader)


def torchs(arguments: dict[str, Any]) -> list[list[Any]]:
    """Return the indices of each batch and epoch that torch's loader reads."""
    seed_everything(0)
    loader: Any = DataLoader(INDICES, collate_fn=lambda batch: batch, **arguments)  # type: ignore[arg-type]
    return [list(epoch_of(loader, number)) for number in range(EPOCHS)]


# --- one rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("kind", KINDS)
def test_epochs_have_torch_s_indices(kind: str, ahead: int) -> None:
    expected = torchs(KINDS[kind](1))
    seed_everything(0)
    reader = Reader(ahead, **KINDS[kind](1))
    assert [list(epoch_of(reader, number)) for number in range(EPOCHS)] == expected


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_resumes_as_if_it_had_not_been(kind: str, ahead: int) -> None:
    whole = torchs(KINDS[kind](1))
    assert whole[0]
    # One batch more than there are: the epoch is delivered to its end.
    for epoch, batches in itertools.product(range(2), range(len(whole[0]) + 2)):
        seed_everything(0)
        first = Reader(ahead, **KINDS[kind](1))
        got = [list(epoch_of(first, number)) for number in range(epoch)]
        got.append(list(itertools.islice(epoch_of(first, epoch), batches)))
        state = first.state()
        generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
        seed_everything(99)
        second = resumed(state, ahead=ahead, **KINDS[kind](2))
        torch.set_rng_state(generators[0])
        np.random.set_state(generators[1])
        random.setstate(generators[2])
        if state["in_progress"]:
            got[-1] += epoch_of(second, epoch)
        got += [list(epoch_of(second, number)) for number in range(epoch + 1, EPOCHS)]
        assert got == whole, f"interrupted in epoch {epoch} after {batches} batches"


def test_a_run_may_be_interrupted_again_and_again() -> None:
    [whole, *_] = torchs(SAMPLERS["shuffle"](1))
    seed_everything(0)
    state = interrupted(0, ahead=3, **SAMPLERS["shuffle"](1))
    got = []
    for number in range(len(whole)):
        seed_everything(number)
        reader = resumed(state, ahead=3, **SAMPLERS["shuffle"](1))
        assert reader.state() == state
        epoch = reader.epoch()
        assert reader.state() == state
        got.append(next(epoch))
        state = reader.state()
    assert got == whole


@pytest.mark.parametrize(("batch_size", "whole_batches"), [(4, True), (3, False), (2, False)])
def test_an_epoch_resumes_with_another_batch_size(batch_size: int, whole_batches: bool) -> None:
    """The epoch then has another number of batches than the sampler's length."""
    state = interrupted(2, ahead=3, batch_size=4)
    reader = resumed(state, batch_size=batch_size)
    iterator = reader.iterator()
    assert iterator.whole_batches == whole_batches
    rest = list(iterator)
    assert rest == list(BatchSampler(range(8, LENGTH), batch_size, drop_last=False))
    assert (len(reader.source.index_sampler) == 2 + len(rest)) == whole_batches


def test_only_delivered_batches_count() -> None:
    reader = Reader(ahead=3, batch_size=4, shuffle=True)
    epoch = reader.epoch()
    for number, _ in enumerate(range(6)):
        assert reader.state()["batches"] == number
        next(epoch)
    assert reader.state()["samples"] == LENGTH
    assert reader.state()["in_progress"]
    assert next(epoch, None) is None
    assert not reader.state()["in_progress"]


def test_the_state_is_that_of_the_newest_epoch() -> None:
    reader = Reader(batch_size=4)
    old, new = reader.epoch(), reader.epoch()
    next(new)
    for _ in range(3):
        next(old)
    assert reader.state()["batches"] == 1


def test_a_state_is_for_one_epoch_and_an_empty_one_for_none() -> None:
    state = interrupted(4, batch_size=4)
    reader = resumed(state, batch_size=4)
    assert [len(list(reader.epoch())) for _ in range(2)] == [2, 6]
    reader.load(state)
    reader.load({})
    assert len(list(reader.epoch())) == 6


def test_batches_that_were_delivered_out_of_order_do_not_come_again() -> None:
    first = Reader(batch_size=4)
    drawing = first.iterator()
    assert len(list(drawing)) == 6
    for number in (4, 0, 2):
        drawing.epoch.deliver(number)
    state = first.state()
    assert (state["batches"], state["samples"], state["ahead"]) == (1, 4, [2, 4])
    reader = resumed(state, batch_size=4)
    assert reader.state() == state
    assert list(reader.epoch()) == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22]]
    with pytest.raises(ValueError, match=r"batch_size=4, but .* batch_size=3"):
        resumed(state, batch_size=3)


def test_positions_are_those_in_the_epoch() -> None:
    """A sample's seed is made of its position."""
    batches = [[5, 6], [7], [8, 9, 10]]
    reader = Reader(batch_sampler=batches)
    iterator = reader.iterator()
    assert [iterator.position for _ in iterator] == [0, 2, 3]
    rest = resumed(interrupted(2, batch_sampler=batches), batch_sampler=batches).iterator()
    assert [(indices, rest.position) for indices in rest] == [([8, 9, 10], 3)]


# --- ranks ----------------------------------------------------------------------------------------


def shards(
    ranks: int, *, state: Any = None, batches: int | None = None, batch_size: int, **options: bool
) -> tuple[list[list[int]], list[Any]]:
    """Return the indices that each rank reads, and each rank's state afterwards."""
    read, states = [], []
    for rank in range(ranks):
        sampler: DistributedSampler[Any] = DistributedSampler(INDICES, ranks, rank, **options)
        sampler.set_epoch(3)
        reader = Reader(ahead=3, sampler=sampler, batch_size=batch_size)
        if state is not None:
            sampler.set_epoch(0)  # load_state_dict restores the epoch
            reader.load(state)
        read.append(
            [index for batch in itertools.islice(reader.epoch(), batches) for index in batch]
        )
        states.append(reader.state())
    return read, states


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("before", "after", "last"), [(2, 3, 1), (3, 2, 4), (4, 1, 2), (1, 4, 3)])
def test_another_number_of_ranks_reads_every_sample_once(
    before: int, after: int, last: int, shuffle: bool
) -> None:
    first, states = shards(before, batches=2, batch_size=2, shuffle=shuffle)
    assert all(state["samples"] == 4 for state in states)
    second, states = shards(after, state=states[0], batches=1, batch_size=1, shuffle=shuffle)
    third, _ = shards(last, state=states[-1], batch_size=2, shuffle=shuffle)
    got = Counter(index for part in (first, second, third) for rank in part for index in rank)
    assert set(got) == set(range(LENGTH))
    padding = -(LENGTH - 4 * before - after) % last
    assert sum(got.values()) == LENGTH + padding, "the sampler pads to equal shares, that is all"
    assert len({len(rank) for rank in third}) == 1


def test_with_drop_last_the_sampler_drops_fewer_than_there_are_ranks() -> None:
    first, states = shards(2, batches=2, batch_size=2, drop_last=True)
    second, _ = shards(4, state=states[0], batch_size=2, drop_last=True)
    got = Counter(index for part in (first, second) for rank in part for index in rank)
    assert max(got.values()) == 1
    assert LENGTH - len(got) == (LENGTH - 8) % 4


def test_more_ranks_draw_other_numbers() -> None:
    _, states = shards(2, batches=2, batch_size=4)
    sampler: DistributedSampler[Any] = DistributedSampler(INDICES, num_replicas=4, rank=0)
    iterator = resumed(states[0], sampler=sampler, batch_size=4).iterator()
    assert not iterator.whole_batches
    assert iterator.epoch.begin.place == 8
    assert iterator.position == 8


def test_a_rank_with_another_epoch_is_warned() -> None:
    _, states = shards(2, batches=2, batch_size=2)
    sampler: DistributedSampler[Any] = DistributedSampler(INDICES, num_replicas=2, rank=0)
    reader = resumed(states[0], sampler=sampler, batch_size=2)
    sampler.set_epoch(1)
    with pytest.warns(
        UserWarning, match=r"epoch 3 in its middle, .* epoch is 1\. .*set_epoch\(3\)"
    ):
        list(reader.epoch())


# --- streams --------------------------------------------------------------------------------------


def test_a_resumed_stream_is_read_from_its_beginning() -> None:
    state = interrupted(2, dataset=Stream(), batch_size=4)
    iterator = resumed(state, dataset=Stream(), batch_size=4).iterator()
    assert iterator.unread == 2
    assert iterator.next_request() == [None] * 4


def test_states_of_other_workers_streams_are_left_out() -> None:
    reader = Reader(dataset=Stream(), num_workers=2, batch_size=4)
    persistent = {"base_seed": 1, "iteration": 0, "stream_states": [None, None]}
    state = altered(reader.state(), **persistent)
    assert resumed(state, dataset=Stream(), num_workers=2, batch_size=4).state() == state
    with pytest.warns(UserWarning, match="of 2 persistent workers, but num_workers is 3"):
        other = resumed(state, dataset=Stream(), num_workers=3, batch_size=4)
    assert other.state() == altered(state, stream_states=None)


# --- states that are refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3, but this dpex reads version 2"),
        ({"length": 24}, "length 24, but this dataset has length 23"),
        ({"world_size": 2}, "world size 2, and this loader has no DistributedSampler"),
        ({"workers": 1, "length": None}, "an IterableDataset, but range is a map-style dataset"),
        ({"dataset": {}}, "range has no state_dict"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    state = interrupted(1, batch_size=4)
    with pytest.raises(ValueError, match=message):
        resumed(altered(state, **change), batch_size=4)


@pytest.mark.parametrize("changed", [{"num_workers": 3}, {"batch_size": 5}], ids=str)
def test_a_stream_resumes_in_the_same_batches_only(changed: dict[str, int]) -> None:
    arguments = {"dataset": Stream(), "num_workers": 2, "batch_size": 4}
    state = interrupted(1, **arguments)
    with pytest.raises(ValueError, match=r"num_workers=2 and batch_size=4.*Keep both"):
        resumed(state, **{**arguments, **changed})


def test_another_number_of_ranks_needs_torch_s_batches() -> None:
    class Batches(BatchSampler):
        pass

    _, states = shards(2, batches=2, batch_size=2)
    sampler: DistributedSampler[Any] = DistributedSampler(INDICES, num_replicas=3, rank=0)
    with pytest.raises(ValueError, match="world size 2, and this loader has world size 3"):
        resumed(states[0], batch_sampler=Batches(sampler, 2, False))


def test_another_batch_sampler_is_noticed() -> None:
    state = interrupted(2, batch_sampler=[[index] * 2 for index in range(4)])
    reader = resumed(state, batch_sampler=[[index] * 4 for index in range(3)])
    with pytest.raises(ValueError, match=r"first 2 batches .* 8 indices, .* had 4"):
        next(reader.epoch())
