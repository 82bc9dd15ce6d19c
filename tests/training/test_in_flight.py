"""Tests of the chunks in flight, and of the batches that have not arrived."""

from __future__ import annotations

from typing import Any

from chunks import RUN, sent

from dpex.training.in_flight import InFlight, joined_streams
from dpex.wire.block_format import Entry
from dpex.wire.loss_causes import Loss, LossCause
from dpex.worker.map_style import Chunk

DIED = Loss(LossCause.TASK, "died")


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


def test_chunks_of_one_stream_are_not_joined_across_a_gap() -> None:
    lost = [sent(0, 0, 2, stream=True), sent(2, 12, 2, stream=True), sent(3, 18, 1, stream=True)]
    rest = [list(part.numbers) for chunk in joined_streams(lost) for part in chunk.rest()]
    assert rest == [[0, 3], [12, 15, 18]]


def test_other_chunks_of_one_logical_worker_are_not() -> None:
    lost = [sent(0, 0, 2), sent(1, 6, 2)]
    assert joined_streams(lost) == lost


def in_flight(*chunks: Chunk) -> InFlight:
    flight = InFlight()
    flight.add(flight.numbered(chunks, RUN), alone=False, tries=1)
    return flight


def entries(*batches: int, outcome: Any = "batch") -> list[Entry]:
    return [Entry(batch, None, outcome) for batch in batches]


def test_a_batch_arrives_once() -> None:
    flight = in_flight(sent(0, 0, 3).chunk)
    assert flight.arrive(0, entries(0, 3)) == entries(0, 3)
    assert flight.arrive(0, entries(3, 6)) == entries(6)
    assert flight.arrive(0, entries(6)) is None
    assert not flight


def test_the_end_of_a_stream_may_overtake_its_last_batches() -> None:
    flight = in_flight(sent(0, 0, 4, stream=True).chunk)
    end = entries(6, outcome="end")
    assert flight.arrive(0, end) == end
    assert flight.arrive(0, entries(3)) == entries(3)
    assert flight.arrive(0, [*entries(0), *end]) == [*entries(0), *end]
    assert not flight


def test_the_end_of_a_stream_ends_its_chunk() -> None:
    flight = in_flight(sent(0, 0, 3, stream=True).chunk)
    end = entries(3, outcome="end")
    assert flight.arrive(0, [*entries(0), *end]) == [*entries(0), *end]
    assert not flight


def test_chunks_are_lost_once_all_of_them_are_done_without_their_batches() -> None:
    flight = in_flight(sent(0, 0, 1).chunk, sent(0, 1, 1).chunk)
    flight.arrive(0, entries(0))
    assert not flight.lost(quiet_at=1)
    assert flight.lost(quiet_at=2)
    assert [sorted(chunk.missing) for chunk in flight.take()] == [[1]]
    assert not flight.lost(quiet_at=2)


def test_after_an_error_nothing_is_sent_until_all_has_arrived() -> None:
    flight = in_flight(sent(0, 0, 2).chunk)
    flight.note_losses([DIED])
    flight.settle()
    assert flight.draining
    flight.arrive(0, entries(0, 3))
    flight.settle()
    assert not flight.draining
    assert flight.losses == [DIED]  # kept until a later chunk arrives


def test_losses_are_forgotten_once_a_later_chunk_has_arrived() -> None:
    flight = in_flight(sent(0, 0, 1).chunk)
    flight.note_losses([DIED])
    flight.arrive(0, entries(0))
    flight.settle()
    flight.add(flight.numbered([sent(0, 1, 1).chunk], RUN), alone=False, tries=1)
    flight.arrive(1, entries(1))
    flight.settle()
    assert flight.losses == []
