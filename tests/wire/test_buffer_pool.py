"""Tests of the memory pool: memory serves one batch after another, and never two at once."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader, tuning
from dpex.cluster.connect import Connection
from dpex.wire.buffer_pool import MemoryPool
from dpex.wire.memory_map import address_of
from dpex.wire.pickling import Bytes

MB = 1 << 20


def filled(nbytes: int, value: int = 1) -> Bytes:
    return np.full(nbytes, value, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, MB - 1, MB, 3 * MB + 1])
def test_a_copy_is_its_own(nbytes: int) -> None:
    pool = MemoryPool()
    for value in range(3):
        source = filled(nbytes, value)
        copy = pool.copy(source)
        source += 1
        assert copy.nbytes == nbytes
        assert (copy == value).all()
        del copy
    assert pool.idle_bytes == (nbytes if nbytes >= MB else 0)


def test_memory_serves_again_when_nobody_has_it() -> None:
    pool = MemoryPool()
    first = pool.copy(filled(2 * MB))
    second = pool.copy(filled(2 * MB, 2))
    place = address_of(first)
    assert address_of(second) != place
    del first
    assert pool.idle_bytes == 2 * MB
    third = pool.copy(filled(2 * MB, 3))
    assert address_of(third) == place
    assert pool.idle_bytes == 0
    assert (second == 2).all()


VIEWS: dict[str, Callable[[Bytes], Any]] = {
    "slice": lambda copy: copy[MB:],
    "slice of a slice": lambda copy: copy[:][1:][MB - 1 :],
    "other dtype": lambda copy: copy.view(np.float32)[MB // 4 :],
    "other shape": lambda copy: copy.reshape(2, MB)[1],
    "subclass": lambda copy: copy.view(np.recarray)[MB:],
    "frombuffer": lambda copy: np.frombuffer(copy, dtype=np.float32)[MB // 4 :],
    "asarray": lambda copy: np.asarray(memoryview(copy))[MB:],
    "memoryview": lambda copy: memoryview(copy)[MB:],
    "Arrow": lambda copy: pa.py_buffer(copy)[MB:],
    "tensor": lambda copy: torch.as_tensor(copy)[MB:].numpy(),
    "storage": lambda copy: torch.as_tensor(copy).untyped_storage()[MB:],
    "tensor's array": lambda copy: torch.as_tensor(copy).numpy().reshape(2, MB)[1:][0],
    "DLPack": lambda copy: np.from_dlpack(torch.as_tensor(copy))[MB:],
    "unpickled": lambda copy: pickle.loads(
        pickle.dumps(copy, protocol=5, buffer_callback=lambda _: None), buffers=[copy]
    )[MB:],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_whoever_has_a_view_has_the_memory(kind: str) -> None:
    pool = MemoryPool()
    view = VIEWS[kind](pool.copy(filled(2 * MB)))
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.copy(filled(2 * MB, 2))
    assert bytes(view) == b"\1" * MB
    del view
    gc.collect()
    assert pool.idle_bytes == 2 * MB
    assert (other == 2).all()


@pytest.mark.parametrize(
    ("nbytes", "serves"), [(8 * MB, True), (7 * MB, True), (8 * MB + 1, False), (6 * MB, False)]
)
def test_what_is_a_little_smaller_goes_there_too(nbytes: int, serves: bool) -> None:
    pool = MemoryPool()
    for size in (8 * MB, nbytes):
        copy = pool.copy(filled(size))
        assert copy.nbytes == size
        kept = pool.idle_bytes
        del copy
    assert kept == (0 if serves else 8 * MB)


def test_no_more_is_kept_than_was_said_but_for_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "IDLE_BYTES", 8 * MB)
    pool = MemoryPool()
    copies = [pool.copy(filled(3 * MB)) for _ in range(5)]
    copies.clear()
    assert pool.idle_bytes == 6 * MB
    large = pool.copy(filled(20 * MB))
    del large
    assert pool.idle_bytes == 20 * MB
    small = pool.copy(filled(MB))
    del small
    assert pool.idle_bytes == MB


def test_threads_never_share_memory() -> None:
    pool = MemoryPool()
    begin = threading.Barrier(4)

    def work(number: int) -> bool:
        begin.wait()
        whole = True
        for step in range(200):
            value = (number * 50 + step) % 251
            copy = pool.copy(filled(MB, value))
            whole &= bool((copy == value).all())
        return whole

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


class LargeSamples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((MB // 2,), float(index))


@pytest.mark.parametrize("keep_every", [1, 5, 100])
def test_a_loaders_batches_are_whole_as_long_as_somebody_has_them(
    shared_ray: Connection, keep_every: int
) -> None:
    loader = DpexDataLoader(LargeSamples(), batch_size=4, num_workers=2, distribute_mode=True)
    kept: dict[int, torch.Tensor] = {}
    places = set()
    for epoch in range(3):
        for number, batch in enumerate(loader):
            places.add(batch.data_ptr())
            if number % keep_every == 0:
                kept[epoch * 12 + number] = batch
    expected = list(DataLoader(LargeSamples(), batch_size=4))
    for number, batch in kept.items():
        assert torch.equal(batch, expected[number % 12])
    # The pool reuses memory unless the loop keeps every batch.
    assert (len(places) < 36) == (keep_every > 1)
