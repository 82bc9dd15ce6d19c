"""Tests of the schema of resume states: a state that does not fit is refused, and nothing changes.

The schema must not need the checksum. So altered states have the checksum of their content, or
they are of version 1, which had no checksum.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from altered_states import alterations, altered, of_version_1
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
# Another loader of the same kind may have had these values, so only a checksum can refuse them.
PLAUSIBLE = {
    "ranks": r"(world_size|sampler_epoch)\.=-?\d+$|ahead\.=\[3\]",
    "stream": "$",
    "stream with a state": r"stream_states\.\[0\]\.ended\.=True",
}
# Only a user's object knows what its state must be. Only a custom batch sampler knows its batches.
LATE = {
    "batch sampler": r"(batches|samples)\.",
    "stream with a state": r"stream_states\.\[0\]\.dataset\.=",
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


@pytest.mark.parametrize("form", [altered, of_version_1])
@pytest.mark.parametrize("batches", [2, 0, None])
@pytest.mark.parametrize("kind", LOADERS)
def test_an_altered_state_is_refused_or_gives_the_same_batches(
    kind: str, batches: int | None, form: Any
) -> None:
    state, generators, rest = saved(kind, batches)
    assert outcome(kind, form(state), generators) == rest
    plausible = PLAUSIBLE.get(kind, r"ahead\.=\[[36]\]")
    if not batches:
        plausible += "|in_progress.=(True|False)"
    refused, wrong = 0, []
    for name, changed in alterations(state, draws=kind == "generator"):
        if re.match(plausible, name):
            continue
        found = outcome(kind, form(changed), generators)
        late = isinstance(found, tuple) and re.match(LATE.get(kind, "$"), name)
        if late or isinstance(found, TypeError | ValueError):
            refused += 1
        elif found != rest:
            wrong.append((name, found))
    assert not wrong
    assert refused > 300


def test_every_field_of_a_state_has_a_schema() -> None:
    state, _, _ = saved("map", 2)
    names = {field.name for field in fields(ResumeState)}
    assert state.keys() == {"version", "checksum", *names}
    for name in names:
        with pytest.raises(ValueError, match=f"a state without {name}"):
            load_state({key: value for key, value in state.items() if key != name})


@pytest.mark.parametrize("form", [altered, of_version_1])
def test_a_state_of_this_and_of_the_first_version_is_the_same_state(form: Any) -> None:
    state, _, _ = saved("stream with a state", 2)
    assert dump_state(load_state(form(state))) == state


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batches": True}, TypeError, "batches=True of type bool, but it must be an int"),
        ({"batches": np.int64(2)}, TypeError, r"batches=.* of type int64"),
        ({"batches": -1}, ValueError, r"batches=-1, but it must be in \[0, "),
        ({"batches": 3}, ValueError, "samples=8, but .* samples in 3 batches of batch_size=4"),
        ({"resized": [1, 2]}, ValueError, r"samples=8, but .*\(resized=\(1, 2\)\)"),
        ({"ahead": [2]}, ValueError, r"ahead=\(2,\), but .* after batches \(2\)"),
        ({"ahead": [4, 3]}, ValueError, r"ahead=\(4, 3\), but .* ascending"),
        ({"place": 8}, ValueError, r"offset=0, but .* if place \(8\) is 0"),
        ({"place": 8, "offset": 16}, ValueError, r"offset=16, .* world_size \(None\) is None"),
        ({"iteration": 0}, ValueError, r"iteration=0, but .* base_seed \(None\) is None"),
        ({"streams": [1, 1]}, ValueError, "streams=.* None in the state of a map-style dataset"),
        ({"before_first": None}, ValueError, "before_first=None, but it must be given"),
        ({"in_progress": False}, ValueError, "batches=2, but it must be 0 .* between two epochs"),
        ({"unknown": 1}, ValueError, "unknown field unknown=1"),
        ({"samplers": {1: 2}}, TypeError, "a key of samplers=1 of type int"),
        ({"workers": 2, "length": None}, ValueError, ""),
    ],
    ids=str,
)
def test_an_error_names_field_value_and_remedy(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    state, _, _ = saved("map", 2)
    with pytest.raises(error, match=message + r".*load_state_dict\({}\)"):
        LOADERS["map"]().load_state_dict(altered(state, **change))


def of_streams(**change: Any) -> dict[str, Any]:
    """Return a state as two logical workers have it that read streams with a state."""
    state, _, _ = saved("stream with a state", 2)
    [stream] = state["stream_states"]
    streams = {
        "batches": 5,
        "samples": 0,
        "base_seed": 7,
        "iteration": 0,
        "workers": 2,
        "streams": [3, 2],
        "stream_states": [{**stream, "batches": 3}, stream],
    }
    return altered(state, **{**streams, **change})


def test_streams_fit_their_states() -> None:
    state = of_streams()
    load_state(state)
    one, other = state["stream_states"]
    over = {**one, "batches": 0, "epoch_over": True}
    load_state(of_streams(stream_states=[{**one, "batches": 2}, None]))  # an error came later
    load_state(of_streams(stream_states=[over, other]))
    between = {
        **dict.fromkeys(["before_first", "batch_size", "workers", "streams"]),
        **{"in_progress": False, "batches": 0, "stream_states": [over, over]},
    }
    load_state(of_streams(**between))
    for change in (
        {"streams": [2, 3]},
        {"streams": [3, 3]},
        {"streams": [5]},
        {"workers": 3},
        {"base_seed": None, "iteration": -1},
        {"stream_states": [one]},
        {"stream_states": [{**one, "batches": 4}, other]},
        {"stream_states": [{**over, "batches": 1}, other]},
        {"stream_states": [{**one, "dataset": None}, other]},
        {"dataset": {"place": 3}},
        {"length": 23},
        {"samples": 21},
        {**between, "stream_states": [one, over]},
        {**between, "base_seed": None},
        {**between, "iteration": -1},
    ):
        with pytest.raises(ValueError, match=r"load_state_dict got .* but it must be"):
            load_state(of_streams(**change))


# --- the checksum ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_seed": 5, "iteration": 0}, "checksum"),
        ({"version": 3}, "checksum"),
        ({"checksum": "0" * 64}, "checksum='0000"),
        ({"version": 0}, r"version=0, but it must be in \[1, "),
        ({"version": 1}, "unknown field checksum"),
    ],
    ids=str,
)
def test_an_altered_state_is_told_from_a_later_version(change: Any, message: str) -> None:
    state, _, _ = saved("map", 2)
    with pytest.raises(ValueError, match=message):
        load_state({**state, **change})
    with pytest.raises(ValueError, match="version 3, but this dpex reads versions 1 to 2"):
        load_state(altered(state, version=3))
    with pytest.raises(ValueError, match="a state without checksum"):
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
                {"length": True},
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
