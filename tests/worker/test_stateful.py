"""Tests of datasets with a ``state_dict``."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import seed_everything
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from dpex import DpexDataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

CARRIERS = ("local", pytest.param("processes", marks=pytest.mark.extended))
OURS = {"distribute_mode": True, "head_address": "local"}
LENGTH = 13

Batch = tuple[list[int], list[float]]


class Itself(IterableDataset[Any]):
    """A stream with a state that is its own iterator, and logs the samples that it reads."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        self.place = 0
        return self

    def __next__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        index = first + self.place * step
        if index >= LENGTH:
            raise StopIteration
        self.place += 1
        with self.notes.open("a") as file:
            file.write(f"{index} ")
        return index, torch.rand(())

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Apart(IterableDataset[Any]):
    """A stream without a state, whose iterator has a state."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __iter__(self) -> Iterator[Any]:
        return iter(Itself(self.notes))


class Generating(Itself):
    """A stream with a state, whose iterator is a generator."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield next(self)
            except StopIteration:
                self.place = 0
                return


class KeepsItsBeginning(Itself):
    """A stream that starts every pass at the position that it last loaded."""

    begin = 0

    def __iter__(self) -> Iterator[Any]:
        self.place = self.begin
        return Generating.__iter__(self)  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


KINDS = [Itself, Apart, Generating]


def read(notes: Path) -> list[int]:
    return sorted(map(int, notes.read_text().split())) if notes.exists() else []


def batches_of(loader: Any, most: int | None = None) -> list[Batch]:
    return [(i.tolist(), draws.tolist()) for i, draws in itertools.islice(loader, most)]


def indices_in(batches: list[Batch]) -> set[int]:
    return {index for batch, _ in batches for index in batch}


@pytest.mark.parametrize("place", [0, 1, 4, 6, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_begins_where_its_state_says(kind: Any, place: int, tmp_path: Path) -> None:
    """A resumed stream reads no sample twice, and draws the same numbers."""

    def loader(part: str) -> DpexDataLoader[Any]:
        return DpexDataLoader(kind(tmp_path / part), 2, num_workers=2, **OURS)

    seed_everything()
    with loader("whole") as first:
        whole = batches_of(first)
    seed_everything()
    with loader("before") as second:
        before = batches_of(second, place)
        state = second.state_dict()
    with loader("after") as third:
        third.load_state_dict(state)
        assert before + batches_of(third) == whole
        assert not third.state_dict()["in_progress"]
    assert read(tmp_path / "after") == sorted(set(range(LENGTH)) - indices_in(before))


def test_states_follow_what_was_handed_out_not_what_was_read(tmp_path: Path) -> None:
    with DpexDataLoader(Itself(tmp_path / "notes"), 1, num_workers=1, **OURS) as loader:
        iterator = iter(loader)
        places = []
        for _ in range(LENGTH):
            next(iterator)
            [state] = loader.state_dict()["stream_states"]
            places.append(state["iterator"]["place"])
    assert places == list(range(1, LENGTH + 1))


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize(("workers", "persistent"), [(2, False), (2, True), (0, False)])
def test_epochs_after_a_resumed_epoch_are_whole(
    workers: int, persistent: bool, place: int, tmp_path: Path
) -> None:
    def loader(part: str) -> DpexDataLoader[Any]:
        dataset = KeepsItsBeginning(tmp_path / part)
        return DpexDataLoader(
            dataset, 2, num_workers=workers, persistent_workers=persistent, **OURS
        )

    with loader("before") as first:
        batches_of(first)
        before = batches_of(first, place) if place else []
        state = first.state_dict()
    with loader("after") as second:
        second.load_state_dict(state)
        assert indices_in(batches_of(second)) == set(range(LENGTH)) - indices_in(before)
        for _ in range(2):
            assert indices_in(batches_of(second)) == set(range(LENGTH))


class Goes(Itself):
    """A stream whose ``__iter__`` continues where the last iterator stopped."""

    def __iter__(self) -> Iterator[Any]:
        return self


class HoldsGenerator(Goes):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        torch.set_rng_state(state["rng"])


class ItsDatasetHolds(Generating):
    """A stream like ``HoldsGenerator``, but with a generator as its iterator."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        torch.set_rng_state(state["rng"])


@pytest.mark.parametrize("place", [0, 1, 10, LENGTH])
@pytest.mark.parametrize("kind", [*KINDS, Goes, HoldsGenerator, ItsDatasetHolds])
def test_without_workers_a_stream_resumes_as_a_stateful_data_loader_s(
    kind: Any, place: int, tmp_path: Path
) -> None:
    found = {}
    for loader_type in (DpexDataLoader, StatefulDataLoader):
        notes = tmp_path / loader_type.__name__
        seed_everything()
        loader = loader_type(kind(notes), 1)
        batches = batches_of(iter(loader), place)
        state = loader.state_dict()
        torch.rand(7)
        loader = loader_type(kind(notes), 1)
        loader.load_state_dict(state)
        rest = batches_of(loader)
        assert read(notes) == list(range(LENGTH)), "nothing is read a second time"
        # If the state lacks the generator, the numbers depend on earlier draws of the process.
        exact = kind in (HoldsGenerator, ItsDatasetHolds)
        found[loader_type] = (batches, rest) if exact else (batches, [i for i, _ in rest])
    assert found[DpexDataLoader] == found[StatefulDataLoader]


class CountsEpochs(IterableDataset[Any]):
    """A stream whose samples contain its epoch; a state after an epoch contains the next one."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while self.place < 6:
            self.place += 1
            yield self.epoch, first + (self.place - 1) * step
        self.epoch += 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class CountsItself(CountsEpochs):
    """A stream that is its own iterator, and stays at its end until the next pass."""

    def __init__(self) -> None:
        self.epoch, self.place = -1, 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.place = 0
        return self

    def __next__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        if self.place == 6:
            raise StopIteration
        self.place += 1
        return self.epoch, first + (self.place - 1) * step


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [CountsEpochs, CountsItself])
def test_a_dataset_keeps_its_state_from_epoch_to_epoch(kind: Any, workers: int, place: int) -> None:
    """A second loader resumes this state, taken after epoch 0 or in the middle of epoch 1."""
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "collate_fn": list,
    }
    torchs = DataLoader(kind(), **arguments)
    epochs = [list(torchs) for _ in range(4)]
    with DpexDataLoader(kind(), **arguments, **OURS) as loader:
        assert list(loader) == epochs[0]
        if place:
            assert list(itertools.islice(loader, place)) == epochs[1][:place]
        state = loader.state_dict()
    with DpexDataLoader(kind(), **arguments, **OURS) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert list(loader) == epochs[1][place:]
        assert [list(loader) for _ in range(2)] == epochs[2:]


def test_other_workers_begin_without_the_states_of_those_that_were() -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "persistent_workers": True, "collate_fn": list}
    with DpexDataLoader(CountsEpochs(), num_workers=2, **arguments, **OURS) as loader:
        list(loader)
        state = loader.state_dict()
    with DpexDataLoader(CountsEpochs(), num_workers=1, **arguments, **OURS) as loader:
        with pytest.warns(
            UserWarning, match="states of 2 persistent workers.*num_workers=2"
        ) as caught:
            loader.load_state_dict(state)
        batches = list(loader)
        assert [warning.filename for warning in caught] == [__file__]
        assert batches == list(DataLoader(CountsEpochs(), num_workers=1, **arguments))


class Deadly(Itself):
    """A stream that kills worker 0's process once, before its sixth sample.

    Its state is one sample ahead.
    """

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place + 1}

    def __next__(self) -> Any:
        mark = self.notes.with_suffix(".died")
        if self.place == 5 and get_worker_info().id == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__next__()


def test_a_worker_that_dies_loses_nothing_that_a_state_forgets(tmp_path: Path) -> None:
    """This holds for a new epoch and for a resumed epoch."""
    options: dict[str, Any] = {"num_workers": 2, **OURS}
    seed_everything()
    with DpexDataLoader(Itself(tmp_path / "whole"), 1, **options) as loader:
        whole = batches_of(loader)
    seed_everything()
    with DpexDataLoader(Deadly(tmp_path / "notes"), 1, **options) as loader:
        assert batches_of(loader) == whole
    assert (tmp_path / "notes.died").exists()
    seed_everything()
    with DpexDataLoader(Itself(tmp_path / "before"), 1, **options) as loader:
        before = batches_of(loader, 4)
        state = loader.state_dict()
    with DpexDataLoader(Deadly(tmp_path / "after"), 1, **options) as loader:
        loader.load_state_dict(state)
        assert before + batches_of(loader) == whole
    assert (tmp_path / "after.died").exists()


class Forgetful(Itself):
    def state_dict(self) -> dict[str, int]:
        if self.place == 3:
            raise LookupError("where am I?")
        return super().state_dict()


class Stubborn(Itself):
    def load_state_dict(self, state: Any) -> None:
        if get_worker_info():
            raise LookupError(f"not to {state}")


def test_errors_of_states_are_the_dataset_s_own(tmp_path: Path) -> None:
    with DpexDataLoader(Forgetful(tmp_path / "notes"), 1, num_workers=1, **OURS) as loader:
        iterator = iter(loader)
        assert len(batches_of(iterator, 2)) == 2
        with pytest.raises(LookupError, match=r"(?s)batch 2 of its stream.*where am I\?"):
            next(iterator)
        state = loader.state_dict()
        assert len(batches_of(iterator)) == LENGTH - 3
    with DpexDataLoader(Stubborn(tmp_path / "notes"), 1, num_workers=1, **OURS) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        with pytest.raises(LookupError, match=r"not to \{'place': 2\}"):
            next(iterator)
        assert batches_of(iterator) == []


class Curriculum(Dataset[int]):
    """A map-style dataset whose samples depend on its state."""

    level = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return 100 * self.level + index

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("options", [{}, OURS], ids=["torch", "dpex"])
def test_a_map_style_dataset_has_the_state_of_the_training_process(
    options: Any, persistent: bool
) -> None:
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": persistent, **options}
    dataset = Curriculum()
    with DpexDataLoader(dataset, **options) as loader:
        dataset.level = 3
        next(iter(loader))
        dataset.level = 4  # holds from the next epoch on
        state = loader.state_dict()
    with DpexDataLoader(Curriculum(), **options) as loader:
        list(loader)  # persistent workers start here
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == [[302, 303], [304, 305]]
        assert [batch.tolist() for batch in loader] == [[300, 301], [302, 303], [304, 305]]


def test_without_workers_it_is_the_state_of_now() -> None:
    dataset = Curriculum()
    loader = DpexDataLoader(dataset, 2)
    next(iter(loader))
    dataset.level = 4
    state = loader.state_dict()
    loader = DpexDataLoader(Curriculum(), 2)
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[402, 403], [404, 405]]


class AnothersProtocol(Itself):
    """A stream with a ``state_dict`` for another loader, like streams of MosaicML and LitData."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:  # type: ignore[override]
        raise AssertionError("not for us")


class AnothersMap(Curriculum):
    def state_dict(self, num_samples: int) -> dict[str, int]:  # type: ignore[override]
        raise AssertionError("not for us")


@pytest.mark.parametrize("options", [{}, OURS], ids=["torch", "dpex"])
def test_methods_that_want_to_be_told_more_are_not_ours(options: Any, tmp_path: Path) -> None:
    for kind, samples in (AnothersProtocol, LENGTH), (AnothersMap, 6):
        found = []
        state = {}
        for _ in range(2):
            dataset = kind(tmp_path / "notes") if samples == LENGTH else kind()
            with DpexDataLoader(dataset, 2, num_workers=2, **options) as loader:
                loader.load_state_dict(state)
                for batch in itertools.islice(loader, None if state else 2):
                    found += (batch if samples == 6 else batch[0]).tolist()
                state = loader.state_dict()
        assert sorted(found) == list(range(samples))
        assert state["dataset"] is state["stream_states"] is None


def test_a_dataset_that_cannot_be_told_is_refused() -> None:
    loader = DpexDataLoader(Curriculum(), 2)
    next(iter(loader))
    other: DpexDataLoader[int] = DpexDataLoader(range(6), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"range has no state_dict\(\).*load_state_dict\({}\)"):
        other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 3
