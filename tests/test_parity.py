"""Tests of parity: dpex's batches equal those of torch's loader, which runs in the same test.

No worker draws random numbers here, because dpex seeds random transforms in another way.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch
from cluster_programs import environment, processes_in, spawn, wait_until, workplace
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from samples import Labelled, Squares, seed_everything
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from dpex import DpexDataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

CARRIERS = ("local", "processes")
OURS = {"distribute_mode": True, "head_address": "local"}
GONE_SECONDS = 30

Arguments = dict[str, Any]
Same = Callable[[Any, Any], None]


def generators_state(arguments: Arguments) -> list[Any]:
    """Return the states that later draws in this process depend on."""
    own = {id(g): g for g in (arguments.get("generator"), *held_generators(arguments)) if g}
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return states + [generator.get_state() for generator in own.values()]


def held_generators(arguments: Arguments) -> list[torch.Generator | None]:
    batch_sampler = arguments.get("batch_sampler")
    samplers = (arguments.get("sampler"), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [getattr(sampler, "generator", None) for sampler in samplers]


def run_epochs(
    loader_type: Any, make: Callable[[], Arguments], epochs: int, **ours: Any
) -> tuple[list[list[Any]], list[Any]]:
    """Return all batches of some epochs, and the states of the generators afterwards."""
    seed_everything()
    arguments = make()
    loader = loader_type(**arguments, **ours)
    return [[batch for batch in loader] for _ in range(epochs)], generators_state(arguments)  # noqa: C416 - list() would ask for len()


def check(
    assert_same: Same, make: Callable[[], Arguments], *, epochs: int = 1, **ours: Any
) -> list[list[Any]]:
    """Compare whole epochs and the generators' states afterwards, and return the batches.

    Args:
        assert_same: The fixture.
        make: Makes new arguments for each loader, because samplers and generators have a state.
        epochs: Number of iterations of each loader.
        ours: Arguments that torch's loader lacks.
    """
    batches, state = run_epochs(DpexDataLoader, make, epochs, **OURS, **ours)
    torchs_batches, torchs_state = run_epochs(DataLoader, make, epochs)
    assert_same(batches, torchs_batches)
    assert_same(state, torchs_state)
    return batches


def both(make: Callable[[], Arguments]) -> Iterator[DataLoader[Any]]:
    """Yield dpex's loader, then torch's, and seed the generators before each."""
    for loader_type, ours in ((DpexDataLoader, OURS), (DataLoader, {})):
        seed_everything()
        yield loader_type(**make(), **ours)


# --- assert_same ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", samples.VALUES)
def test_assert_same_takes_equals(assert_same: Same, kind: str) -> None:
    assert_same(samples.VALUES[kind](2), samples.VALUES[kind](2))


DIFFERENT = {
    "type": ([1], (1,)),
    "type-of-number": (1, True),
    "class": (samples.TaggedDict(a=1), {"a": 1}),
    "length": ([1, 2], [1]),
    "order-of-keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "shape": (torch.ones(2, 1), torch.ones(2)),
    "strides": (torch.ones(2, 3).t(), torch.ones(3, 2)),
    "memory-format": (
        torch.ones(2, 3, 4, 5),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    "gradient": (torch.ones(2), torch.ones(2, requires_grad=True)),
    "sign-of-zero": (torch.tensor(0.0), torch.tensor(-0.0)),
    "nan": (torch.tensor([float("nan")]), torch.tensor([0.0])),
    "plain-nan": (0.0, float("nan")),
    "layout": (torch.eye(2), torch.eye(2).to_sparse()),
    "sparse-values": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "array-dtype": (np.ones(2), np.ones(2, dtype=np.float32)),
    "array-order": (np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))),
    "array-read-only": (np.broadcast_to(np.ones(1), (1,)), np.ones(1)),
    "object-array": (np.array([None, 1]), np.array([None, 2])),
    "attribute": (samples.Custom(torch.ones(1)), samples.Custom(torch.zeros(1))),
    "field": (samples.Pair(torch.ones(1), 1), samples.Pair(torch.ones(1), 2)),
    "dataclass": (samples.Record(torch.ones(1), ["a"]), samples.Record(torch.ones(1), ["b"])),
    "pixels": (samples.VALUES["pil"](0), samples.VALUES["pil"](1)),
    "deep": ([{"a": [torch.ones(1), "x"]}], [{"a": [torch.ones(1), "y"]}]),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_assert_same_refuses_differences(assert_same: Same, difference: str) -> None:
    ours, torchs = DIFFERENT[difference]
    with pytest.raises(AssertionError):
        assert_same(ours, torchs)


# --- kinds of samples and batches -----------------------------------------------------------------


@pytest.mark.parametrize("kind", samples.VALUES)
def test_kinds_of_samples(assert_same: Same, kind: str) -> None:
    arguments = {
        "dataset": samples.Valued(kind),
        "batch_size": 2,
        "collate_fn": samples.as_list,
    }
    if kind in samples.GARBLED_BY_TORCH:
        assert_same(
            list(DpexDataLoader(**arguments, num_workers=2, **OURS)), list(DataLoader(**arguments))
        )
        return
    [batches] = check(assert_same, lambda: {**arguments, "num_workers": 2})
    assert [len(batch) for batch in batches] == [2, 2, 1]


@pytest.mark.parametrize("kind", [*samples.TENSORS, *samples.NUMPY, *samples.PLAIN])
def test_kinds_of_samples_collated_by_torch(assert_same: Same, kind: str) -> None:
    check(
        assert_same,
        lambda: {"dataset": samples.Valued(kind), "batch_size": 2, "num_workers": 2},
    )


@pytest.mark.parametrize("kind", [*samples.NUMPY, *samples.PLAIN, "none", "custom", "tensor-0-dim"])
def test_kinds_of_samples_without_batching(assert_same: Same, kind: str) -> None:
    check(
        assert_same,
        lambda: {"dataset": samples.Valued(kind, 3), "batch_size": None, "num_workers": 2},
    )


@pytest.mark.parametrize("collate", samples.COLLATES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_collate_functions(assert_same: Same, collate: str, drop_last: bool) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": Labelled(10),
            "batch_size": 4,
            "num_workers": 2,
            "drop_last": drop_last,
            "collate_fn": samples.COLLATES[collate],
        },
    )


def test_local_classes_and_lambdas(assert_same: Same) -> None:
    class Batch:
        def __init__(self, items: list[int]) -> None:
            self.items = items

    class Doubled(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return double(index)

    def double(index: int) -> int:
        return 2 * index

    arguments = {
        "dataset": Doubled(),
        "batch_size": 2,
        "collate_fn": lambda items: Batch(items),
    }
    # torch's workers cannot send back an object of a local class.
    batches = list(DpexDataLoader(**arguments, num_workers=2, **OURS))
    assert_same(batches, list(DataLoader(**arguments)))
    assert isinstance(batches[0], Batch)


# --- samplers, batch samplers and datasets --------------------------------------------------------

LENGTH = 10
WEIGHTS = [0.1, 3, 0.5, 1, 1, 0, 2, 1, 1, 1]


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


SAMPLERS: dict[str, Callable[[], Arguments]] = {
    "sequential": lambda: {},
    "not-shuffled": lambda: {"shuffle": False},
    "shuffled": lambda: {"shuffle": True},
    "shuffled-own-generator": lambda: {"shuffle": True, "generator": own()},
    "own-generator": lambda: {"generator": own()},
    "random": lambda: {"sampler": RandomSampler(range(LENGTH))},
    "random-own-generator": lambda: {"sampler": RandomSampler(range(LENGTH), generator=own())},
    "random-replacement": lambda: {
        "sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=71)
    },
    "random-replacement-own-generator": lambda: {
        "sampler": RandomSampler(range(LENGTH), True, 71, generator=own()),
        "generator": own(),
    },
    "random-more-than-there-are": lambda: {
        "sampler": RandomSampler(range(LENGTH), num_samples=2 * LENGTH + 3)
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 12)},
    "weighted-own-generator": lambda: {
        "sampler": WeightedRandomSampler(WEIGHTS, 5, replacement=False, generator=own())
    },
    "subset": lambda: {"sampler": SubsetRandomSampler([9, 2, 5, 7, 0])},
    "list": lambda: {"sampler": [3, 3, 0, 9, 1]},
    "range": lambda: {"sampler": range(9, -1, -2)},
    "numpy-ints": lambda: {"sampler": np.array([4, 1, 1, 8])},
    "tensors": lambda: {"sampler": torch.tensor([4, 1, 8])},
    "deque": lambda: {"sampler": deque([4, 1, 8])},
    "empty": lambda: {"sampler": []},
    "generator": lambda: {"sampler": (index for index in [5, 0, 5, 2])},
    "lazy-draws": lambda: {"sampler": samples.LazySampler(LENGTH)},
    "eager-draws": lambda: {"sampler": samples.EagerSampler(LENGTH)},
    "eager-draws-own-generator": lambda: {
        "sampler": samples.EagerSampler(LENGTH),
        "generator": own(),
    },
    "counting": lambda: {"sampler": samples.CountingSampler(LENGTH, LENGTH)},
    "claims-fewer": lambda: {"sampler": samples.CountingSampler(LENGTH, 4)},
    "claims-none": lambda: {"sampler": samples.CountingSampler(LENGTH, 0)},
    "claims-more": lambda: {"sampler": samples.CountingSampler(LENGTH, 1000)},
    "knows-no-length": lambda: {"sampler": samples.NoLengthSampler(LENGTH, 0)},
    "distributed": lambda: {
        "sampler": DistributedSampler(range(LENGTH), num_replicas=3, rank=1, shuffle=True)
    },
}

BATCHINGS: dict[str, Arguments] = {
    "by-one": {},
    "by-three": {"batch_size": 3},
    "by-three-dropping": {"batch_size": 3, "drop_last": True},
    "unbatched": {"batch_size": None},
}


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers(assert_same: Same, sampler: str, batching: str) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": Squares(LENGTH),
            "num_workers": 2,
            **SAMPLERS[sampler](),
            **BATCHINGS[batching],
        },
        epochs=1 if sampler == "generator" else 2,
    )


INDICES: dict[str, list[Any]] = {
    "strings": ["a", "b.jpg", ""],
    "bytes": [b"a", b"\0"],
    "tuples": [(0, "a"), (1, (2, 3))],
    "lists": [[0, 1], [2]],
    "dicts": [{"at": 0}, {"at": 1}],
    "numpy": [np.int64(3), np.uint8(4), np.str_("a"), np.arange(3)],
    "tensors": [torch.tensor(3), torch.arange(2), torch.arange(1000)],
    "none": [None, None, None],
    "slices": [slice(0, 3), slice(None)],
    "negative": [-1, True, 1.5],
    "objects": [samples.Key("a"), samples.Pair(torch.ones(2), 3), samples.Colour.RED],
}


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("kind", INDICES)
def test_indices_of_any_kind(assert_same: Same, kind: str, batch_size: int | None) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": samples.Echo(),
            "sampler": INDICES[kind],
            "batch_size": batch_size,
            "num_workers": 2,
            "collate_fn": samples.as_is,
        },
    )


BATCH_SAMPLERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: BatchSampler(SequentialSampler(range(LENGTH)), 3, False),
    "torch-dropping": lambda: BatchSampler(RandomSampler(range(LENGTH)), 3, True),
    "torch-own-generator": lambda: BatchSampler(
        RandomSampler(range(LENGTH), generator=own()), 4, False
    ),
    "torch-eager": lambda: BatchSampler(samples.EagerSampler(LENGTH), 4, False),
    "torch-lazy": lambda: BatchSampler(samples.LazySampler(LENGTH), 4, False),
    "eager": lambda: samples.EagerBatchSampler(LENGTH, 3),
    "buckets": lambda: samples.BucketBatchSampler(LENGTH),
    "lists": lambda: [[0, 1], [2], [9, 8, 7, 6]],
    "tuples": lambda: [(0, 1), (2,)],
    "ranges": lambda: [range(0, 3), range(9, 3, -2)],
    "arrays": lambda: [np.array([0, 3]), np.array([5])],
    "tensors": lambda: torch.tensor([[0, 1], [8, 9]]),
    "dicts": lambda: [{0: "a", 5: "b"}],
    "batches-without-length": lambda: [samples.KeyBatch(0, 3), samples.KeyBatch(1)],
    "generator": lambda: ([index, index + 1] for index in range(4)),
    "empty": list,
}


@pytest.mark.parametrize("batch_sampler", BATCH_SAMPLERS)
def test_batch_samplers(assert_same: Same, batch_sampler: str) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": Squares(LENGTH),
            "batch_sampler": BATCH_SAMPLERS[batch_sampler](),
            "num_workers": 2,
            "collate_fn": samples.as_list,
        },
        epochs=1 if batch_sampler == "generator" else 2,
    )


def test_batches_of_indices_as_one_index(assert_same: Same) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": samples.Table(LENGTH),
            "sampler": BatchSampler(RandomSampler(range(LENGTH)), 4, False),
            "batch_size": None,
            "num_workers": 2,
        },
    )


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100, None])
def test_lengths(assert_same: Same, length: int, batch_size: int | None) -> None:
    for drop_last in [False] if batch_size is None else [False, True]:
        check(
            assert_same,
            lambda drop_last=drop_last: {
                "dataset": Squares(length),
                "batch_size": batch_size,
                "shuffle": length > 0,  # torch refuses to shuffle an empty dataset
                "drop_last": drop_last,
                "num_workers": 2,
            },
        )


DATASETS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorDataset(torch.arange(LENGTH), torch.rand(LENGTH, 3)),
    "subset": lambda: Subset(Labelled(20), [3, 1, 4, 1, 5, 9, 2, 6]),
    "subset-of-batched": lambda: Subset(samples.Batched(20), [3, 1, 4, 1, 5, 9, 2, 6]),
    "split": lambda: random_split(Labelled(LENGTH), [0.7, 0.3])[0],
    "concatenated": lambda: ConcatDataset(
        [Squares(3), Subset(Squares(9), range(4, 8)), Squares(2)]
    ),
    "stacked": lambda: StackDataset(Squares(6), samples.Batched(6)),
    "stacked-by-name": lambda: StackDataset(image=Labelled(6), square=Squares(6)),
    "batched": lambda: samples.Batched(LENGTH),
    "not-batched": lambda: samples.NoBatched(LENGTH),
    "list": lambda: [torch.tensor(i) for i in range(LENGTH)],
    "range": lambda: range(LENGTH),
    "string": lambda: "a string",
    "tensor": lambda: torch.arange(30.0).reshape(10, 3),
    "array": lambda: np.arange(30.0).reshape(10, 3),
    "large-tensor": lambda: torch.arange(300_000.0).reshape(10, -1),
    "dict": lambda: {index: str(index) for index in range(LENGTH)},
    "sequence": samples.Sequenced,
    "table": lambda: samples.Table(LENGTH),
}


@pytest.mark.parametrize("collate", [None, samples.as_list])
@pytest.mark.parametrize("dataset", DATASETS)
def test_datasets(assert_same: Same, dataset: str, collate: Any) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": DATASETS[dataset](),
            "batch_size": 3,
            "shuffle": True,
            "num_workers": 2,
            "collate_fn": collate,
        },
    )


@pytest.mark.parametrize("dataset", [name for name in DATASETS if "stacked" not in name])
def test_datasets_without_batching(assert_same: Same, dataset: str) -> None:
    check(
        assert_same,
        lambda: {"dataset": DATASETS[dataset](), "batch_size": None, "num_workers": 2},
    )


# --- workers and prefetching ----------------------------------------------------------------------


@pytest.mark.parametrize("prefetch_factor", [1, 2, 4, None])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 10])
def test_workers_and_prefetching(
    assert_same: Same, num_workers: int, prefetch_factor: int | None
) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": Labelled(50),
            "batch_size": 3,
            "shuffle": True,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
        },
    )


@pytest.mark.parametrize("prefetch_bytes", [0, 1000, 1 << 30])
def test_bytes_in_flight(assert_same: Same, prefetch_bytes: int) -> None:
    def make() -> Arguments:
        return {
            "dataset": samples.Valued("tensor-large", 20),
            "sampler": samples.LazySampler(20),
            "num_workers": 2,
        }

    check(assert_same, make, epochs=2, prefetch_bytes=prefetch_bytes)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_any_order(num_workers: int, batch_size: int | None) -> None:
    arguments = {
        "dataset": range(30),
        "batch_size": batch_size,
        "shuffle": True,
        "num_workers": num_workers,
        "in_order": False,
        "collate_fn": samples.as_string,
    }
    ours, torchs = ([Counter(loader) for _ in range(2)] for loader in both(lambda: dict(arguments)))
    assert ours == torchs
    assert sum(ours[0].values()) == len(DataLoader(**arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": 50},
        {"pin_memory": True},
        {"multiprocessing_context": "fork"},
        # Both loaders ignore its result.
        {"worker_init_fn": lambda worker_id: [worker_id]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_arguments_that_change_no_batch(assert_same: Same, arguments: Arguments) -> None:
    check(
        assert_same,
        lambda: {
            "dataset": Labelled(7),
            "batch_size": 2,
            "shuffle": True,
            "num_workers": 2,
            **arguments,
        },
    )


def test_without_workers_it_is_torchs_own(assert_same: Same) -> None:
    def make() -> Arguments:
        return {"dataset": Labelled(7), "batch_size": 2, "shuffle": True}

    check(assert_same, make, epochs=2)
    ours, torchs = (type(iter(loader)) for loader in both(make))
    assert issubclass(ours, torchs)
    seed_everything()
    ours = list(DpexDataLoader(**make(), num_workers=2))
    seed_everything()
    assert_same(ours, list(DataLoader(**make(), num_workers=2)))


# --- several epochs, several iterators ------------------------------------------------------------

EPOCH_SAMPLERS = [
    *("sequential", "shuffled", "shuffled-own-generator", "random-replacement-own-generator"),
    *("eager-draws", "lazy-draws", "counting", "weighted"),
]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("sampler", EPOCH_SAMPLERS)
def test_epochs(assert_same: Same, sampler: str, persistent: bool) -> None:
    batches = check(
        assert_same,
        lambda: {
            "dataset": Squares(LENGTH),
            "batch_size": 3,
            "num_workers": 2,
            "persistent_workers": persistent,
            **SAMPLERS[sampler](),
        },
        epochs=4,
    )
    if sampler != "sequential":
        assert len({str(epoch) for epoch in batches}) == 4, "epochs repeat one another"


def test_persistent_workers_draw_otherwise() -> None:
    """From the second epoch on, the orders must differ, or ``test_epochs`` covers only one case."""
    orders = []
    for persistent in (False, True):
        make = {
            "dataset": range(LENGTH),
            "shuffle": True,
            "num_workers": 1,
            "persistent_workers": persistent,
        }
        orders.append(run_epochs(DpexDataLoader, lambda make=make: dict(make), 2, **OURS)[0])
    assert orders[0][0] == orders[1][0]
    assert orders[0][1] != orders[1][1]


# Every two of the values occur together: how many batches are taken before the break, the dataset's
# length with drop_last, whether the loader has a generator, and whether its workers persist.
BREAKS = [
    (taken, length, drop_last, (place + row) % 2 == 1, (place // 2 + row) % 2 == 1)
    for place, taken in enumerate((0, 1, 3, 5))
    for row, (length, drop_last) in enumerate(((30, False), (30, True), (32, False)))
]


@pytest.mark.parametrize(("taken", "length", "drop_last", "generator", "persistent"), BREAKS)
def test_a_new_epoch_after_an_early_break(
    assert_same: Same, taken: int, length: int, drop_last: bool, generator: bool, persistent: bool
) -> None:
    """The next order depends on how many indices the sampler has drawn before the break.

    An incomplete last batch reaches the sampler's end, where torch's sampler draws once more.
    """

    def make() -> Arguments:
        return {
            "dataset": Squares(length),
            "batch_size": 4,
            "drop_last": drop_last,
            "shuffle": True,
            "generator": own() if generator else None,
            "num_workers": 2,
            "persistent_workers": persistent,
        }

    results = []
    for loader in both(make):
        epochs = [list(itertools.islice(loader, taken)), list(loader)]
        epochs += [list(itertools.islice(iter(loader), taken)), list(loader)]
        results.append((epochs, generators_state({"generator": loader.generator})))
    assert_same(*results)


@pytest.mark.parametrize("kept", [False, True])
def test_an_error_in_the_loop_then_a_new_epoch(assert_same: Same, kept: bool) -> None:
    results, iterators = [], []
    for loader in both(lambda: {"dataset": Squares(30), "shuffle": True, "num_workers": 2}):
        iterator = iter(loader)
        with pytest.raises(ZeroDivisionError):
            any(1 / int(0 * batch.sum()) for batch in iterator)
        if kept:
            iterators.append(iterator)
        del iterator
        results.append(list(loader))
    assert_same(*results)
    for ours in iterators[:1]:  # the kept iterator still has its other batches
        assert len(list(ours)) == 29
    assert len(iterators) == 2 * kept


def test_two_iterators_of_one_loader(assert_same: Same) -> None:
    results = []
    for loader in both(lambda: {"dataset": Squares(11), "shuffle": True, "num_workers": 2}):
        one, other = iter(loader), iter(loader)
        order = "abbaaabbbb"
        taken = [next(one if which == "a" else other) for which in order]
        rest = [list(other), list(one)]
        with pytest.raises(StopIteration):
            next(one)
        results.append((taken, rest, torch.get_rng_state()))
    assert_same(*results)


def test_nested_iteration_of_one_loader(assert_same: Same) -> None:
    results = [
        [(outer, list(loader)) for outer in loader]
        for loader in both(
            lambda: {"dataset": Squares(5), "batch_size": 2, "shuffle": True, "num_workers": 2}
        )
    ]
    assert_same(*results)


@pytest.mark.parametrize("persistent", [False, True])
def test_nested_loaders(assert_same: Same, persistent: bool) -> None:
    def make(length: int) -> Callable[[], Arguments]:
        return lambda: {
            "dataset": Squares(length),
            "batch_size": 2,
            "shuffle": True,
            "num_workers": 2,
            "persistent_workers": persistent,
        }

    results = []
    for loader_type, ours in ((DpexDataLoader, OURS), (DataLoader, {})):
        seed_everything()
        outer = loader_type(**make(7)(), **ours)
        inner = loader_type(**make(5)(), **ours)
        results.append([(a, list(inner)) for a in outer])
    assert_same(*results)


@pytest.mark.parametrize("persistent", [False, True])
def test_zipped_loaders(assert_same: Same, persistent: bool) -> None:
    results = []
    for loader_type, ours in ((DpexDataLoader, OURS), (DataLoader, {})):
        seed_everything()
        loaders = [
            loader_type(
                Squares(length),
                shuffle=True,
                num_workers=2,
                persistent_workers=persistent,
                **ours,
            )
            for length in (7, 4, 9)
        ]
        results.append([list(zip(*loaders, strict=False)) for _ in range(3)])
    assert_same(*results)


def test_zipped_with_itself(assert_same: Same) -> None:
    results = [
        list(zip(loader, loader, strict=True))
        for loader in both(lambda: {"dataset": Squares(9), "shuffle": True, "num_workers": 2})
    ]
    assert_same(*results)


@pytest.mark.parametrize("persistent", [False, True])
def test_training_and_validation_together(assert_same: Same, persistent: bool) -> None:
    """Validation epochs run within each training epoch, and both loaders stay alive."""
    results = []
    for loader_type, ours in ((DpexDataLoader, OURS), (DataLoader, {})):
        seed_everything()
        options = {"num_workers": 2, "persistent_workers": persistent, **ours}
        training = loader_type(Labelled(20), 4, shuffle=True, generator=own(), **options)
        validation = loader_type(Labelled(9), 2, **options)
        steps: list[Any] = []
        for _ in range(3):
            for number, batch in enumerate(training):
                steps.append(batch)
                if number % 2:
                    steps.append(list(validation))
        results.append((steps, torch.get_rng_state(), training.generator.get_state()))
    assert_same(*results)


def test_interleaved_draws_of_the_training_loop(assert_same: Same) -> None:
    """The loop draws from the same generator, so the loader must draw when torch's does."""
    results = []
    for loader in both(lambda: {"dataset": Squares(9), "shuffle": True, "num_workers": 2}):
        steps: list[Any] = []
        for _ in range(2):
            iterator = iter(loader)
            steps.append(torch.rand(3))
            steps += [(batch, torch.rand(1)) for batch in iterator]
        results.append(steps)
    assert_same(*results)


def test_a_new_epoch_sees_the_dataset_as_it_is_then(assert_same: Same) -> None:
    results = []
    for loader in both(
        lambda: {
            "dataset": samples.Versioned(6),
            "batch_size": 2,
            "num_workers": 2,
            "collate_fn": samples.as_list,
        }
    ):
        epochs = []
        for version in (1, 2, 2, 1):
            loader.dataset.version = version
            iterator = iter(loader)
            loader.dataset.version = -1  # too late for this iterator
            epochs.append(list(iterator))
        results.append(epochs)
    assert_same(*results)


def test_arguments_changed_between_epochs(assert_same: Same) -> None:
    results = []
    for loader in both(lambda: {"dataset": Labelled(7), "batch_size": 2, "num_workers": 2}):
        epochs = [list(loader)]
        loader.collate_fn = samples.as_record
        epochs.append(list(loader))
        loader.num_workers = 3
        loader.generator = own()
        epochs.append(list(loader))
        loader.num_workers = 0
        loader.prefetch_factor = None
        epochs.append(list(loader))
        results.append((epochs, loader.generator.get_state()))
    assert_same(*results)


def test_epoch_set_between_iter_and_next() -> None:
    """Lightning does this when it resumes. torch would keep the old epoch's order."""
    loader = DpexDataLoader(range(20), sampler=samples.EpochSampler(20), num_workers=2, **OURS)
    iterator = iter(loader)
    loader.sampler.set_epoch(3)
    ours = list(iterator)
    expected = DataLoader(range(20), sampler=samples.EpochSampler(20), num_workers=2)
    expected.sampler.set_epoch(3)
    assert ours == list(expected)
    assert list(loader) == list(expected)


def test_closed_and_iterated_again(assert_same: Same) -> None:
    def make() -> Arguments:
        return {"dataset": Squares(9), "shuffle": True, "num_workers": 2}

    for persistent in (False, True):
        seed_everything()
        with DpexDataLoader(**make(), persistent_workers=persistent, **OURS) as loader:
            assert loader is not None
            abandoned = iter(loader)
            ours = [next(abandoned)]
        ours += list(loader)
        seed_everything()
        torchs = DataLoader(**make())
        assert_same(ours, [next(iter(torchs)), *torchs])


# --- memory of batches ----------------------------------------------------------------------------


# In the pickle, in the column of small buffers, and in a separate column of the block.
SIZES = {"small": (2, 3), "middling": (40, 50), "large": (512, 600)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collate", sorted(samples.COLLATES.keys() - {"custom"}))
def test_changing_a_batch_in_place_changes_no_other(
    assert_same: Same, collate: str, size: str
) -> None:
    arguments = {
        "dataset": Labelled(6, SIZES[size]),
        "batch_size": 2,
        "num_workers": 2,
        "collate_fn": samples.COLLATES[collate],
    }
    loader = DpexDataLoader(**arguments, **OURS)
    kept = list(loader)
    tensors = list(samples.memory_of(kept))
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for tensor in tensors
        if tensor.numel()
    )
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start, "two tensors share memory"
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == torch.full_like(tensor, number)).all())
    # Neither the object store nor a worker's copy has changed.
    assert_same(list(loader), list(DataLoader(**arguments)))


def test_tensors_of_the_dataset_stay_as_they_are(assert_same: Same) -> None:
    stored = torch.arange(40_000.0).reshape(4, -1)
    loader = DpexDataLoader(stored, batch_size=None, num_workers=2, persistent_workers=True, **OURS)
    for _ in range(2):
        for row, expected in zip(loader, stored, strict=True):
            assert_same(row, expected)
            row.zero_()
    assert stored.sum() > 0


# --- random combinations of arguments -------------------------------------------------------------


@st.composite
def argument_makers(draw: st.DrawFn) -> Callable[[], Arguments]:
    """Draw functions that make valid arguments, with equal values but new objects each time."""
    length = draw(st.integers(0, 25), label="length")
    own_generator = draw(st.booleans(), label="own generator")
    fixed: Arguments = {
        "num_workers": draw(st.sampled_from([1, 2, 2, 3, 5])),
        "prefetch_factor": draw(st.sampled_from([None, 1, 2, 4])),
        "persistent_workers": draw(st.booleans()),
    }
    indices = st.integers(0, max(0, length - 1))
    samplers: dict[str, Callable[[], Arguments]] = {
        "none": lambda: {},
        "eager": lambda: {"sampler": samples.EagerSampler(length)},
    }
    if length:
        chosen = draw(st.lists(indices, max_size=30), label="indices")
        count = draw(st.integers(1, 40), label="count")
        samplers |= {
            "shuffle": lambda: {"shuffle": True},  # torch refuses to shuffle an empty dataset
            "list": lambda: {"sampler": list(chosen)},
            "lazy": lambda: {"sampler": samples.LazySampler(length)},
            "counting": lambda: {"sampler": samples.CountingSampler(length, count)},
            "subset": lambda: {"sampler": SubsetRandomSampler(chosen)},
            "replacement": lambda: {
                "sampler": RandomSampler(range(length), replacement=True, num_samples=count)
            },
            "weighted": lambda: {
                "sampler": WeightedRandomSampler([1.0 + i for i in range(length)], count)
            },
        }
    name = draw(st.sampled_from(sorted(samplers)), label="sampler")
    batching = draw(st.sampled_from(["none", "size", "sampler"]), label="batching")
    size = draw(st.integers(1, 9), label="size")
    drop_last = draw(st.booleans(), label="drop_last")
    event(f"{name}, batching {batching}")
    collates: list[Any] = [None, samples.as_list, samples.as_string]
    if batching != "none":
        collates.append(samples.as_record)
    fixed["collate_fn"] = draw(st.sampled_from(collates))

    def make() -> Arguments:
        arguments = {"dataset": Labelled(length), **fixed}
        if own_generator:
            arguments["generator"] = own()
        chosen_sampler = samplers[name]()
        if batching == "none":
            arguments |= {"batch_size": None, **chosen_sampler}
        elif batching == "size":
            arguments |= {"batch_size": size, "drop_last": drop_last, **chosen_sampler}
        else:
            sampler = chosen_sampler.get("sampler", SequentialSampler(range(length)))
            arguments["batch_sampler"] = BatchSampler(sampler, size, drop_last)
        return arguments

    return make


@pytest.mark.timeout(200)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    make=argument_makers(),
    epochs=st.integers(1, 3),
    prefetch_bytes=st.sampled_from([0, 1000, 1 << 29]),
)
def test_any_combination(
    assert_same: Same, make: Callable[[], Arguments], epochs: int, prefetch_bytes: int
) -> None:
    check(assert_same, make, epochs=epochs, prefetch_bytes=prefetch_bytes)


# --- the loader object ----------------------------------------------------------------------------

OUR_PARAMETERS = {
    "distribute_mode": False,
    "head_address": "auto",
    "worker_options": None,
    "prefetch_bytes": 512 << 20,
    "on_error": "raise",
    "max_skipped": 100,
}


def test_signature_is_torchs_then_ours() -> None:
    torchs = list(inspect.signature(DataLoader.__init__).parameters.values())
    ours = list(inspect.signature(DpexDataLoader.__init__).parameters.values())
    shape = [(p.name, p.kind, p.default) for p in ours]
    assert shape[: len(torchs)] == [(p.name, p.kind, p.default) for p in torchs]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    assert shape[len(torchs) :] == [
        (name, keyword_only, default) for name, default in OUR_PARAMETERS.items()
    ]


def test_attributes_are_public_as_passed() -> None:
    passed = {
        "dataset": Squares(9),
        "batch_size": 2,
        "num_workers": 3,
        "collate_fn": samples.as_list,
        "pin_memory": False,
        "drop_last": True,
        "timeout": 7.5,
        "worker_init_fn": len,
        "generator": own(),
        "prefetch_factor": 5,
        "persistent_workers": True,
        "pin_memory_device": "",
        "in_order": False,
        "distribute_mode": True,
        "head_address": "10.0.0.1:6379",
        "worker_options": {"num_cpus": 2, "resources": {"disk": 1}},
        "prefetch_bytes": 12345,
        "on_error": "raise",
        "max_skipped": 7,
    }
    options = dict(passed["worker_options"])
    loader = DpexDataLoader(**passed)
    for name, value in passed.items():
        assert getattr(loader, name) is value, name
        assert vars(loader)[name] is value, f"{name}: Lightning reads vars(loader)"
    assert passed["worker_options"] == options
    for name, default in OUR_PARAMETERS.items():
        assert getattr(DpexDataLoader(Squares(2)), name) == default
    assert isinstance(loader, DataLoader)
    assert DpexDataLoader(Squares(9), 4).batch_size == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 3},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "sampler": [1, 2, 3, 4]},
        {"batch_sampler": [[1], [2, 3]]},
        {"batch_size": 100},
    ],
    ids=str,
)
def test_length(arguments: Arguments) -> None:
    ours, torchs = both(lambda: {"dataset": Squares(10), "num_workers": 2, **arguments})
    assert len(ours) == len(torchs)
    assert len(iter(ours)) == len(ours)


def test_no_length_where_torch_has_none() -> None:
    for loader in both(lambda: {"dataset": samples.Echo(), "sampler": iter([1]), "num_workers": 1}):
        with pytest.raises(TypeError):
            len(loader)


@pytest.mark.parametrize(
    "arguments",
    [
        {"shuffle": True, "sampler": [1]},
        {"batch_size": 2, "batch_sampler": [[1]]},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"num_workers": -1},
        {"num_workers": 0, "prefetch_factor": 2},
        {"prefetch_factor": -1},
        {"num_workers": 0, "persistent_workers": True},
        {"timeout": -1},
        {"multiprocessing_context": "nonsense"},
        {"multiprocessing_context": 3},
    ],
    ids=str,
)
def test_refuses_what_torch_refuses(arguments: Arguments) -> None:
    errors = []
    for loader_type, ours in ((DpexDataLoader, OURS), (DataLoader, {})):
        with pytest.raises((ValueError, TypeError)) as caught:
            loader_type(Squares(5), **{"num_workers": 2, **arguments}, **ours)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(("prefetch_factor", "error"), [(0, AssertionError), (None, TypeError)])
def test_refuses_at_iter_what_torch_refuses_then(
    prefetch_factor: int | None, error: type[Exception]
) -> None:
    for loader_type, ours in ((DpexDataLoader, OURS), (DataLoader, {})):
        loader = loader_type(Squares(5), num_workers=2, **ours)
        loader.prefetch_factor = prefetch_factor
        with pytest.raises(error):
            iter(loader)


@pytest.mark.parametrize("name", ["batch_size", "sampler", "dataset", "persistent_workers"])
def test_refuses_to_change_what_torch_refuses_to_change(name: str) -> None:
    for loader in both(lambda: {"dataset": Squares(3), "num_workers": 1}):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
            setattr(loader, name, None)


def test_copied_and_pickled_like_torchs(assert_same: Same) -> None:
    """Frameworks copy loaders, even loaders that have been iterated."""
    results = []
    for loader in both(lambda: {"dataset": Squares(5), "batch_size": 2, "num_workers": 2}):
        epochs = [list(loader)]
        for twin in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert type(twin) is type(loader)
            epochs.append(list(twin))
            del twin
            epochs.append(list(loader))
        results.append(epochs)
    assert_same(*results)


# --- programs -------------------------------------------------------------------------------------

MAIN_PROGRAM = """
import collections, dataclasses, enum
import torch
from torch.utils.data import DataLoader, Dataset
from dpex import DpexDataLoader

Pair = collections.namedtuple("Pair", "image label")
SCALE = 3

@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    labels: list

class Kind(enum.Enum):
    EVEN = 0
    ODD = 1

def scaled(index):
    return torch.full((2, 2), SCALE * index)

class Images(Dataset):
    def __len__(self):
        return 7
    def __getitem__(self, index):
        return Pair(scaled(index), Kind(index % 2))

class Sampler:
    def __iter__(self):
        return iter([Index(n) for n in range(5)])

class Index(int):
    pass

def collate(samples):
    assert all(type(sample) is Pair for sample in samples)
    return Batch(torch.stack([s.image for s in samples]), [s.label for s in samples])

def make_local():
    offset = 10
    class Local(Dataset):
        def __len__(self):
            return 3
        def __getitem__(self, index):
            return index + offset
    return Local()

ours = dict(num_workers=2, distribute_mode=True, head_address="local")
for epoch in range(2):
    loader = DpexDataLoader(Images(), batch_size=3, collate_fn=collate, **ours)
    expected = list(DataLoader(Images(), batch_size=3, collate_fn=collate))
    batches = list(loader)
    assert len(batches) == len(expected) == 3
    for batch, other in zip(batches, expected):
        assert isinstance(batch, Batch) and type(batch) is Batch
        assert torch.equal(batch.images, other.images)
        assert batch.labels == other.labels and all(type(k) is Kind for k in batch.labels)
        assert batch.labels[0] is Kind.EVEN or batch.labels[0] is Kind.ODD
for pair in DpexDataLoader(Images(), batch_size=3, collate_fn=lambda s: s, **ours):
    assert all(isinstance(p, Pair) and p._fields == ("image", "label") for p in pair)
for pair in DpexDataLoader(Images(), batch_size=None, sampler=Sampler(), **ours):
    assert type(pair) is Pair, type(pair)
assert [int(n) for n in DpexDataLoader(make_local(), **ours)] == [10, 11, 12]
assert list(DpexDataLoader(Images(), None, collate_fn=lambda s: s.label.name, **ours))[1] == "ODD"
SCALE = 5
assert int(next(iter(DpexDataLoader(Images(), None, sampler=[1], **ours))).image[0, 0]) == 5
print("the end is reached")
"""

STORE_PROGRAM = """
import ray, torch
ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False,
         log_to_driver=False, logging_level="ERROR")
from torch.utils.data import Dataset
from dpex import DpexDataLoader

class Images(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.full((40_000,), index, dtype=torch.float32), index

loader = DpexDataLoader(Images(), None, num_workers=2, distribute_mode=True)
kept = list(loader)
total = sum(image.nbytes for image, _ in kept)
store = ray.cluster_resources()["object_store_memory"]
assert total > 1.5 * store, (total, store)
assert [label for _, label in kept] == list(range(1000))
for index, (image, _) in enumerate(kept):
    assert image.is_contiguous() and bool((image == index).all()), index
    image.neg_()
assert all(bool((image == -index).all()) for index, (image, _) in enumerate(kept))
# All of them are kept, and the loader still works.
assert sum(int(label) for _, label in loader) == 999 * 500
print("the end is reached")
"""

IMPORTED_MODULE = """
class Images:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return Index(index)

class Index(int):
    pass
"""

IMPORTING_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])  # known to this process only
import images
from dpex import DpexDataLoader

loader = DpexDataLoader(images.Images(), None, num_workers=2, distribute_mode=True,
                        head_address="local", collate_fn=lambda index: index)
batches = list(loader)
assert batches == [0, 1, 2] and all(type(batch) is images.Index for batch in batches), batches
print("the end is reached")
"""


def run_program(place: Path, text: str, *arguments: str) -> None:
    """Run a user's script; it must reach its end and leave no process behind."""
    (place / "train.py").write_text(text)
    process = spawn(
        [sys.executable, "train.py", *arguments],
        place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert output == "the end is reached\n", output + errors
    wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the program's Ray")


@pytest.mark.timeout(120)
@pytest.mark.multiprocess
def test_what_is_defined_in_main() -> None:
    with workplace() as place:
        run_program(place, MAIN_PROGRAM)


@pytest.mark.multiprocess
@pytest.mark.extended
def test_kept_batches_larger_than_the_object_store() -> None:
    with workplace() as place:
        run_program(place, STORE_PROGRAM)


@pytest.mark.timeout(120)
@pytest.mark.multiprocess
def test_modules_found_by_the_scripts_own_path() -> None:
    with workplace() as place:
        elsewhere = place / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "images.py").write_text(IMPORTED_MODULE)
        run_program(place, IMPORTING_PROGRAM, str(elsewhere))
