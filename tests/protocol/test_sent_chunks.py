"""Tests of the chunks in flight, and of the batches that have not arrived."""

from __future__ import annotations

from typing import Any

from chunks import RUN, sent

from dpex.protocol.chunks import Chunk, Entry, Part
from dpex.protocol.sent_chunks import Attempt, SentChunks, joined_streams


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


def in_flight(*chunks: Chunk) -> SentChunks:
    flight = SentChunks()
    flight.add(flight.numbered(chunks, RUN), Attempt())
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


def test_the_end_of_a_stream_ends_its_later_chunks_and_no_other_stream() -> None:
    later = [sent(n, first, 2, stream=True).chunk for n, first in ((0, 0), (1, 1), (2, 6))]
    flight = in_flight(*later)
    end = entries(3, outcome="end")
    assert flight.arrive(0, [*entries(0), *end]) == [*entries(0), *end]
    assert flight.arrive(2, entries(6)) is None
    assert [sorted(chunk.missing) for chunk in flight.take()] == [[1, 4]]


def test_the_batches_of_a_loss_leave_their_chunk_and_the_others_stay() -> None:
    flight = in_flight(sent(0, 0, 4).chunk, sent(1, 1, 1).chunk)
    flight.arrive(0, entries(0))
    lost = flight.lose(Part("run", 0, (0, 6)))
    assert lost is not None
    assert lost.missing == {6}
    assert flight.arrive(0, entries(3, 6)) == entries(3), "a block of lost batches may still come"
    rest = flight.lose(Part("run", 0))
    assert rest is not None
    assert rest.missing == {9}
    assert flight.arrive(0, entries(9)) is None
    assert [sorted(chunk.missing) for chunk in flight.take()] == [[1]]


def test_a_loss_of_batches_that_have_arrived_is_none() -> None:
    flight = in_flight(sent(0, 0, 2).chunk)
    flight.arrive(0, entries(0))
    assert flight.lose(Part("run", 0, (0,))) is None
    assert flight.lose(Part("run", 7)) is None
    assert flight.arrive(0, entries(3)) == entries(3)
    assert flight.lose(Part("run", 0)) is None


def test_one_task_at_a_time_runs_until_the_chunks_that_did_not_fit_have_arrived() -> None:
    flight = in_flight(sent(0, 0, 1).chunk)
    flight.add(flight.numbered([sent(0, 1, 1).chunk], RUN), Attempt(alone=True, one_by_one=True))
    assert flight.one_by_one
    flight.arrive(1, entries(1))
    assert not flight.one_by_one
