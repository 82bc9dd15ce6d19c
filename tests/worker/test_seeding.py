"""Tests of logical workers: code in a sample sees the same as in torch's worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from living import Draws, Plain, SaysWorker, Surroundings, Threads
from torch.utils.data import get_worker_info

from dpex import DpexDataLoader

pytestmark = pytest.mark.usefixtures("shared_ray")


def loader_of(dataset: Any, **changes: Any) -> DpexDataLoader[Any]:
    arguments = {"batch_size": 5, "num_workers": 2, "distribute_mode": True, "collate_fn": list}
    return DpexDataLoader(dataset, **{**arguments, **changes})


def test_batch_k_belongs_to_worker_k_mod_num_workers() -> None:
    generator = torch.Generator().manual_seed(11)
    base_seed = torch.empty((), dtype=torch.int64).random_(generator=generator.clone_state())
    loader = loader_of(SaysWorker(), num_workers=7, generator=generator)
    for number, batch in enumerate(loader):
        worker = number % 7
        seed = int(base_seed) + worker
        assert {sample[:4] for sample in batch} == {(worker, 7, seed, seed)}


class _Marked(Plain):
    mark = -1

    def __getitem__(self, index: int) -> Any:
        return self.mark


def _mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.mark == -1
    info.dataset.mark = worker_id


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_prepares_each_logical_worker_s_copy(persistent: bool) -> None:
    loader = loader_of(
        _Marked(60), num_workers=3, worker_init_fn=_mark, persistent_workers=persistent
    )
    for _ in range(2):
        assert list(loader) == [[number % 3] * 5 for number in range(12)]


def test_worker_init_fn_set_after_construction_counts() -> None:
    loader = loader_of(_Marked(20))
    loader.worker_init_fn = _mark
    assert list(loader) == [[0] * 5, [1] * 5, [0] * 5, [1] * 5]


def draws(**changes: Any) -> list[Any]:
    loader = loader_of(Draws(60), generator=torch.Generator().manual_seed(5), **changes)
    return [sample for batch in loader for sample in batch]


def test_draws_depend_neither_on_workers_nor_on_batches() -> None:
    expected = draws(num_workers=1)
    assert draws(num_workers=3) == expected
    assert draws(batch_size=7) == expected
    assert draws(prefetch_factor=8, prefetch_bytes=0) == expected


def test_draws_do_not_repeat_from_epoch_to_epoch() -> None:
    for persistent in (False, True):
        loader = loader_of(Draws(20), persistent_workers=persistent)
        epochs = [
            {draw for batch in loader for _, *both in batch for draw in both} for _ in range(3)
        ]
        assert len(set.union(*epochs)) == 3 * 40


def test_workers_compute_on_one_thread() -> None:
    assert {sample for batch in loader_of(Threads(20)) for sample in batch} == {(1, "1")}


def test_workers_take_over_directory_and_default_dtype_at_iter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(Surroundings(20))
    here = {sample[1:] for batch in loader for sample in batch}
    assert here == {(str(Path.cwd()), torch.float32)}
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        there = {sample[1:] for batch in loader for sample in batch}
    finally:
        torch.set_default_dtype(torch.float32)
    assert there == {(str(tmp_path), torch.float64)}


def test_strings_hash_alike_in_all_workers() -> None:
    command = [sys.executable, "-c", "print(hash('a.jpg'))"]
    environment = {"PYTHONHASHSEED": "0", **os.environ}
    expected = int(subprocess.check_output(command, env=environment))
    assert {sample[0] for batch in loader_of(Surroundings(100)) for sample in batch} == {expected}
