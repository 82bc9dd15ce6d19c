"""The chunks that are sent a second time, because batches of theirs have not arrived."""

from __future__ import annotations

from typing import Any

import torch

from dpex.training.in_flight import ChunkInFlight, joined_streams
from dpex.worker.logical_worker import Run
from dpex.worker.map_style import Chunk
from dpex.worker.training_settings import Settings

RUN = Run("run", "loader", 7, 0, 3, 0, Settings(".", torch.float32))


def sent(number: int, first: int, batches: int, **how: Any) -> ChunkInFlight:
    indices = [[batch] for batch in range(batches)]
    return ChunkInFlight(Chunk(RUN, number, first, indices, list(range(batches)), **how), False, 1)


def test_the_rest_of_a_chunk_is_what_has_not_arrived() -> None:
    chunk = sent(0, 1, 5)
    chunk.missing -= {7}
    rest = [(part.first_batch, part.batches, part.positions) for part in chunk.rest()]
    assert rest == [(1, [[0], [1]], [0, 1]), (10, [[3], [4]], [3, 4])]
    alone = [list(part.numbers) for part in chunk.rest(most=1)]
    assert alone == [[1], [4], [10], [13]]


def test_chunks_of_one_stream_are_joined() -> None:
    lost = [sent(0, 0, 2, stream=True), sent(1, 1, 1, stream=True), sent(2, 6, 2, stream=True)]
    joined = joined_streams(lost)
    assert [(s.chunk.worker, sorted(s.missing)) for s in joined] == [(0, [0, 3, 6, 9]), (1, [1])]


def test_other_chunks_of_one_logical_worker_are_not() -> None:
    lost = [sent(0, 0, 2), sent(1, 6, 2)]
    assert joined_streams(lost) == lost
