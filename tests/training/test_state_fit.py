"""Tests of states that are whole, but belong to another loader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from altered_states import altered
from samplers import INDICES, LENGTH, IteratesStatefully, Ragged, Stateful, own
from torch.utils.data import Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from dpex import DpexDataLoader

data: Any = INDICES


class Yields:
    """A sampler of a number of indices, whose length torch need not know."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Renamed(Stateful):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, LENGTH))


class Itself(IterableDataset[int]):
    """A stream that is its own iterator, with a state."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.place == LENGTH:
            raise StopIteration
        self.place += 1
        return self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Generating(Itself):
    def __iter__(self) -> Iterator[int]:
        while self.place < LENGTH:
            yield next(self)


class WithState(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, int]:
        return {"level": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def ranked(**options: Any) -> DpexDataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0, **options)
    return DpexDataLoader(data, 4, sampler=sampler)


def drawing(seed: int, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(data, sampler=RandomSampler(data, generator=own(seed)), **options)


LOADERS: dict[str, Any] = {
    "shuffle": lambda: DpexDataLoader(data, 4, shuffle=True),
    "longer": lambda: DpexDataLoader(range(LENGTH + 1), 4),  # type: ignore[arg-type]
    "generator": lambda: DpexDataLoader(data, 4, shuffle=True, generator=own(1)),
    "sampler's generator": lambda: drawing(1, batch_size=4),
    "ranks": ranked,
    "stateful": lambda: DpexDataLoader(data, 4, sampler=Stateful()),
    "stateful iterator": lambda: DpexDataLoader(data, batch_sampler=IteratesStatefully()),  # type: ignore[arg-type]
    "batch sampler": lambda: DpexDataLoader(data, batch_sampler=Ragged()),
    "with state": lambda: DpexDataLoader(WithState(), 4),
    "itself": lambda: DpexDataLoader(Itself(), 4),
    "generating": lambda: DpexDataLoader(Generating(), 4),
}


def state_of(loader: DpexDataLoader[Any], batches: int | None = 2) -> dict[str, Any]:
    for _ in itertools.islice(iter(loader), batches):
        pass
    return loader.state_dict()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("shuffle", "longer", "length 23, but this dataset has length 24"),
        ("shuffle", "generator", r"generators \[\], but .* \['loader', 'inner'\].*generator="),
        ("generator", "sampler's generator", r"generators \['loader', 'inner'\], .* \['inner'\]"),
        ("shuffle", "ranks", "sampler without set_epoch.*DistributedSampler"),
        ("ranks", "shuffle", "world size 2, and this loader has no DistributedSampler"),
        ("shuffle", "stateful", r"samplers \[\], but .* \['inner'\] \(of BatchSampler, Stateful;"),
        ("stateful", "shuffle", r"samplers \['inner'\], but .* \[\] \(of BatchSampler, Random"),
        ("stateful iterator", "batch sampler", "iterator of a Ragged is a generator"),
        ("itself", "generating", "iterator of a Generating is a generator"),
        ("shuffle", "with state", "no dataset state, but WithState has"),
        ("with state", "shuffle", "contains dataset state, but range has no"),
        ("itself", "shuffle", "contains dataset state|an IterableDataset"),
    ],
)
def test_the_state_of_another_loader_is_refused(before: str, after: str, message: str) -> None:
    state = state_of(LOADERS[before]())
    with pytest.raises(ValueError, match=message):
        LOADERS[after]().load_state_dict(state)


def test_between_two_epochs_another_dataset_may_follow() -> None:
    state = state_of(LOADERS["shuffle"](), None)
    loader = LOADERS["longer"]()
    loader.load_state_dict(state)
    assert sum(len(batch) for batch in loader) == LENGTH + 1


@pytest.mark.parametrize(("samples", "batches"), [(24, 6), (7, 2), (25, 7)])
def test_a_sampler_of_torch_yields_as_many_indices_as_were_delivered(
    samples: int, batches: int
) -> None:
    for loader in LOADERS["shuffle"], ranked:
        state = altered(state_of(loader()), samples=samples, batches=batches)
        with pytest.raises(ValueError, match=rf"samples={samples} and batch_size=4"):
            loader().load_state_dict(state)


@pytest.mark.parametrize("batches", [5, 6])
def test_the_last_batch_of_an_epoch_may_be_smaller(batches: int) -> None:
    state = state_of(LOADERS["shuffle"](), batches)
    loader = LOADERS["shuffle"]()
    loader.load_state_dict(state)
    assert [len(batch) for batch in loader] == [3][: 6 - batches]


def test_another_sampler_that_ends_too_early_is_an_error() -> None:
    state = state_of(DpexDataLoader(data, 4, sampler=Yields(12)))
    loader = DpexDataLoader(data, 4, sampler=Yields(7))
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"yielded 7 indices, but the delivered batches had 8"):
        next(iter(loader))


def test_a_batch_sampler_that_ends_too_early_is_an_error() -> None:
    state = state_of(DpexDataLoader(data, batch_sampler=[[1], [2], [3]]))
    loader = DpexDataLoader(data, batch_sampler=[[1]])
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"first 1 batches .* 1 indices, but the 2 .* had 2"):
        next(iter(loader))


def test_an_epoch_resumes_unbatched_with_the_generators_of_its_samplers() -> None:
    """The samplers then have other names, because there is no ``BatchSampler`` around them."""
    whole = [index for batch in drawing(1, batch_size=4) for index in batch.tolist()]
    state = state_of(drawing(1, batch_size=4))
    loader = drawing(2, batch_size=None)
    loader.load_state_dict(state)
    assert list(loader) == whole[8:]
    state = state_of(drawing(1, batch_size=None), 8)
    loader = drawing(2, batch_size=5)
    loader.load_state_dict(state)
    assert [index for batch in loader for index in batch.tolist()] == whole[8:]


def test_an_epoch_that_was_resumed_with_another_batch_size_resumes_again() -> None:
    rest = [index for batch in LOADERS["generator"]() for index in batch.tolist()]
    state: dict[str, Any] = {}
    for batch_size, batches in ((4, 2), (5, 1), (None, 3), (3, 1), (3, 99)):
        loader = DpexDataLoader(data, batch_size, shuffle=True, generator=own(1))
        loader.load_state_dict(state)
        for batch in itertools.islice(loader, batches):
            got = torch.as_tensor(batch).reshape(-1).tolist()
            assert got == rest[: len(got)]
            del rest[: len(got)]
        state = loader.state_dict()
        if batch_size == 5:
            assert (state["batches"], state["samples"], state["resized"]) == (3, 13, [2, 8])
    assert not rest
    assert not state["in_progress"]


@pytest.mark.parametrize("batches", range(3))
def test_a_state_before_the_first_batch_has_the_generator_s_order(batches: int) -> None:
    """torch draws the base_seed from the generator before the sampler draws."""
    whole = [batch.tolist() for batch in LOADERS["generator"]()]
    state = state_of(LOADERS["generator"](), batches)
    loader = DpexDataLoader(data, 4, shuffle=True, generator=own(7))
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == whole[batches:]


@pytest.mark.parametrize("read", [2, 3])
def test_without_workers_a_stream_is_read_up_to_its_first_undelivered_batch(read: int) -> None:
    """A state may be older than that batch, because a batch that failed has no state."""
    [stream] = state_of(LOADERS["itself"](), read)["stream_states"]
    by_ray = {"base_seed": 7, "iteration": 0, "streams": [3], "stream_states": [stream]}
    state = altered(state_of(LOADERS["itself"](), 3), **by_ray)
    loader = LOADERS["itself"]()
    loader.load_state_dict(state)
    iterator = iter(loader)
    assert next(iterator).tolist() == [13, 14, 15, 16]
    assert loader.state_dict()["batches"] == 4


def test_numbers_of_numpy_become_ints() -> None:
    def make() -> DpexDataLoader[Any]:
        ranks: Any = np.int64(2)
        sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, 0, shuffle=False)
        sampler.set_epoch(np.int64(3))  # type: ignore[arg-type]
        return DpexDataLoader(data, 4, sampler=sampler)

    whole = [batch.tolist() for batch in make()]
    state = json.loads(json.dumps(state_of(make())))
    assert (state["world_size"], state["sampler_epoch"]) == (2, 3)
    loader = make()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == whole[2:]


class SavesNothing(Itself):
    def state_dict(self) -> Any:
        return None


def test_a_stream_that_returns_no_state_is_reread() -> None:
    state = state_of(DpexDataLoader(SavesNothing(), 4))
    assert state["stream_states"] is None
    loader = DpexDataLoader(SavesNothing(), 4)
    loader.load_state_dict(state)
    assert next(iter(loader)).tolist() == [9, 10, 11, 12]
