"""Tests of ``state_dict``: a loader in another process resumes where the state was taken."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from altered_states import alterations
from cluster_programs import PROGRAMS, environment, spawn, workplace
from samplers import LENGTH, SAMPLERS
from samples import seed_everything
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dpex import DpexDataLoader
from dpex.training.state_checksum import state_checksum

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

BATCHES = 6
EPOCHS = 3
CARRIERS = ("local", "processes")
OURS = {"distribute_mode": True, "head_address": "local"}
PROGRAM = PROGRAMS / "resume_program.py"


class Drawing:
    """Samples of their index and random numbers."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random()


DATASET = Drawing()
MODES: dict[str, Any] = {
    "dpex": {**OURS, "num_workers": 2},
    "dpex, persistent": {**OURS, "num_workers": 2, "persistent_workers": True},
    "in this process": {},
}


# Samplers that draw before the first batch, from their own generator, or keep a state.
DRAWN = ["shuffle", "generator", "ragged", "stateful iterator"]


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


# test_index_iterator.py compares the indices of all samplers. Here, samples also draw.
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *itertools.product(DRAWN, MODES),
        *((kind, "in this process") for kind in SAMPLERS if kind not in DRAWN),
    ],
)
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


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MODES, 2)))
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


def test_it_resumes_with_another_batch_size() -> None:
    arguments = {**SAMPLERS["shuffle"](1), **MODES["dpex"]}
    whole = whole_run(arguments)[0]
    before, state, generators = interrupted(arguments, 0, 2)
    after = gone_on({**arguments, "batch_size": 5}, state, generators, 0)
    assert [len(content(batch, draws=False)) for batch in after[0]] == [5, 5, 5]
    got = [index for batch in before[0] + after[0] for index in content(batch, draws=False)]
    assert got == [index for batch in whole for index in content(batch, draws=False)]


def test_batches_in_flight_do_not_count() -> None:
    with DpexDataLoader(DATASET, **SAMPLERS["shuffle"](1), **MODES["dpex"]) as loader:
        iterator = iter(loader)
        for number in range(BATCHES):
            assert loader.state_dict()["batches"] == number
            next(iterator)
        assert loader.state_dict()["samples"] == LENGTH
        assert loader.state_dict()["in_progress"]
        assert next(iterator, None) is None
        assert not loader.state_dict()["in_progress"]


def test_any_order_gives_every_sample_once() -> None:
    arguments = {**SAMPLERS["shuffle"](1), **MODES["dpex"], "in_order": False, "num_workers": 4}
    for batches in range(BATCHES + 1):
        before, state, generators = interrupted(arguments, 0, batches)
        after = gone_on(arguments, state, generators, 0)
        got = [index for batch in before[0] + after[0] for index in content(batch, draws=False)]
        assert sorted(got) == list(range(LENGTH))


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


def test_another_number_of_ranks_reads_every_sample_once() -> None:
    """``test_index_iterator.py`` has further numbers of ranks."""

    def read(ranks: int, state: Any, batches: int | None) -> tuple[list[int], Any]:
        indices: list[int] = []
        for rank in range(ranks):
            sampler: DistributedSampler[Any] = DistributedSampler(DATASET, ranks, rank)
            with DpexDataLoader(DATASET, 2, sampler=sampler, **MODES["dpex"]) as loader:
                loader.load_state_dict(state)
                for batch in itertools.islice(loader, batches):
                    indices += content(batch, draws=False)
                state_after = json.loads(json.dumps(loader.state_dict()))
        return indices, state_after

    first, state = read(2, {}, 2)
    rest, _ = read(3, state, None)
    assert set(first + rest) == set(range(LENGTH))
    assert len(first + rest) == LENGTH, "15 samples are left for 3 ranks"


# --- states that are refused ----------------------------------------------------------------------


def test_torchdata_s_state_is_refused_with_its_keys() -> None:
    state = StatefulDataLoader(DATASET, 4).state_dict()
    with pytest.raises(ValueError, match=r"version None.*_sampler_iter_yielded"):
        DpexDataLoader(DATASET, 4).load_state_dict(state)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_an_altered_state_of_ray_tasks_is_refused(kind: str) -> None:
    """``test_state_schema.py`` shows the same without Ray, and reads what is not refused."""

    def make() -> DpexDataLoader[Any]:
        if kind == "map":
            return DpexDataLoader(DATASET, **SAMPLERS["shuffle"](1), **MODES["dpex"])
        return DpexDataLoader(Counting(), 2, num_workers=2, **OURS)

    with make() as loader:
        for _ in itertools.islice(loader, 3):
            pass
        state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    for _, changed in alterations(state):
        if state_checksum(changed) != state_checksum(state):
            with pytest.raises(ValueError, match="load_state_dict got a state"):
                loader.load_state_dict(changed)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, 20, 2))


def test_torch_s_workers_out_of_order_have_no_state() -> None:
    loader = DpexDataLoader(DATASET, 4, num_workers=2, in_order=False)
    with pytest.raises(RuntimeError, match="in_order=True, or distribute_mode=True"):
        loader.state_dict()


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


class Dying(IterableDataset[int]):
    """A stream whose second worker dies if a file exists."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for number in range(8):
            if info.id == 1 and self.mark.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            yield 8 * info.id + number


def test_a_worker_that_dies_over_batches_delivered_before_is_an_error(tmp_path: Path) -> None:
    dataset = Dying(tmp_path / "mark")
    loader = DpexDataLoader(dataset, batch_size=2, num_workers=2, distribute_mode=False)
    delivered = [batch.tolist() for batch in itertools.islice(loader, 4)]
    assert delivered == [[0, 1], [8, 9], [2, 3], [10, 11]]
    state = loader.state_dict()
    dataset.mark.touch()
    resumed = DpexDataLoader(dataset, batch_size=2, num_workers=2, distribute_mode=False)
    resumed.load_state_dict(state)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        iter(resumed)


# --- torchdata's protocol -------------------------------------------------------------------------


def test_it_is_torchdata_s_protocol() -> None:
    from torchdata.stateful_dataloader import Stateful

    assert isinstance(DpexDataLoader(DATASET, 4), Stateful)


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


def indices_of(loader: Any, most: int | None = None) -> list[list[int]]:
    return [content(batch, draws=False) for batch in itertools.islice(loader, most)]


@pytest.mark.parametrize("kind", ["generator", "epoch", "own sampler"])
def test_samplers_below_a_framework_s_sampler_resume(kind: str) -> None:
    """The sampler that shuffles may be several samplers below the one that the loader has."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    overrides = pytest.importorskip("lightning.fabric.utilities.distributed")

    def loader() -> DpexDataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        if kind == "epoch":
            sampler = data_loader.SeedableRandomSampler(DATASET, generator=generator, data_seed=7)
        else:
            sampler = RandomSampler(DATASET, generator=generator)
        if kind == "own sampler":
            sampler = overrides.DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)
            return DpexDataLoader(DATASET, 3, sampler=sampler)
        shard = data_loader.BatchSamplerShard(BatchSampler(sampler, 3, False), 2, 0)
        return DpexDataLoader(DATASET, batch_sampler=shard)

    first, second = loader(), loader()
    indices_of(first)
    iterator = iter(first)
    indices_of(iterator, 1)
    second.load_state_dict(first.state_dict())
    assert indices_of(second) == indices_of(iterator)


def test_accelerate_s_shards_of_another_number_of_ranks_are_refused() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")

    def loader(ranks: int) -> DpexDataLoader[Any]:
        sampler = BatchSampler(RandomSampler(DATASET), 3, False)
        return DpexDataLoader(
            DATASET, batch_sampler=data_loader.BatchSamplerShard(sampler, ranks, 0)
        )

    first = loader(2)
    indices_of(first, 1)
    with pytest.raises(ValueError, match=r"saved with world size 2, and this loader has .* 3"):
        loader(3).load_state_dict(first.state_dict())


class Stops(IterableDataset[int]):
    """A stream without a state, which an interrupt stops once."""

    interrupted = False

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            if self.interrupted and number == 4:
                self.interrupted = False
                raise KeyboardInterrupt
            yield number


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_state_stays_until_a_batch_is_delivered(workers: int) -> None:
    def batches(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    first, second = (DpexDataLoader(Stops(), 3, num_workers=workers) for _ in range(2))
    iterator = iter(first)
    next(iterator), next(iterator)
    second.load_state_dict(first.state_dict())
    if not workers:
        second.dataset.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            iter(second)
    iter(second)
    assert batches(second) == batches(iterator)
    if not workers:
        assert second.stats().samples == 6, "batches that are read again do not count"
    assert second.stats().in_flight == 0


@pytest.mark.parametrize("own", [True, False])
def test_torch_s_persistent_workers_resume_between_epochs(own: bool) -> None:
    def loader(seed: int) -> DpexDataLoader[Any]:
        generator = torch.Generator().manual_seed(seed) if own else None
        return DpexDataLoader(
            DATASET, 3, True, num_workers=2, persistent_workers=True, generator=generator
        )

    first, second = loader(5), loader(99)
    indices_of(first)
    state, states = first.state_dict(), global_states()
    expected = [indices_of(first) for _ in range(2)]
    second.load_state_dict(state)
    restore(states)
    assert [indices_of(second) for _ in range(2)] == expected


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_of_a_loader_has_its_loaded_state(make: Any) -> None:
    first, second = (DpexDataLoader(DATASET, 3) for _ in range(2))
    iterator = iter(first)
    indices_of(iterator, 1)
    second.load_state_dict(first.state_dict())
    assert indices_of(make(second)) == indices_of(second) == indices_of(iterator)


class Wraps(DpexDataLoader[Any]):
    """A loader that changes its batches in its own iterator, as loaders of graphs do."""

    def _get_iterator(self) -> Any:
        return map(torch.neg, super()._get_iterator())


def test_a_subclass_may_return_its_own_iterator() -> None:
    numbers = list(range(8))
    loader, second = Wraps(numbers, 4), Wraps(Stops(), 3)
    assert [batch.tolist() for batch in loader] == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert loader.stats().batches == 2
    next(iter(second))
    third = Wraps(Stops(), 3)
    third.load_state_dict(second.state_dict())
    assert next(iter(third)).tolist() == [-3, -4, -5]
