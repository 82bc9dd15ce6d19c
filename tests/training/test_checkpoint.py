"""Tests of ``state_dict``: a loader in another process resumes where the state was taken."""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster_programs import PROGRAMS, environment, spawn, workplace
from samples import seed_everything
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dpex import DpexDataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

LENGTH = 23
BATCHES = 6
EPOCHS = 3
OURS = {"distribute_mode": True, "head_address": "local"}
PROGRAM = PROGRAMS / "resume_program.py"


class Drawing:
    """Samples of their index and random numbers."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random()


class Eager:
    """A sampler that draws from numpy's and Python's generators when its iterator is created."""

    def __iter__(self) -> Iterator[int]:
        indices = np.random.permutation(LENGTH).tolist()
        random.shuffle(indices)
        return iter(indices)

    def __len__(self) -> int:
        return LENGTH


class Ragged:
    """A batch sampler of one to four indices a batch, in a new order in each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(LENGTH).tolist())
        for size in itertools.cycle([1, 4, 2]):
            batch = list(itertools.islice(order, size))
            if not batch:
                return
            yield batch


class Stateful:
    """A sampler whose state is the number of yielded indices, as in torchdata's samplers."""

    def __init__(self) -> None:
        self.yielded = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.begin = self.begin, 0
        while self.yielded < LENGTH:
            self.yielded += 1
            yield self.yielded * 5 % LENGTH

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["yielded"]


class StatefulIterator(Iterator[list[int]]):
    """An iterator with a state, like the iterators of torchdata's samplers."""

    def __init__(self, seed: int) -> None:
        self.order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)).tolist()
        self.place = 0

    def __next__(self) -> list[int]:
        batch = self.order[self.place : self.place + 4]
        if not batch:
            raise StopIteration
        self.place += 4
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"], state["place"]


class IteratesStatefully:
    def __iter__(self) -> StatefulIterator:
        return StatefulIterator(int(torch.randint(1 << 30, ())))


def own(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DATASET = Drawing()
SAMPLERS: dict[str, Any] = {
    "sequential": lambda seed: {"batch_size": 4},
    "shuffle": lambda seed: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda seed: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": lambda seed: {"batch_size": 4, "shuffle": True, "generator": own(seed)},
    "sampler's generator": lambda seed: {
        "batch_size": 4,
        "sampler": RandomSampler(DATASET, generator=own(seed)),
        "generator": own(seed + 1),
    },
    "replacement": lambda seed: {
        "batch_size": 4,
        "sampler": RandomSampler(DATASET, replacement=True, num_samples=23, generator=own(seed)),
    },
    "subset": lambda seed: {"batch_size": 4, "sampler": SubsetRandomSampler(range(3, 20))},
    "weighted": lambda seed: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0] * LENGTH, 23, generator=own(seed)),
    },
    "eager": lambda seed: {"batch_size": 4, "sampler": Eager()},
    "unbatched": lambda seed: {"batch_size": None, "sampler": SubsetRandomSampler(range(9))},
    "batch_sampler": lambda seed: {
        "batch_sampler": BatchSampler(RandomSampler(DATASET, generator=own(seed)), 4, False)
    },
    "ragged": lambda seed: {"batch_sampler": Ragged()},
    "distributed": lambda seed: {
        "batch_size": 4,
        "sampler": DistributedSampler(DATASET, num_replicas=2, rank=1),
    },
    "stateful": lambda seed: {"batch_size": 4, "sampler": Stateful()},
    "stateful iterator": lambda seed: {"batch_sampler": IteratesStatefully()},
}
MODES: dict[str, Any] = {
    "dpex": {**OURS, "num_workers": 2},
    "dpex, persistent": {**OURS, "num_workers": 2, "persistent_workers": True},
    "in this process": {},
}


def global_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def content(batch: Any, *, draws: bool = True) -> Any:
    index, tensor, number = batch
    indices = index.tolist() if isinstance(index, torch.Tensor) else index
    return (
        [indices, *(torch.as_tensor(drawn).tolist() for drawn in (tensor, number))]
        if draws
        else indices
    )


def told(loader: DpexDataLoader[Any], epoch: int) -> DpexDataLoader[Any]:
    """Set the sampler's epoch, as a training loop does, and return the loader."""
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    return loader


def whole_run(arguments: dict[str, Any]) -> list[list[Any]]:
    seed_everything(0)
    with DpexDataLoader(DATASET, **arguments) as loader:
        return [list(told(loader, epoch)) for epoch in range(EPOCHS)]


def interrupted(
    arguments: dict[str, Any], epoch: int, batches: int
) -> tuple[list[list[Any]], Any, tuple[Any, ...]]:
    """Read up to a batch of an epoch.

    Returns:
        The batches of each epoch, the loader's state, and the states of the global generators.
    """
    seed_everything(0)
    with DpexDataLoader(DATASET, **arguments) as loader:
        before = [list(told(loader, number)) for number in range(epoch)]
        iterator = iter(told(loader, epoch))
        before.append(list(itertools.islice(iterator, batches)))
        state = json.loads(json.dumps(loader.state_dict()))
        return before, state, global_states()


def gone_on(
    arguments: dict[str, Any], state: Any, generators: tuple[Any, ...], epoch: int
) -> list[list[Any]]:
    """Resume from a state as in another process, and return the remaining batches by epoch."""
    seed_everything(99)
    with DpexDataLoader(DATASET, **arguments) as loader:
        loader.load_state_dict(state)
        restore(generators)
        return [list(told(loader, number)) for number in range(epoch, EPOCHS)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_interrupted_run_resumes_as_if_it_had_not_been(kind: str, mode: str) -> None:
    def arguments(seed: int) -> dict[str, Any]:
        return {**SAMPLERS[kind](seed), **MODES[mode]}

    # In this process, samples draw from the global generators, so only the indices must match.
    draws = mode != "in this process"
    whole = [[content(b, draws=draws) for b in epoch] for epoch in whole_run(arguments(1))]
    assert whole[0]
    # Each test has two of these places. Each sampler and each mode meets all of them.
    places = [(0, 0), (0, len(whole[0])), (1, 2), (1, 99)]
    for epoch, batches in places[([*SAMPLERS].index(kind) + [*MODES].index(mode)) % 2 :: 2]:
        if not draws and batches > 0 and kind == "eager":
            continue  # samples and sampler draw from the same generator
        before, state, generators = interrupted(arguments(1), epoch, batches)
        after = gone_on(arguments(2), state, generators, epoch + (batches == 99))
        if batches == 99:
            pieces = before + after
        else:
            pieces = [*before[:-1], before[-1] + after[0], *after[1:]]
        got = [[content(b, draws=draws) for b in piece] for piece in pieces]
        assert got == whole, f"interrupted in epoch {epoch} after {batches} batches"


@pytest.mark.parametrize("ours", [False, True])
def test_after_an_epoch_s_last_batch_nothing_is_left_of_it_as_in_torchdata(ours: bool) -> None:
    """The rest of the epoch is empty, so verl does not load such a state."""

    def make() -> Any:
        arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
        kind = DpexDataLoader if ours else StatefulDataLoader
        return kind(DATASET, **arguments, **(OURS if ours else {}))

    loader = make()
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    assert [len(list(loader)) for _ in range(2)] == [0, len(loader)]


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_it_resumes_in_another_mode(first: str, second: str) -> None:
    whole = whole_run({**SAMPLERS["shuffle"](1), **MODES[first]})[0]
    before, state, generators = interrupted({**SAMPLERS["shuffle"](1), **MODES[first]}, 0, 2)
    after = gone_on({**SAMPLERS["shuffle"](2), **MODES[second]}, state, generators, 0)
    got = [content(batch, draws=False) for batch in before[0] + after[0]]
    assert got == [content(batch, draws=False) for batch in whole]


@pytest.mark.parametrize(
    "changed", [{"num_workers": 5}, {"prefetch_factor": 7}, {"prefetch_bytes": 0}], ids=str
)
def test_draws_do_not_depend_on_the_workers_that_resume(changed: dict[str, Any]) -> None:
    arguments = {**SAMPLERS["shuffle"](1), **MODES["dpex"]}
    whole = whole_run(arguments)[0]
    before, state, generators = interrupted(arguments, 0, 2)
    after = gone_on({**arguments, **changed}, state, generators, 0)
    assert list(map(content, before[0] + after[0])) == list(map(content, whole))


@pytest.mark.parametrize("mode", MODES)
def test_it_resumes_with_another_batch_size(mode: str) -> None:
    arguments = {**SAMPLERS["shuffle"](1), **MODES[mode]}
    whole = whole_run(arguments)[0]
    before, state, generators = interrupted(arguments, 0, 2)
    after = gone_on({**arguments, "batch_size": 5}, state, generators, 0)
    assert [len(content(batch, draws=False)) for batch in after[0]] == [5, 5, 5]
    got = [index for batch in before[0] + after[0] for index in content(batch, draws=False)]
    assert got == [index for batch in whole for index in content(batch, draws=False)]


def test_a_run_may_be_interrupted_again_and_again() -> None:
    arguments = {**SAMPLERS["shuffle"](1), **MODES["dpex"]}
    whole = whole_run(arguments)
    _, state, generators = interrupted(arguments, 0, 0)
    got = []
    for number in range(len(whole[0])):
        seed_everything(number)
        with DpexDataLoader(DATASET, **arguments) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            restore(generators)
            iterator = iter(loader)
            assert loader.state_dict() == state
            got.append(next(iterator))
            state, generators = json.loads(json.dumps(loader.state_dict())), global_states()
    assert list(map(content, got)) == list(map(content, whole[0]))


def test_batches_in_flight_do_not_count() -> None:
    with DpexDataLoader(DATASET, **SAMPLERS["shuffle"](1), **MODES["dpex"]) as loader:
        iterator = iter(loader)
        for number in range(BATCHES):
            assert loader.state_dict()["batches"] == number
            next(iterator)
        assert loader.state_dict()["samples"] == LENGTH
        assert loader.state_dict()["under_way"]
        assert next(iterator, None) is None
        assert not loader.state_dict()["under_way"]


def test_the_newest_iterator_s_epoch_is_the_loader_s() -> None:
    with DpexDataLoader(DATASET, **SAMPLERS["shuffle"](1), **MODES["dpex"]) as loader:
        old, new = iter(loader), iter(loader)
        next(new)
        for _ in range(3):
            next(old)
        assert loader.state_dict()["batches"] == 1


def test_a_state_is_for_one_epoch_and_an_empty_one_for_none() -> None:
    arguments = {**SAMPLERS["sequential"](1), **MODES["dpex"]}
    _, state, _ = interrupted(arguments, 0, 4)
    with DpexDataLoader(DATASET, **arguments) as loader:
        loader.load_state_dict(state)
        assert [len(list(loader)) for _ in range(2)] == [2, 6]
        loader.load_state_dict(state)
        loader.load_state_dict({})
        assert len(list(loader)) == 6


def test_any_order_gives_every_sample_once() -> None:
    arguments = {**SAMPLERS["shuffle"](1), **MODES["dpex"], "in_order": False, "num_workers": 4}
    for batches in range(BATCHES + 1):
        before, state, generators = interrupted(arguments, 0, batches)
        after = gone_on(arguments, state, generators, 0)
        got = [index for batch in before[0] + after[0] for index in content(batch, draws=False)]
        assert sorted(got) == list(range(LENGTH))


def test_batches_that_came_early_do_not_come_again() -> None:
    arguments = {**SAMPLERS["sequential"](1), **MODES["dpex"], "in_order": False}
    _, state, _ = interrupted(arguments, 0, 1)
    state = {**state, "batches": 1, "samples": 4, "ahead": [2, 4]}
    with DpexDataLoader(DATASET, **arguments) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        got = sorted(content(batch, draws=False) for batch in loader)
        assert got == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22]]
    with (
        DpexDataLoader(DATASET, **{**arguments, "batch_size": 3}) as loader,
        pytest.raises(ValueError, match=r"batch_size=4, but .* batch_size=3"),
    ):
        loader.load_state_dict(state)


def test_an_error_s_batch_counts_as_delivered() -> None:
    dataset = Failing()
    with DpexDataLoader(dataset, batch_size=4, **MODES["dpex"]) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="sample 5"):
            next(iterator)
        assert loader.state_dict()["batches"] == 2
    with DpexDataLoader(dataset, batch_size=4) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="sample 5"):
            next(iterator)
        assert loader.state_dict()["batches"] == 2


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("sample 5")
        return index


# --- ranks ----------------------------------------------------------------------------------------


def shards(
    ranks: int, *, state: Any = None, batches: int | None = None, **options: Any
) -> tuple[list[list[int]], list[Any]]:
    """Return the indices that each rank reads, and each rank's state afterwards."""
    shuffle, drop_last = options.pop("shuffle", True), options.pop("drop_last", False)
    read, states = [], []
    for rank in range(ranks):
        sampler: DistributedSampler[Any] = DistributedSampler(
            DATASET, num_replicas=ranks, rank=rank, shuffle=shuffle, drop_last=drop_last
        )
        sampler.set_epoch(3)
        with DpexDataLoader(DATASET, sampler=sampler, **options) as loader:
            if state is not None:
                sampler.set_epoch(0)  # load_state_dict restores the epoch
                loader.load_state_dict(state)
            found = itertools.islice(loader, batches)
            read.append([index for batch in found for index in content(batch, draws=False)])
            states.append(json.loads(json.dumps(loader.state_dict())))
    return read, states


@pytest.mark.parametrize("mode", ["dpex", "in this process"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("before", "after", "last"), [(2, 3, 1), (3, 2, 4), (4, 1, 2), (1, 4, 3)])
def test_another_number_of_ranks_reads_every_sample_once(
    before: int, after: int, last: int, shuffle: bool, mode: str
) -> None:
    options = {**MODES[mode], "shuffle": shuffle, "batch_size": 2}
    first, states = shards(before, batches=2, **options)
    assert all(state["samples"] == 4 for state in states)
    second, states = shards(after, state=states[0], batches=1, **{**options, "batch_size": 1})
    third, _ = shards(last, state=states[-1], **options)
    got = Counter(index for part in (first, second, third) for rank in part for index in rank)
    assert set(got) == set(range(LENGTH))
    padding = -(LENGTH - 4 * before - after) % last
    assert sum(got.values()) == LENGTH + padding, "the sampler pads to equal shares, that is all"
    assert len({len(rank) for rank in third}) == 1


def test_with_drop_last_the_sampler_drops_fewer_than_there_are_ranks() -> None:
    options = {**MODES["in this process"], "drop_last": True, "batch_size": 2}
    first, states = shards(2, batches=2, **options)
    second, _ = shards(4, state=states[0], **options)
    got = Counter(index for part in (first, second) for rank in part for index in rank)
    assert max(got.values()) == 1
    assert LENGTH - len(got) == (LENGTH - 8) % 4


def test_a_rank_that_is_told_another_epoch_hears_of_it() -> None:
    _, states = shards(2, batches=2, **MODES["dpex"], batch_size=2)
    sampler: DistributedSampler[Any] = DistributedSampler(DATASET, num_replicas=2, rank=0)
    with DpexDataLoader(DATASET, 2, sampler=sampler, **MODES["dpex"]) as loader:
        loader.load_state_dict(states[0])
        sampler.set_epoch(1)
        with pytest.warns(
            UserWarning, match=r"epoch 3 in its middle, .* epoch is 1\. .*set_epoch\(3\)"
        ):
            list(loader)


# --- states that are refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, but this dpex reads version 1"),
        ({"snapshot": 1}, "damaged"),
        ({"before_iter": None}, "damaged"),
        ({"before_iter": {"torch": "%"}}, "damaged"),
        ({"length": 24}, "length 24, but this dataset has length 23"),
        ({"world_size": 2}, "world size 2, and this loader has no DistributedSampler"),
    ],
    ids=str,
)
def test_states_that_are_none(change: dict[str, Any], message: str) -> None:
    arguments = {**SAMPLERS["shuffle"](1), **MODES["dpex"]}
    _, state, _ = interrupted(arguments, 0, 1)
    with (
        DpexDataLoader(DATASET, **arguments) as loader,
        pytest.raises(ValueError, match=message),
    ):
        loader.load_state_dict({**state, **change})


def test_torchdata_s_state_is_refused_with_its_keys() -> None:
    state = StatefulDataLoader(DATASET, 4).state_dict()
    with pytest.raises(ValueError, match=r"version None.*_sampler_iter_yielded"):
        DpexDataLoader(DATASET, 4).load_state_dict(state)


def test_another_number_of_ranks_needs_torch_s_batches() -> None:
    _, states = shards(2, batches=2, batch_size=2)
    sampler: DistributedSampler[Any] = DistributedSampler(DATASET, num_replicas=3, rank=0)

    class Batches(BatchSampler):
        pass

    loader = DpexDataLoader(DATASET, batch_sampler=Batches(sampler, 2, False))
    with pytest.raises(ValueError, match="world size 2, and this loader has world size 3"):
        loader.load_state_dict(states[0])


def test_torch_s_workers_out_of_order_have_no_state() -> None:
    loader = DpexDataLoader(DATASET, 4, num_workers=2, in_order=False)
    with pytest.raises(RuntimeError, match="in_order=True, or distribute_mode=True"):
        loader.state_dict()


def test_another_batch_sampler_is_noticed() -> None:
    def loader(sizes: list[int]) -> DpexDataLoader[Any]:
        batches = [[index] * size for index, size in enumerate(sizes)]
        return DpexDataLoader(DATASET, batch_sampler=batches, **MODES["dpex"])

    first = loader([2, 2, 2, 2])
    list(itertools.islice(first, 2))
    second = loader([4, 4, 4])
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"first 2 batches .* 8 indices, .* had 4"):
        iter(second)


def test_a_timeout_of_torch_s_workers_is_no_batch() -> None:
    loader = DpexDataLoader(Stuck(), batch_size=1, num_workers=1, timeout=3, prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    assert loader.state_dict()["batches"] == 1


class Stuck(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 1:
            threading.Event().wait(20)
        return index


def test_ranks_that_become_more_draw_other_numbers() -> None:
    _, states = shards(2, batches=2, batch_size=4, **MODES["dpex"])
    sampler: DistributedSampler[Any] = DistributedSampler(DATASET, num_replicas=4, rank=0)
    with DpexDataLoader(DATASET, 4, sampler=sampler, **MODES["dpex"]) as loader:
        loader.load_state_dict(states[0])
        assert iter(loader)._sampler_iter.epoch.begin.place == 8


# --- torchdata's protocol -------------------------------------------------------------------------


def test_it_is_torchdata_s_protocol() -> None:
    from torchdata.stateful_dataloader import Stateful

    assert isinstance(DpexDataLoader(DATASET, 4), Stateful)


@pytest.mark.parametrize("kind", ["random", "distributed"])
def test_torchdata_s_samplers_keep_their_state(kind: str) -> None:
    from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandom
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def arguments() -> dict[str, Any]:
        sampler: Any = (
            StatefulRandom(DATASET, generator=own(4))
            if kind == "random"
            else StatefulDistributedSampler(DATASET, num_replicas=2, rank=0)
        )
        return {"sampler": sampler, "batch_size": 4, **MODES["dpex"]}

    whole = whole_run(arguments())
    for batches in range(3):
        before, state, generators = interrupted(arguments(), 1, batches)
        after = gone_on(arguments(), state, generators, 1)
        got = before[1] + after[0]
        assert list(map(content, got)) == list(map(content, whole[1])), batches


def test_a_state_survives_torch_save_with_weights_only(tmp_path: Path) -> None:
    arguments = {**SAMPLERS["generator"](1), **MODES["dpex"]}
    with DpexDataLoader(DATASET, **arguments) as loader:
        next(iter(loader))
        torch.save(loader.state_dict(), tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


# --- a training process that is killed ------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["fresh", "persistent"])
def test_a_killed_training_process_resumes_where_its_last_state_was_saved(mode: str) -> None:
    with workplace() as place:

        def run(name: str, kill_at: int) -> list[str]:
            log = place / f"{name}.log"
            process = spawn(
                [sys.executable, str(PROGRAM), mode, str(place / name), str(log), str(kill_at)],
                place,
                env=environment(place),
            )
            assert process.wait(60) == (-9 if kill_at >= 0 else 0)
            return log.read_text().splitlines() if kill_at < 0 else []

        whole = run("whole", -1)
        assert len(whole) == 18
        for kill_at in (1, 8, 5):  # each run counts its batches from 0
            run("killed", kill_at)
        assert run("killed", -1) == whole
