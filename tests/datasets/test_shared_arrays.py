"""Tests of large arrays in datasets that every process builds: a node has one copy."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrays_program import LENGTH
from cluster_programs import PROGRAMS, run_program, workplace
from torch.utils.data import ConcatDataset, Dataset, Subset

from dpex.datasets import node_memory
from dpex.datasets.shared_arrays import MEMORY, share_arrays
from dpex.private_directory import remove_claimed
from dpex.wire.memory_map import address_of, spans

PROGRAM = PROGRAMS / "arrays_program.py"
ROWS, COLUMNS = 400, 1_000


@pytest.fixture
def job() -> Iterator[str]:
    """Make the name of a job without other processes, and remove the job's memory afterwards."""
    name = uuid.uuid4().hex
    yield name
    directory = node_memory.job_directory(MEMORY, name)
    remove_claimed(directory)
    assert not directory.exists()
    torch.set_default_device(None)


class Arrays(Dataset[Any]):
    """A dataset with arrays of many kinds."""

    def __init__(self, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        self.pixels = numbers.integers(0, 256, (1 << 11, 3, 16, 16), np.uint8).transpose(0, 2, 3, 1)
        self.tensor = torch.from_numpy(numbers.random((ROWS, COLUMNS)))
        self.backwards = self.tensor.numpy()[::-1, 10:]
        self.columns = self.tensor.t()[5:]
        self.fixed = numbers.random((ROWS, COLUMNS))
        self.fixed.flags.writeable = False
        self.fortran = np.asfortranarray(numbers.random((ROWS, COLUMNS)))
        self.labels = numbers.integers(0, 10, 100)
        self.records = np.zeros(50_000, [("id", "<i8"), ("value", "<f8"), ("name", "S8")])

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Any:
        return self.pixels[index]


def inode(array: Any) -> int:
    """Return the inode of the file that an array's memory is mapped from, or 0."""
    start = address_of(np.asarray(array))
    return next((span.inode for span in spans() if span.start <= start < span.end), 0)


NAMES = ("pixels", "tensor", "backwards", "columns", "fixed", "fortran", "records")


def test_what_is_shared_is_what_was_built(job: str) -> None:
    expected, first, second = Arrays(), Arrays(), Arrays()
    share_arrays(first, job)
    share_arrays(second, job)
    for name in NAMES:
        array, before = getattr(first, name), getattr(expected, name)
        assert type(array) is type(before)
        assert (array.dtype, array.shape) == (before.dtype, before.shape)
        strides = [
            a.stride() if isinstance(a, torch.Tensor) else a.strides for a in (array, before)
        ]
        assert strides[0] == strides[1]
        assert np.array_equal(np.asarray(array), np.asarray(before))
        assert inode(array) == inode(getattr(second, name)) != 0, name
    assert not first.fixed.flags.writeable
    assert inode(first.labels) == 0, "it is small"


def test_what_is_written_is_seen_by_its_owner_alone(job: str) -> None:
    first, second = Arrays(), Arrays()
    share_arrays(first, job)
    share_arrays(second, job)
    first.tensor[0, 10] = 7
    # Views of one array still share their memory.
    assert (first.backwards[-1, 0], first.columns[5, 0]) == (7, 7)
    assert second.tensor[0, 10] != 7
    third = Arrays()
    share_arrays(third, job)
    assert torch.equal(third.tensor, second.tensor)


def test_other_defaults_change_nothing(job: str) -> None:
    arrays = Arrays()
    torch.set_default_device("meta")
    share_arrays(arrays, job)
    assert 0 not in {inode(getattr(arrays, name)) for name in NAMES}


def test_datasets_that_others_are_made_of(job: str) -> None:
    one, two = Arrays(1), Arrays(2)
    share_arrays(Subset(ConcatDataset([one, Subset(two, [3])]), [0]), job)
    assert 0 not in {inode(dataset.pixels) for dataset in (one, two)}


def test_what_cannot_be_shared_is_left_alone(tmp_path: Path, job: str) -> None:
    class OtherJobs(Dataset[Any]):
        def __init__(self) -> None:
            np.arange(1 << 18).tofile(tmp_path / "numbers")
            self.mapped = np.memmap(tmp_path / "numbers", np.int64)
            self.of_mapped = torch.from_numpy(np.memmap(tmp_path / "numbers", np.int64, "r+"))
            self.objects = np.array([{}] * (1 << 18))
            self.parameter = torch.zeros(1 << 18, requires_grad=True)
            self.in_common = torch.zeros(1 << 18).share_memory_()
            self.conjugated = torch.ones(1 << 18, dtype=torch.complex64).conj()
            self.nested = torch.nested.nested_tensor([torch.zeros(1 << 18), torch.zeros(2)])
            self.noted = torch.zeros(1 << 18)
            self.noted.note = "of the user's"  # type: ignore[attr-defined]
            self.lazy = torch.nn.parameter.UninitializedBuffer()
            self.sparse = torch.eye(1 << 9).to_sparse()
            self.whole = np.zeros(1 << 18)
            # Part of the memory of ``whole``: replacing either would separate the two.
            self.part = torch.from_numpy(self.whole[:10])

    others = OtherJobs()
    before = dict(vars(others))
    share_arrays(others, job)
    assert all(vars(others)[name] is value for name, value in before.items())
    for nothing in (None, 3, [], {}, object()):
        share_arrays(nothing, job)


def test_without_room_every_process_keeps_its_own(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs("/")
    full = os.statvfs_result([*found[:4], 0, *found[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    arrays = Arrays()
    share_arrays(arrays, job)
    assert {inode(getattr(arrays, name)) for name in NAMES} == {0}


def test_the_workers_of_a_node_map_one_copy_and_it_goes_with_them() -> None:
    base = node_memory.memory("arrays")
    with workplace() as place:
        before = set(base.glob("*"))
        done = run_program(PROGRAM, place=place, seconds=100)
        assert done.returncode == 0, done.stderr
        *rows, last = json.loads(done.stdout)
        width = 1 << 16
        sums = [sum(range(row * width, (row + 1) * width)) for row in range(LENGTH)]
        assert [row[2] for row in rows] == sums
        assert last[2] == sums[0], "a worker's writing is its own"
        assert len({row[0] for row in rows}) == 2
        assert len({row[1] for row in [*rows, last]}) == 1
        assert rows[0][1]
        assert set(base.glob("*")) <= before
