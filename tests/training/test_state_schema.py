"""Tests of loading a resume state: an altered state is refused, and nothing changes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from altered_states import alterations, altered
from samplers import INDICES, LENGTH, Ragged, Stateful, own
from samples import seed_everything
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from dpex import DpexDataLoader
from dpex.training.resume_state import ResumeState
from dpex.training.state_schema import dump_state, load_state


class Levels(Dataset[int]):
    """A map-style dataset with a state."""

    level = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return 100 * self.level + index

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = dict(state)["level"] + 0


class Stream(IterableDataset[int]):
    """A stream without a state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < LENGTH:
            self.place += 1
            yield self.place
        self.place = 0


class StatefulStream(Stream):
    """A stream with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = dict(state)["place"] + 0


def ranked() -> DpexDataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(INDICES, num_replicas=2, rank=1)
    return DpexDataLoader(INDICES, 4, sampler=sampler)  # type: ignore[arg-type]


data: Any = INDICES
LOADERS: dict[str, Any] = {
    "map": lambda: DpexDataLoader(data, 4, shuffle=True),
    "generator": lambda: DpexDataLoader(Levels(), 4, shuffle=True, generator=own(1)),
    "unbatched": lambda: DpexDataLoader(data, None, shuffle=True),
    "ranks": ranked,
    "batch sampler": lambda: DpexDataLoader(data, batch_sampler=Ragged()),
    "sampler with a state": lambda: DpexDataLoader(data, 4, sampler=Stateful()),
    "stream": lambda: DpexDataLoader(Stream(), 4),
    "stream with a state": lambda: DpexDataLoader(StatefulStream(), 4),
}


def batches_of(loader: DpexDataLoader[Any]) -> list[Any]:
    return [torch.as_tensor(batch).tolist() for batch in loader]


def saved(kind: str, batches: int | None) -> tuple[dict[str, Any], Any, list[Any]]:
    """Read some batches of an epoch, or all of it.

    Returns:
        The loader's state, the states of the global generators, and the batches that follow.
    """
    seed_everything(0)
    loader = LOADERS[kind]()
    iterator: Any = iter(loader)
    for _ in itertools.islice(iterator, batches):
        pass
    state = loader.state_dict()
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
    rest = batches_of(iterator) if batches is not None else batches_of(loader)
    return state, generators, rest


def outcome(kind: str, state: Any, generators: Any) -> Any:
    """Return the rest of the epoch, or the error of ``load_state_dict`` or of the iteration."""
    loader = LOADERS[kind]()
    torch.set_rng_state(generators[0])
    np.random.set_state(generators[1])
    random.setstate(generators[2])
    try:
        loader.load_state_dict(state)
    except (TypeError, ValueError) as error:
        return error
    try:
        return batches_of(loader)
    except Exception as error:
        return "late", error


@pytest.mark.parametrize("batches", [2, 0, None])
@pytest.mark.parametrize("kind", LOADERS)
def test_an_altered_state_is_refused_or_gives_the_same_batches(
    kind: str, batches: int | None
) -> None:
    state, generators, rest = saved(kind, batches)
    assert outcome(kind, state, generators) == rest
    refused, wrong = 0, []
    for name, changed in alterations(state):
        found = outcome(kind, changed, generators)
        if isinstance(found, ValueError):
            refused += 1
        elif found != rest:
            wrong.append((name, found))
    assert not wrong
    assert refused > 300


def test_every_field_of_a_state_counts() -> None:
    state, _, _ = saved("map", 2)
    names = {field.name for field in fields(ResumeState)}
    assert state.keys() == {"version", "checksum", *names}
    for name in names:
        with pytest.raises(ValueError, match="was altered or is incomplete"):
            load_state({key: value for key, value in state.items() if key != name})


def test_a_loaded_state_is_the_same_state() -> None:
    for kind in LOADERS:
        state, _, _ = saved(kind, 2)
        assert dump_state(load_state(state)) == state
        assert dump_state(load_state(json.loads(json.dumps(state)))) == state


def test_a_scalar_of_numpy_counts_as_its_number() -> None:
    state, _, _ = saved("stream with a state", 2)
    [stream] = state["stream_states"]
    changed = {**state, "batches": np.int64(2), "in_progress": np.bool_(True)}
    changed["stream_states"] = [{**stream, "batches": np.int64(2)}]
    assert json.dumps(dump_state(load_state(changed))) == json.dumps(state)


@pytest.mark.parametrize(
    "wrong", [None, [], [1, 2], "abc", b"abc", 3, object()], ids=lambda value: type(value).__name__
)
def test_what_is_not_a_dict_is_a_type_error(wrong: Any) -> None:
    loader = LOADERS["map"]()
    with pytest.raises(
        TypeError, match=rf"of type {type(wrong).__name__}.*load_state_dict\({{}}\)"
    ):
        loader.load_state_dict(wrong)
    loader.load_state_dict({})


# --- the checksum ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_seed": 5, "iteration": 0}, "checksum"),
        ({"version": 3}, "checksum"),
        ({"checksum": "0" * 64}, "checksum='0000"),
        ({"version": 1}, "checksum"),
        ({"batches": True}, "checksum"),
        ({"unknown": 1}, "checksum"),
    ],
    ids=str,
)
def test_an_altered_state_is_told_from_a_later_version(change: Any, message: str) -> None:
    state, _, _ = saved("map", 2)
    with pytest.raises(ValueError, match=message):
        load_state({**state, **change})
    with pytest.raises(ValueError, match="version 3, but this dpex reads version 2"):
        load_state(altered(state, version=3))
    with pytest.raises(ValueError, match="checksum=None"):
        load_state({key: value for key, value in state.items() if key != "checksum"})


def test_keys_that_accelerate_adds_do_not_count() -> None:
    state, _, _ = saved("map", 2)
    assert dump_state(load_state({**state, "_iterator_finished": False})) == state


# --- nothing changes if a state is refused --------------------------------------------------------


class Recording(Stateful):
    """A sampler with a generator and an epoch, which refuses one state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = own(5)
        self.epoch = 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["yielded"] == 13:
            raise KeyError("thirteen")
        super().load_state_dict(state)
        self.generator.manual_seed(6)


def recording() -> tuple[DpexDataLoader[Any], Levels, Recording]:
    dataset, sampler = Levels(), Recording()
    return DpexDataLoader(dataset, 4, sampler=sampler), dataset, sampler


THIRTEEN = {"samplers": {"inner": {"yielded": 13}}}


@pytest.mark.parametrize(
    ("change", "batches"),
    [
        *itertools.product(
            (
                {"samplers": None},
                {"dataset": {}},
                {"dataset": None},
                {"checksum": ""},
            ),
            (2, None),
        ),
        (THIRTEEN, None),
    ],
    ids=str,
)
def test_a_refused_state_changes_nothing(change: dict[str, Any], batches: int | None) -> None:
    loader, dataset, sampler = recording()
    dataset.level, sampler.epoch = 3, 4
    list(itertools.islice(loader, batches))
    state = loader.state_dict()
    change = {**state, **change} if "checksum" in change else altered(state, **change)

    loader, dataset, sampler = recording()
    loader.load_state_dict(state)
    sampler.set_epoch(9)
    before = loader.state_dict(), dataset.level, sampler.state_dict(), sampler.epoch
    generator = sampler.generator.get_state()
    with pytest.raises((TypeError, ValueError), match=r"load_state_dict\({}\)"):
        loader.load_state_dict(change)
    assert before == (loader.state_dict(), dataset.level, sampler.state_dict(), sampler.epoch)
    assert torch.equal(generator, sampler.generator.get_state())


def test_a_sampler_that_refuses_its_state_does_so_before_the_first_batch() -> None:
    """In mid-epoch, a sampler loads its state before dpex creates its iterator."""
    loader, _, _ = recording()
    list(itertools.islice(loader, 2))
    state = altered(loader.state_dict(), **THIRTEEN)
    loader, _, _ = recording()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"Recording.load_state_dict .*KeyError: 'thirteen'"):
        iter(loader)
