"""Tests of which batches are requested together, and of the order in which they are delivered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chunks

from dpex.protocol.batch_order import IndexOrder, StreamOrder
from dpex.protocol.chunk_sizes import ChunkPlanner
from dpex.protocol.chunks import Chunk, Entry

WORKERS = 2
RUN = replace(chunks.RUN, num_workers=WORKERS)


class Streams:
    """The indices of streams that start at their first batch."""

    def __init__(self) -> None:
        self.epoch = self
        self.states: list[tuple[int, bytes | None]] = []

    def next_request(self) -> tuple[None, None]:
        return None, None

    def begin_streams(self, workers: int) -> tuple[list[int], list[None]]:
        return [0] * workers, [None] * workers

    def deliver_stream(self, worker: int, _: int, state: bytes | None) -> None:
        self.states.append((worker, state))

    def end_stream(self, worker: int, state: bytes | None) -> None:
        pass


def test_each_stream_stays_in_order_if_batches_may_come_in_any_order() -> None:
    """Otherwise the state after the last delivered batch would not be the stream's state."""
    streams: Any = Streams()
    planner = ChunkPlanner(num_workers=WORKERS, prefetch_factor=4, prefetch_bytes=0)
    planner.begin(free_cores=WORKERS)
    order = StreamOrder(streams, planner, run=RUN)
    order.fill(lambda _: None)
    order.end_stream(6)
    entries = {batch: Entry(batch, None, state=str(batch).encode()) for batch in (2, 4)}
    assert order.choose(entries, in_order=False) is None
    entries |= {batch: Entry(batch, None, state=str(batch).encode()) for batch in (1, 3)}
    found = []
    while (batch := order.choose(entries, in_order=False)) is not None:
        found.append(batch)
        order.deliver(entries.pop(batch))
    assert found == [1, 3]
    assert streams.states == [(1, b"1"), (1, b"3")]
    entries[0] = Entry(0, None)
    assert order.choose(entries, in_order=True) == 0
    assert order.choose(entries, in_order=False) == 0


class Indices:
    """Indices of an endless epoch, each its own batch."""

    position = 0

    def __init__(self) -> None:
        self.epoch = self
        self.batches = 0

    def __next__(self) -> list[int]:
        return [0]


def test_chunks_of_one_round_differ_so_that_tasks_do_not_end_together() -> None:
    workers = 16
    planner = ChunkPlanner(num_workers=workers, prefetch_factor=2, prefetch_bytes=1 << 30)
    planner.begin(free_cores=workers)
    planner.observe(batches=1, seconds=0.001, cpu_seconds=0.001, size_bytes=1)
    run = replace(chunks.RUN, num_workers=workers)
    indices: Any = Indices()
    order = IndexOrder(indices, planner, run=run, length=None, patient=True)
    sent: list[Chunk] = []
    order.fill(sent.append)
    while order.prefetch_chunk(sent.append, lambda: False):
        pass
    lengths: dict[int, list[int]] = {}
    for chunk in sent:
        lengths.setdefault(chunk.worker, []).append(len(chunk.batches))
    # The first batches are requested at once, as in torch. The limit of the window is 21 batches.
    settled = {sizes[-1] for sizes in lengths.values()}
    assert len(settled) >= 5
    assert max(settled) <= 21
