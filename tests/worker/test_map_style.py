"""Tests of a worker process's work, run in this process without Ray."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Chunk, Entry, Run
from dpex.wire.pickling import dump, load
from dpex.worker import dataset_copies
from dpex.worker.later_stage import StageJob, apply_stage
from dpex.worker.map_style import Job, StageInput, encode, fetch_chunk
from dpex.worker.training_settings import Settings


class Draws:
    """Samples that draw from the three global generators."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


class Counts:
    """A dataset whose copy counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0
        self.opened_by: int | None = None

    def __getitem__(self, index: int) -> tuple[int, int | None]:
        self.reads += 1
        return self.reads, self.opened_by


BOUND: dict[str, Any] = {"binding": Binding.ALWAYS}


@pytest.fixture(autouse=True)
def _clean_process() -> Any:
    """Restore this process after the test, because ``fetch_chunk`` changes global settings."""
    saved = (torch.get_num_threads(), torch.initial_seed, torch.random.initial_seed)
    dataset_copies._copies.clear()
    yield
    torch.set_num_threads(saved[0])
    torch.initial_seed, torch.random.initial_seed = saved[1], saved[2]
    dataset_copies._copies.clear()


def make_run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "key": "run",
        "loader": "loader",
        "base_seed": 7,
        "epoch": 0,
        "num_workers": 3,
        "dataset_version": 0,
        "settings": Settings(".", torch.float32),
    }
    return Run(**{**values, **changes})


def read(
    dataset: Any,
    batches: list[Any],
    *,
    first_batch: int = 0,
    positions: list[int] | None = None,
    run: Run | None = None,
    binding: Binding = Binding.RELEASED,
    **job: Any,
) -> list[Any]:
    """Return the results of ``fetch_chunk`` for consecutive batches: batches and error wrappers."""
    values: dict[str, Any] = {
        "collate_fn": list,
        "worker_init_fn": None,
        "auto_collation": True,
    }
    pickled = dump(Job(dataset, **{**values, **job}), "loader")
    if positions is None:
        sizes = [len(b) if isinstance(b, list) else 1 for b in batches]
        positions = [sum(sizes[:k]) for k in range(len(sizes))]
    entries = []
    for number, (batch, position) in enumerate(zip(batches, positions, strict=True), first_batch):
        chunk = Chunk(run or make_run(), 0, number, [batch], [position])
        entries += fetch_chunk(
            chunk, lambda: load(pickled), "node here, pid 1", lambda: False, binding=binding
        )
    return [load(entry.value) for entry, _ in entries]


def test_a_sample_draws_the_same_whatever_batch_chunk_and_worker_it_is_in() -> None:
    whole = read(Draws(), [[0, 1, 2, 3]])[0]
    halves = read(Draws(), [[0, 1], [2, 3]], positions=[0, 2])
    alone = read(Draws(), [[3]], first_batch=1, positions=[3], run=make_run(num_workers=1))
    assert whole == halves[0] + halves[1]
    assert alone[0][0] == whole[3]


def test_samples_draw_differently_by_place_epoch_and_base_seed() -> None:
    first = read(Draws(), [[5, 5]])[0]
    next_epoch = read(Draws(), [[5, 5]], run=make_run(epoch=1))[0]
    other_base = read(Draws(), [[5, 5]], run=make_run(base_seed=8))[0]
    drawn = [draw for _, *draws in [*first, *next_epoch, *other_base] for draw in draws]
    assert len(set(drawn)) == len(drawn)


def test_getitems_gets_the_whole_list_and_one_seed() -> None:
    class Batched(Draws):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(index, float(torch.rand(()))) for index in indices]

    once = read(Batched(), [[1, 2]])[0]
    again = read(Batched(), [[1, 2]])[0]
    assert once == again
    assert once[0][1] != once[1][1]


def test_worker_info_and_initial_seed_are_those_of_the_batch_s_logical_worker() -> None:
    class Says:
        def __getitem__(self, index: int) -> tuple[int, int, int, int, bool]:
            info = get_worker_info()
            assert info is not None
            same = isinstance(info.dataset, Says)
            return info.id, info.num_workers, info.seed, torch.initial_seed(), same

    batches = read(Says(), [[0], [1], [2], [3]], first_batch=4)
    expected = [[(k % 3, 3, 7 + k % 3, 7 + k % 3, True)] for k in range(4, 8)]
    assert batches == expected
    assert get_worker_info() is None


def test_collate_sees_the_worker_too() -> None:
    def collate(samples: list[int]) -> tuple[int, int]:
        info = get_worker_info()
        assert info is not None
        return samples[0], info.id

    assert read(range(10), [[4]], first_batch=2, collate_fn=collate) == [(4, 2)]


def test_default_collate_does_not_use_shared_memory() -> None:
    batch = read(torch.arange(6.0), [[0, 5]], collate_fn=default_collate)[0]
    assert batch.tolist() == [0.0, 5.0]
    assert not batch.is_shared()


def test_copies_live_as_long_as_their_dataset_version() -> None:
    first, second = (make_run(num_workers=1, dataset_version=version) for version in range(2))
    assert read(Counts(), [[0], [0]], run=first, **BOUND) == [[(1, None)], [(2, None)]]
    assert read(Counts(), [[0]], run=first, **BOUND) == [[(3, None)]]
    assert read(Counts(), [[0]], run=second, **BOUND) == [[(1, None)]]
    assert [key[1] for key in dataset_copies._copies] == [1]


def test_copies_never_cross_loaders() -> None:
    assert read(Counts(), [[0]], run=make_run(loader="a")) == [[(1, None)]]
    assert read(Counts(), [[0]], run=make_run(loader="b")) == [[(1, None)]]


def test_copies_live_until_their_pipeline_is_released() -> None:
    for pipeline in ("train", "check"):
        with dataset_copies.kept_for(pipeline):
            read(Counts(), [[0]] * 16, run=make_run(loader=pipeline, num_workers=16), **BOUND)
    with dataset_copies.kept_for("train"):
        again = read(Counts(), [[0]] * 16, run=make_run(loader="train", num_workers=16), **BOUND)
    assert again == [[(2, None)]] * 16
    dataset_copies.release_copies("train")
    assert {slot[0] for slot in dataset_copies._copies} == {"check"}
    dataset_copies.release_copies("check")
    assert not dataset_copies._copies


def test_a_chunk_that_begins_when_its_pipeline_is_closed_leaves_no_copy() -> None:
    from dpex.worker import kept_jobs

    kept_jobs._release("closed")  # the task has its chunk by now
    with kept_jobs.working("closed", 1):
        assert read(Counts(), [[0]], **BOUND) == [[(1, None)]]
        assert dataset_copies._copies
    assert not dataset_copies._copies


def test_a_copy_that_changes_belongs_to_the_worker_that_changed_it() -> None:
    class CountsFrom2(Counts):
        def __getitem__(self, index: int) -> tuple[int, int | None]:
            if index >= 2:
                self.reads += 1
            return self.reads, index

    seen: list[bool] = []

    def made(dataset: Any, chunks: dict[int, list[int]], binding: Binding) -> list[Any]:
        pickled = dump(Job(dataset, list, None, True), "loader")
        entries = []
        for first, indices in chunks.items():
            chunk = Chunk(make_run(), 0, first, [[i] for i in indices], [0] * len(indices))
            entries += fetch_chunk(
                chunk,
                lambda: load(pickled),
                "here",
                lambda: False,
                binding=binding,
                seen_unchanged=seen.append,
            )
        return [load(entry.value)[0][0] for entry, _ in entries]

    dataset = CountsFrom2()
    assert made(dataset, {0: [0, 0]}, Binding.WATCHED) == [0, 0]
    assert seen == [True, True]
    # Released logical workers share the copy. dpex does not check it after each batch, because that
    # would take too long.
    assert made(dataset, {1: [1], 2: [1]}, Binding.RELEASED) == [0, 0]
    assert len(dataset_copies._copies) == 1
    [copy] = dataset_copies._copies.values()
    assert copy.watch is not None
    copy.watch._next_look = 0.0
    assert made(dataset, {1: [2, 3, 4]}, Binding.RELEASED) == [1, 2, 3]
    assert seen == [True, True, False]
    assert [slot[2] for slot in dataset_copies._copies] == [1]
    assert made(dataset, {1: [5], 0: [6]}, Binding.ALWAYS) == [4, 1]


def test_a_state_that_starts_again_on_the_shared_copy_is_reported() -> None:
    """The process has a copy that no batch has changed, and the logical worker takes it over."""
    pickled = dump(Job(Counts(), list, None, True), "loader")

    def reported(batches: int, binding: Binding, *, restarted: bool) -> list[int]:
        chunk = Chunk(make_run(), 0, 0, [[]] * batches, [0] * batches)
        entries = fetch_chunk(
            chunk, lambda: load(pickled), "here", bool, binding=binding, restarted=restarted
        )
        return [costs.after_restart for _, costs in entries]

    assert reported(1, Binding.RELEASED, restarted=False) == [0]
    assert reported(2, Binding.ALWAYS, restarted=True) == [1, 1]
    assert reported(1, Binding.ALWAYS, restarted=False) == [1]
    assert len(dataset_copies._copies) == 1


def test_worker_init_fn_runs_once_per_logical_worker_on_a_copy_of_its_own() -> None:
    def open_for(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.dataset.opened_by is None
        assert info.dataset.reads == 0
        info.dataset.opened_by = worker_id

    batches = read(Counts(), [[0]] * 6, worker_init_fn=open_for, **BOUND)
    assert batches == [[(1, 0)], [(1, 1)], [(1, 2)], [(2, 0)], [(2, 1)], [(2, 2)]]


def test_worker_init_fn_finds_torch_s_seeds() -> None:
    seen: list[Any] = []

    class Seen:
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert info is not None
            return info.dataset.seen

    def remember(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        draws = (torch.initial_seed(), float(torch.rand(())), random.random())
        info.dataset.seen = (*draws, float(np.random.rand()))

    for worker in range(2):
        generator = torch.Generator().manual_seed(7 + worker)
        numpy_seed = torch.utils.data._utils.worker._generate_state(7, worker)
        seen.append(
            [
                (
                    7 + worker,
                    float(torch.rand((), generator=generator)),
                    random.Random(7 + worker).random(),
                    float(np.random.RandomState(numpy_seed).rand()),
                )
            ]
        )
    assert read(Seen(), [[0], [0]], worker_init_fn=remember, **BOUND) == seen


def test_an_error_takes_its_batch_s_place_and_the_others_stay() -> None:
    class Divides:
        def __getitem__(self, index: int) -> float:
            return 1 / (index - 2)

    good, bad, after = read(Divides(), [[0, 1], [3, 2], [4]])
    assert good == [-0.5, -1.0]
    assert after == [0.5]
    with pytest.raises(ZeroDivisionError) as caught:
        bad.reraise()
    text = str(caught.value)
    assert "Caught ZeroDivisionError in DataLoader worker process 1" in text
    assert "dataset index 2, batch 1, node here, pid 1" in text
    assert "return 1 / (index - 2)" in text


def test_an_error_in_collate_names_the_indices() -> None:
    def collate(samples: list[Any]) -> Any:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match=r"dataset indices \[3, 4\], batch 0"):
        read(range(10), [[3, 4]], collate_fn=collate)[0].reraise()


def test_an_exception_that_cannot_travel_becomes_a_runtime_error_with_its_text() -> None:
    class Odd(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"odd {first} {second}")

    class Raises:
        def __getitem__(self, index: int) -> Any:
            raise Odd(1, 2)

    with pytest.raises(RuntimeError, match="odd 1 2"):
        read(Raises(), [[0]])[0].reraise()


def test_sys_exit_in_a_sample_is_an_error_and_not_the_end_of_the_worker() -> None:
    class Exits:
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                sys.exit(index)
            argparse.ArgumentParser().parse_args(["--port=7"])

    exits, parses = read(Exits(), [[3], [0]])
    with pytest.raises(
        RuntimeError, match=r"(?s)in __getitem__.*sys\.exit\(3\).*exception instead"
    ):
        exits.reraise()
    with pytest.raises(RuntimeError, match=r"(?s)in parse_args.*sys\.exit\(2\).* is argparse"):
        parses.reraise()


class Stop(BaseException):
    """An exception that is no ``Exception``."""


@pytest.mark.parametrize("error", [asyncio.CancelledError("a"), GeneratorExit("a"), Stop("a")])
def test_an_exception_that_is_no_exception_ends_only_its_batch(error: BaseException) -> None:
    class Raises:
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise error
            return index

    name = type(error).__name__
    failed, whole = read(Raises(), [[3], [0]])
    with pytest.raises(RuntimeError, match=rf"(?s)in __getitem__.* raised {name}\(a\).*instead"):
        failed.reraise()
    assert whole == [0]


def test_a_batch_that_cannot_be_pickled_names_its_part() -> None:
    class Threads:
        def __getitem__(self, index: int) -> Any:
            return {"image": 1, "lock": __import__("threading").Lock()}

    wrapped = read(Threads(), [[0]])[0]
    with pytest.raises(Exception, match=r"batch\[0\]\['lock'\]"):
        wrapped.reraise()


def test_nothing_is_made_once_nobody_waits() -> None:
    pickled = dump(Job(range(100), list, None, True), "loader")
    asked = iter([False, False, True])
    chunk = Chunk(make_run(num_workers=1), 0, 0, [[0, 1], [2], [3]], [0, 2, 3])
    made = list(fetch_chunk(chunk, lambda: load(pickled), "here", lambda: next(asked)))
    assert [load(entry.value) for entry, _ in made] == [[0, 1]]


def test_it_says_so_once_its_last_batch_is_nearly_made() -> None:
    happened: list[Any] = []

    class Told:
        def __getitem__(self, index: int) -> int:
            happened.append(index)
            return index

    def collated(samples: list[Any]) -> list[Any]:
        happened.append(samples)
        return samples

    job = Job(Told(), collated, None, True)
    chunk = Chunk(make_run(num_workers=1), 0, 0, [[0, 1], [2, 3]], [0, 2])

    def nearly_made() -> None:
        happened.append("nearly")

    made = fetch_chunk(chunk, lambda: job, "here", lambda: False, nearly_made=nearly_made)
    assert len(list(made)) == 2
    told = happened.index("nearly")
    assert happened[:told] in ([0, 1, [0, 1], 2], [0, 1, [0, 1], 2, 3])
    assert [what for what in happened[told:] if what != "nearly"][-1] == [2, 3]


class Moody:
    """A dataset that draws at some samples only; with ``fails``, these samples raise an error."""

    def __init__(self, draw: Any, moods: set[int], *, fails: bool = False) -> None:
        self.draw = draw
        self.moods = moods
        self.fails = fails

    def __getitem__(self, index: int) -> Any:
        drawn = self.draw() if index in self.moods else None
        if self.fails and drawn is not None:
            raise ValueError(f"by chance: {drawn}")
        return index, drawn


@pytest.mark.parametrize(
    "draw",
    [
        lambda: float(torch.rand(())),
        lambda: random.random(),
        lambda: float(np.random.rand()),
        lambda: float(np.random.normal()),
    ],
    ids=["torch", "random", "numpy", "numpy's normal"],
)
def test_who_begins_to_draw_late_draws_the_same(draw: Any) -> None:
    batches = [list(range(start, start + 8)) for start in range(0, 64, 8)]
    always = [
        s
        for batch in read(Moody(draw, set(range(64))), batches, run=make_run(loader="always"))
        for s in batch
    ]
    late = [
        s
        for batch in read(Moody(draw, {13, 29, 30, 58}), batches, run=make_run(loader="late"))
        for s in batch
    ]
    assert len({drawn for _, drawn in always}) == 64
    assert late == [(i, drawn if i in {13, 29, 30, 58} else None) for i, drawn in always]


def draw() -> float:
    return random.random()


def test_an_error_by_chance_is_the_same_whenever_drawing_begins() -> None:
    batches = [list(range(start, start + 8)) for start in range(0, 32, 8)]
    draws = {
        i: drawn
        for batch in read(Moody(draw, set(range(32))), batches, run=make_run(loader="always"))
        for i, drawn in batch
    }
    failing = read(Moody(draw, {21}, fails=True), batches, run=make_run(loader="fails"))[2]
    with pytest.raises(ValueError, match=f"by chance: {draws[21]}"):
        failing.reraise()


def test_a_collate_fn_that_draws_does_so_from_the_last_sample_s_seed() -> None:
    def collate(samples: list[Any]) -> Any:
        return random.random()

    batches = [[0, 1, 2], [3, 4, 5]]
    expected = [s[-1][1] for s in read(Moody(draw, {2, 5}), batches, run=make_run(loader="some"))]
    assert read(Counts(), batches, collate_fn=collate) == expected


@pytest.mark.parametrize("batched", [False, True], ids=["samples", "batches"])
def test_a_stage_with_a_gpu_seeds_cuda(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.Generator()  # in place of a GPU's generator
    seeds: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda s: (seeds.append(s), device.manual_seed(s))
    )

    def drawn(value: Any) -> Any:
        size = len(value) if batched else 1
        return torch.rand(size, generator=device).tolist()

    def stage(position: int, indices: list[int], *, kept: bool = True) -> Any:
        value = torch.tensor(indices) if batched else indices
        came = StageInput(make_run(), indices, position, value)
        job = StageJob(drawn, batched, None if batched else list, True, True)
        entry = Entry(0, encode(came), "batch")
        [(made, _)] = apply_stage(1, [entry], lambda: job, "here", lambda: False, kept=kept)
        assert made.outcome == "batch", load(made.value).exc_msg
        dataset_copies._copies.clear()
        return load(made.value)

    whole = stage(4, [7, 8, 9, 7])
    device.seed()
    assert stage(4, [7, 8, 9, 7]) == whole, "tried again"
    assert len({str(value) for value in whole}) == 4
    if not batched:
        assert stage(4, [7, 8]) + stage(6, [9, 7]) == whole
    seeds.clear()
    stage(4, [7, 8], kept=False)
    assert not seeds, "CUDA is left alone where there is no GPU"
