"""Tests of the decoding of blocks: a closed decoder unpickles nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dpex.protocol.chunks import Entry
from dpex.wire.arrivals import Decoder
from dpex.wire.block_format import Block, BlockWriter
from dpex.wire.machine import machine
from dpex.wire.segments import SegmentPool
from dpex.wire.timings import Costs
from dpex.worker.map_style import encode

loaded: list[int] = []
at_load: list[Callable[[], None]] = []


class Batch:
    """A batch that records when it is unpickled."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensor = torch.full((1 << 20,), float(number))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        loaded.append(self.number)
        for call in at_load:
            call()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    loaded.clear()
    at_load.clear()


def block_of(batches: int, segments: SegmentPool | None = None) -> Block:
    writer = BlockWriter("run", 0, segments=segments)
    for number in range(batches):
        writer.add(Entry(number, encode(Batch(number)), "batch"), Costs())
    return writer.block()


def test_an_open_decoder_unpickles_all_batches_of_its_run() -> None:
    arrival = Decoder("run", None)(block_of(3))
    assert [entry.value.number for entry in arrival.batches] == loaded == [0, 1, 2]
    assert Decoder("another", None)(block_of(3)).batches == []
    assert loaded == [0, 1, 2]


def test_a_closed_decoder_unpickles_nothing() -> None:
    decoder = Decoder("run", None)
    decoder.close()
    assert decoder(block_of(3)).batches == []
    assert loaded == []


def test_a_decoder_that_is_closed_during_a_block_ends_after_its_batch() -> None:
    pool = SegmentPool()
    pool.serve("pipeline", "run", machine())
    decoder = Decoder("run", None)
    at_load.append(decoder.close)
    arrival = decoder(block_of(3, pool))
    assert arrival.batches == []
    assert loaded == [0]
    # The batch that nobody gets is freed, so its segment is free.
    place = pool.place(torch.zeros(1 << 22, dtype=torch.uint8).numpy())
    assert place is not None
    assert place.use == 2
