"""Tests of ``on_node``: datasets that each process builds where it reads them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pickle
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from idx_files import TEST, TRAINING, write_idx
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision import transforms as v1

from dpex import DpexDataLoader, NodeDataError
from dpex.datasets import on_node
from dpex.transforms import MappedDataset
from dpex.wire.pickling import dump

OURS = {"distribute_mode": True, "head_address": "local"}

Same = Callable[[Any, Any], None]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write FashionMNIST's files, and return their folder."""
    folder = tmp_path_factory.mktemp("data")
    write_idx(folder, "FashionMNIST")
    return folder


class Counted:
    """A dataset that counts how often this process has built it."""

    built = 0

    def __init__(self, samples: int = 40) -> None:
        type(self).built += 1
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.built


class AtOnce(Counted):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [("at once", index) for index in indices]


def test_nothing_but_the_arguments_travels(root: Path, assert_same: Same) -> None:
    whole = datasets.FashionMNIST(str(root), transform=v1.ToTensor())
    dataset = on_node(datasets.FashionMNIST, root=str(root), transform=v1.ToTensor())
    assert len(dataset) == len(whole) == TRAINING
    assert len(pickle.dumps(dataset)) < 2_000 < len(pickle.dumps(whole)) / 100
    torchs, ours = DataLoader(whole, 50), DataLoader(dataset, 50, num_workers=1)
    assert_same(list(ours), list(torchs))


@pytest.mark.usefixtures("shared_ray")
def test_it_is_built_once_in_every_process(root: Path, assert_same: Same) -> None:
    dataset = on_node(Counted, length=40)
    loader: Any = DpexDataLoader(dataset, 5, num_workers=2, **OURS)
    for _ in range(2):
        indices, built = (torch.cat(column).tolist() for column in zip(*loader, strict=True))
        assert indices == list(range(40))
        assert set(built) == {1}
    expected = DataLoader(datasets.FashionMNIST(str(root), False, v1.ToTensor()), 30)
    test_set = on_node(datasets.FashionMNIST, str(root), train=False, transform=v1.ToTensor())
    assert len(test_set) == TEST
    ours: Any = DpexDataLoader(test_set, 30, num_workers=2, **OURS)
    assert_same(list(ours), list(expected))


class Handle:
    """A dataset that keeps a file open; each process must have its own file position."""

    def __init__(self, path: str) -> None:
        self.file = Path(path).open("rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> int:
        self.file.seek(4 * index)
        return int.from_bytes(self.file.read(4), "little")


def test_forks_read_through_files_of_their_own(tmp_path: Path) -> None:
    np.arange(4_000, dtype=np.int32).tofile(tmp_path / "numbers")
    dataset = on_node(Handle, str(tmp_path / "numbers"))
    loader = DataLoader(dataset, 10, num_workers=4, multiprocessing_context="fork")
    assert torch.cat(list(loader)).tolist() == list(range(4_000))


class Long(Counted):
    """A dataset with two parameters that have the names of parameters of ``on_node``."""

    def __init__(self, length: int, arrays_in_common: bool = False) -> None:
        super().__init__(length)


def test_a_class_may_have_parameters_that_are_called_as_on_nodes_are() -> None:
    assert len(on_node(Long, 7)) == 7
    assert len(on_node(functools.partial(Long, length=7), length=7)) == 7
    with pytest.raises(NodeDataError, match=r"has 7 samples .* but 9"):
        on_node(functools.partial(Long, length=7), length=9)[0]


def test_every_call_builds_a_new_dataset(tmp_path: Path) -> None:
    class Files:
        def __init__(self, folder: Path) -> None:
            self.names = sorted(file.name for file in folder.iterdir())

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, index: int) -> str:
            return self.names[index]

    (tmp_path / "a").touch()
    one = on_node(Files, tmp_path)
    (tmp_path / "b").touch()
    two = on_node(Files, tmp_path)
    copy = pickle.loads(dump(two, "dataset").head)
    assert [list(dataset) for dataset in (one, two)] == [["a"], ["a", "b"]]
    assert copy.built is two.built
    assert dump(two, "dataset").digest == dump(copy, "dataset").digest
    built = weakref.ref(two.built)
    del two, copy
    assert built() is None


class Slow(Counted):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.1)


def test_threads_share_a_dataset_that_is_built_once() -> None:
    dataset = on_node(Slow, length=40)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(dataset.__getitem__, range(40))) == [(n, 1) for n in range(40)]


def test_a_fork_does_not_wait_for_a_thread_of_its_parent() -> None:
    parent = os.getpid()
    building, forked = threading.Event(), threading.Event()

    def make() -> range:
        if os.getpid() == parent:
            building.set()
            forked.wait(60)
        return range(4)

    dataset = on_node(make, length=4)
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(dataset.__getitem__, 3)
        building.wait(60)
        loader = DataLoader(dataset, num_workers=1, multiprocessing_context="fork", timeout=20)
        try:
            assert [int(batch) for batch in loader] == [0, 1, 2, 3]
        finally:
            forked.set()
        assert here.result() == 3


def test_a_length_that_is_given_builds_nothing_here() -> None:
    before = Counted.built
    assert len(on_node(Counted, 123, length=40)) == 40
    assert Counted.built == before


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_without_a_length_may_be_given_one() -> None:
    dataset = on_node(Unsized, length=3)
    assert [int(batch) for batch in DataLoader(dataset)] == [0, 1, 2]


def test_a_batch_is_read_at_once_where_the_dataset_can() -> None:
    [batch] = DataLoader(on_node(AtOnce, 3), 3, collate_fn=list)
    assert batch == [("at once", 0), ("at once", 1), ("at once", 2)]


def test_a_chain_goes_over_it() -> None:
    dataset = MappedDataset(on_node(Counted, 7), lambda value: value + 0.5)
    assert [dataset[index][0] for index in range(2)] == [0.5, 1.5]
    [batch] = DataLoader(MappedDataset(on_node(AtOnce, 3), str.upper), 3, collate_fn=list)
    assert batch == [("AT ONCE", 0), ("AT ONCE", 1), ("AT ONCE", 2)]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: on_node(Counted(3)), TypeError, "Pass FashionMNIST, root=..., not"),  # type: ignore[arg-type]
        (lambda: on_node(Counted, length=-1), TypeError, "integer >= 0 or None, got -1"),
        (lambda: on_node(Counted, length=True), TypeError, "integer >= 0 or None, got True"),
        (
            lambda: on_node(Long, length=3),
            TypeError,
            "length=3 is ambiguous: on_node and Long both have this parameter",
        ),
        (
            lambda: on_node(Long, 3, arrays_in_common=True),
            TypeError,
            "arrays_in_common=True is ambiguous",
        ),
        (
            lambda: on_node(datasets.ImageFolder, "/nowhere"),
            NodeDataError,
            "on_node(ImageFolder, root='/nowhere') cannot be built in this process (FileNotF",
        ),
    ],
)
def test_bad_input_is_told_at_once(
    make: Callable[[], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        make()


class Large:
    def __init__(self) -> None:
        self.rows = torch.zeros(101 << 20, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


@pytest.mark.usefixtures("shared_ray")
def test_a_large_dataset_that_travels_is_told_of_on_node_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    monkeypatch.setattr("dpex.log._warned", set())
    dataset = Large()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader: Any = DpexDataLoader(dataset, 4, num_workers=1, **OURS)  # type: ignore[arg-type]
        next(iter(loader))
        session = loader._cluster.session
        here = session._connection
        assert here.single_host
        session._connection = dataclasses.replace(here, kind="cluster", single_host=False)
        line = inspect.currentframe().f_lineno + 3  # type: ignore[union-attr]
        for _ in range(2):
            dataset.rows = dataset.rows + 1
            for _ in loader:
                break
        loader.close()
    [told] = [warning for warning in caught if "MB" in str(warning.message)]
    assert "101 MB" in str(told.message)
    assert "on_node" in str(told.message)
    assert (told.filename, told.lineno) == (__file__, line)


def test_secrets_are_not_shown() -> None:
    def make(*_: Any, **__: Any) -> Any:
        return range(3)

    dataset = on_node(
        make, "s3://user:hidden@store/data", 5, secret_key="hidden", options={"token": "hidden"}
    )
    assert "hidden" not in repr(dataset)
    assert "on_node(" in repr(dataset)

    def load(root: str, bucket: str = "", sas: str = "", count: int = 0) -> Any:
        return range(3)

    shown = repr(on_node(load, "s3://user:hi/dden@store/data?sig=hidden", "hidden", count=3))
    assert shown.endswith("load, root='s3:…store/data…', bucket=…, count=3)")
