"""Tests that samples and batches of any content equal those of torch's forked workers."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.datapipes.map import SequenceWrapper

from dpex import DpexDataLoader, SerializationError
from dpex.transforms import MappedDataset, Stage

pytestmark = pytest.mark.usefixtures("shared_ray")

CARRIERS = ("local", "processes")
OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "local"}

Make = Callable[..., Any]


def make_ours(*arguments: Any, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(*arguments, **options, **OURS)


MAKERS = functools.partial(DataLoader, multiprocessing_context="fork"), make_ours


def outcomes(read: Callable[[Make], Any]) -> list[Any]:
    """Return torch's result and dpex's: the value, or the error's type and last line."""

    def outcome(make: Make) -> Any:
        try:
            return read(make)
        except Exception as error:
            # Frees torch's iterator now. If it is freed later, its workers take 10 s to end.
            traceback.clear_frames(error.__traceback__)
            return type(error).__name__, str(error).strip().splitlines()[-1]

    return [outcome(make) for make in MAKERS]


# --- gradients ------------------------------------------------------------------------------------


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


class Features(Dataset[Any]):
    """Samples that a network computes."""

    def __init__(self) -> None:
        self.network = network()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.network(torch.full((4,), float(index)))


class FeatureStream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.features = Features()

    def __iter__(self) -> Any:
        return (self.features[index] for index in range(6))


class Constants(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index))


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["map", "stream", "stage"])
def test_gradients_are_recorded_as_in_the_training_process(
    kind: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    dataset: Any = {"map": Features, "stream": FeatureStream}.get(kind, Features)()

    def read(make: Make) -> Any:
        ours = kind == "stage" and make is MAKERS[1]
        staged = MappedDataset(Constants(), [Stage(network())]) if ours else dataset
        with mode():
            batches = list(make(staged, batch_size=3, num_workers=2))
        return [(batch.requires_grad, batch.tolist()) for batch in batches]

    torchs, ours = outcomes(read)
    if mode is nullcontext:  # neither sends a tensor that requires a gradient
        assert torchs[0] == ours[0] == "RuntimeError"
    else:
        assert ours == torchs
        assert not ours[0][0]


def test_gradients_are_recorded_as_at_the_iteration_s_beginning() -> None:
    dataset, arguments = Features(), {"batch_size": 3, "num_workers": 2, "collate_fn": len_and_mode}

    def read(make: Make) -> Any:
        loader = make(dataset, **arguments)
        found = []
        for enabled in (True, False, True):
            with torch.set_grad_enabled(enabled):
                found.append(list(loader))
        return found

    torchs, ours = outcomes(read)
    assert ours == torchs == [[(3, mode)] * 2 for mode in (True, False, True)]


def len_and_mode(samples: list[Any]) -> tuple[int, bool]:
    return len(samples), torch.is_grad_enabled()


# --- types of batches -----------------------------------------------------------------------------


class Volumes(Dataset[Any]):
    """Samples whose dtypes alternate."""

    def __init__(self, kinds: tuple[str, ...], size: int) -> None:
        self.kinds = kinds
        self.size = size

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        values = np.full(self.size, index + 1 / 3)
        return {"image": values.astype(self.kinds[index % len(self.kinds)]), "id": index}


# dpex sends a small batch in its pickle, and a large one outside the pickle.
@pytest.mark.parametrize("size", [4, 1 << 18])
@pytest.mark.parametrize(
    "kinds",
    [
        ("float32", "float64"),
        ("float64", "float32"),
        ("float16", "float32"),
        ("uint8", "float32"),
        ("float32", "uint8"),
        ("int64", "int32"),
        ("bool", "int64"),
    ],
    ids="+".join,
)
def test_a_batch_has_the_first_sample_s_dtype_or_is_torch_s_error(
    kinds: tuple[str, ...], size: int
) -> None:
    def read(make: Make) -> Any:
        batches = list(make(Volumes(kinds, size), batch_size=3, num_workers=2))
        return [(b["image"].dtype, b["image"][:, -1].tolist()) for b in batches]

    torchs, ours = outcomes(read)
    assert ours == torchs


class Own:
    """A type that ``default_collate`` does not support by default."""


class Owns(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return Own()


def who_collates(samples: Any, *, collate_fn_map: Any = None) -> Any:
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers, len(samples))


def tell_torch(_: int) -> None:
    default_collate_fn_map[Own] = who_collates


def test_the_user_s_way_to_collate_a_type_sees_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Own, who_collates)

    def read(make: Make) -> Any:
        return list(make(Owns(), batch_size=2, num_workers=2, worker_init_fn=tell_torch))

    torchs, ours = outcomes(read)
    assert ours == torchs == [(0, 2, 2), (1, 2, 2)]


# --- read-only arrays -----------------------------------------------------------------------------


def _locked(array: Any) -> Any:
    array.setflags(write=False)
    return array


def _arrow() -> Any:
    import pyarrow as pa

    return pa.array(np.ones(4, dtype=np.float32)).to_numpy()


def _frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": np.frombuffer(bytes(16), dtype=np.float32)}).to_numpy()


READ_ONLY: dict[str, Callable[[], Any]] = {
    "small buffer": lambda: np.frombuffer(bytes(16), dtype=np.float32),
    "large buffer": lambda: np.frombuffer(bytes(16_000), dtype=np.float32),
    "small": lambda: _locked(np.ones(4)),
    "large": lambda: _locked(np.ones(4_000)),
    "two dimensions": lambda: _locked(np.ones((2, 2))),
    "Fortran's order": lambda: _locked(np.asfortranarray(np.ones((2, 3)))),
    "every other": lambda: _locked(np.ones(8))[::2],
    "empty": lambda: np.frombuffer(b"", dtype=np.float32),
    "objects": lambda: _locked(np.array([None, 1], dtype=object)),
    "structured": lambda: np.frombuffer(bytes(24), dtype=[("a", "f4"), ("b", "i4")]),
    "small mapped": lambda: np.memmap(__file__, dtype="u1", mode="r")[:8],
    "large mapped": lambda: np.memmap(__file__, dtype="u1", mode="r")[:2_400],
    "Arrow": _arrow,
    "data frame": _frame,
}


class ReadOnly(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"array": READ_ONLY[self.kind]()}


@pytest.mark.parametrize("kind", READ_ONLY)
def test_arrays_of_a_batch_may_be_written_to(kind: str) -> None:
    def read(make: Make) -> Any:
        [batch] = make(ReadOnly(kind), batch_size=2, num_workers=1, collate_fn=list)
        array = batch[0]["array"]
        if array.size:
            array[0] = array[-1]
        return array.dtype.str, array.shape, array.tolist(), array.flags.f_contiguous

    torchs, ours = outcomes(read)
    assert ours == torchs


# --- references to Ray's objects ------------------------------------------------------------------


class FromStore(Dataset[Any]):
    """Samples of a list in Ray's object store."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        import ray

        return ray.get(self.ref, timeout=20)[index]


@pytest.mark.only_ray
@pytest.mark.parametrize("extra", [0, 2_000_000], ids=["small", "large"])
def test_a_dataset_may_hold_references_to_ray_s_objects(extra: int) -> None:
    import ray

    for first in (0, 10):  # dpex must not read the first object again
        ref = ray.put([*range(first, first + 8), bytes(extra)])
        loader = DpexDataLoader(FromStore(ref), batch_size=4, num_workers=2, **OURS)
        del ref
        assert [batch.tolist() for batch in loader] == [
            list(range(first, first + 4)),
            list(range(first + 4, first + 8)),
        ]


# --- code that changes between two iterations -----------------------------------------------------

HELPER = "def scaled(index):\n    return {factor} * index\n"
OWN = """
import {helper}

class Own:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {helper}.scaled(index)
"""


# A generator cannot be pickled, so this module cannot travel by value.
OPAQUE = "opaque = (number for number in ())\n"
LAZY = OWN.replace("        return", "        import {helper}\n        return")


@pytest.fixture
def own_modules(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    """Yield a module with a dataset, and the module with the function that the dataset calls.

    The parameter is the source of both, without their names and the factor.
    """
    helpers, datasets = getattr(request, "param", (HELPER, OWN))
    # New names, because worker processes keep the modules that they have imported.
    helper, dataset = (f"{kind}_{uuid.uuid4().hex}" for kind in ("helper", "dataset"))
    (tmp_path / f"{helper}.py").write_text(helpers.format(factor=1))
    (tmp_path / f"{dataset}.py").write_text(datasets.format(helper=helper))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module(dataset), importlib.import_module(helper)
    del sys.modules[dataset], sys.modules[helper]


def doubled(index: int) -> int:
    return 2 * index


@pytest.mark.parametrize("how", ["reloaded", "rewritten", "replaced", "edited in place"])
def test_workers_run_the_code_as_it_is_at_iter(how: str, own_modules: tuple[Any, Any]) -> None:
    dataset, helper = own_modules
    loader = DpexDataLoader(dataset.Own(), batch_size=4, num_workers=2, **OURS)

    def read() -> list[int]:
        return [int(sample) for batch in loader for sample in batch]

    assert read() == list(range(40))
    expected = list(range(0, 80, 2))
    if how in ("reloaded", "rewritten"):
        Path(helper.__file__).write_text(HELPER.format(factor=2))
    if how == "reloaded":
        importlib.reload(helper)
    elif how == "rewritten":  # the training process keeps the old function
        expected = list(range(40))
    elif how == "replaced":
        helper.scaled = doubled
    else:  # as autoreload does in notebooks
        helper.scaled.__code__ = doubled.__code__
    for _ in range(2):
        assert read() == expected


def with_process(samples: list[int]) -> tuple[list[int], int]:
    return samples, os.getpid()


def test_persistent_workers_that_start_later_run_the_first_code(
    own_modules: tuple[Any, Any],
) -> None:
    dataset, helper = own_modules
    loader = DpexDataLoader(
        dataset.Own(),
        batch_size=4,
        num_workers=2,
        collate_fn=with_process,
        persistent_workers=True,
        **OURS,
    )
    first = list(loader)
    Path(helper.__file__).write_text(HELPER.format(factor=2))
    importlib.reload(helper)
    processes = {process for _, process in first}
    for process in processes:
        os.kill(process, signal.SIGKILL)
    second = list(loader)
    assert processes.isdisjoint(process for _, process in second)
    assert [samples for samples, _ in second] == [samples for samples, _ in first]


def no_setup(worker_id: int) -> None:
    """Make dpex bind each logical worker to a process."""


@pytest.mark.parametrize(
    "own_modules",
    [
        pytest.param((HELPER, OWN), id="imported"),
        pytest.param((HELPER, LAZY), id="imported in a sample"),
        pytest.param((HELPER + OPAQUE, OWN), id="with a global that cannot be pickled"),
    ],
    indirect=True,
)
def test_processes_that_start_after_an_edit_run_the_code_of_iter(
    own_modules: tuple[Any, Any],
) -> None:
    dataset, helper = own_modules
    loader = DpexDataLoader(
        dataset.Own(),
        batch_size=2,
        num_workers=2,
        collate_fn=with_process,
        worker_init_fn=no_setup,
        prefetch_factor=1,
        prefetch_bytes=0,
        **OURS,
    )
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    Path(helper.__file__).write_text(HELPER.format(factor=2))
    processes = {process for _, process in first}
    for process in processes:
        os.kill(process, signal.SIGKILL)
    rest = list(iterator)
    assert {process for _, process in rest} - processes
    assert [i for samples, _ in first + rest for i in samples] == list(range(40))
    # The next epoch runs the code of the training process too, which has not reloaded the module.
    assert [i for samples, _ in loader for i in samples] == list(range(40))


def test_workers_do_not_run_a_file_that_was_edited_before_the_first_iter(
    own_modules: tuple[Any, Any],
) -> None:
    dataset, helper = own_modules
    Path(helper.__file__).write_text(HELPER.format(factor=2))
    loader = DpexDataLoader(dataset.Own(), batch_size=4, num_workers=2, **OURS)
    for _ in range(2):
        assert [int(i) for batch in loader for i in batch] == list(range(40))


def test_workers_run_what_the_script_has_patched_before_the_first_iter(
    own_modules: tuple[Any, Any],
) -> None:
    dataset, helper = own_modules
    script = {"__name__": "__main__"}
    exec(HELPER.format(factor=2), script)
    helper.scaled = script["scaled"]
    loader = DpexDataLoader(dataset.Own(), batch_size=4, num_workers=2, **OURS)
    assert [int(i) for batch in loader for i in batch] == list(range(0, 80, 2))


@pytest.mark.only_ray
@pytest.mark.parametrize("own_modules", [(HELPER + OPAQUE, OWN)], indirect=True)
def test_code_that_workers_cannot_get_is_an_error(own_modules: tuple[Any, Any]) -> None:
    dataset, helper = own_modules
    Path(helper.__file__).write_text(HELPER.format(factor=2) + OPAQUE)
    loader = DpexDataLoader(dataset.Own(), batch_size=4, num_workers=2, **OURS)
    with pytest.raises(SerializationError, match="cannot pickle 'generator'") as caught:
        iter(loader)
    [note] = caught.value.__notes__
    assert helper.__name__ in note


# --- map-style DataPipes --------------------------------------------------------------------------


def tripled(index: int) -> int:
    return 3 * index


@pytest.mark.parametrize("shuffle", [False, True])
def test_map_data_pipes_are_read_as_torch_reads_them(shuffle: bool) -> None:
    numbers = SequenceWrapper(list(range(10)))
    pipe = numbers.map(tripled).concat(numbers).zip(numbers.concat(numbers)).batch(3)

    def read(make: Make) -> Any:
        torch.manual_seed(5)
        loader = make(pipe, batch_size=2, num_workers=2, shuffle=shuffle, collate_fn=list)
        return [list(loader) for _ in range(2)]

    torchs, ours = outcomes(read)
    assert ours == torchs
    assert sum(map(len, torchs[0])) == 7


# --- managers of multiprocessing ------------------------------------------------------------------


class Counted(Dataset[int]):
    """Samples that are counted in a process of ``multiprocessing``'s manager."""

    def __init__(self, manager: SyncManager) -> None:
        self.made, self.lock = manager.Value("i", 0), manager.Lock()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.made.value += 1
        return index


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_reach_a_manager_as_torch_s_workers_do(context: str) -> None:
    with multiprocessing.Manager() as manager:
        dataset = Counted(manager)
        loader = DpexDataLoader(dataset, num_workers=2, multiprocessing_context=context, **OURS)
        for epoch in (1, 2):
            assert [int(batch) for batch in loader] == list(range(6))
            assert dataset.made.value == 6 * epoch


def double(sample: torch.Tensor, counted: Counted) -> int:
    return 2 * counted[int(sample)]


def test_a_later_stage_reaches_a_manager(carrier: str) -> None:
    context = "spawn" if carrier == "local" else "fork"  # processes spawn in the test above
    with multiprocessing.Manager() as manager:
        counted = Counted(manager)
        stage = Stage(functools.partial(double, counted=counted))
        dataset = MappedDataset(list(range(6)), transforms=[stage])
        loader = DpexDataLoader(dataset, num_workers=2, multiprocessing_context=context, **OURS)
        assert [int(batch) for batch in loader] == [0, 2, 4, 6, 8, 10]
        assert counted.made.value == 6
