"""Tests of the chunks of a logical worker that has a process of its own."""

from __future__ import annotations

from dpex import tuning
from dpex.protocol.chunks import AssignedChunk, Part, PickledChunk
from dpex.protocol.worker_queue import WorkerQueue


def chunk(number: int, *, resent: bool = False, size: int = 1) -> PickledChunk:
    payload = str(number).encode().ljust(size)
    return PickledChunk(payload, 0, Part("run", number), resent=resent)


def number_of(assigned: AssignedChunk | None) -> int | None:
    return None if assigned is None else int(assigned.payload)


def queue_with(*chunks: PickledChunk, started: bool = True) -> WorkerQueue:
    queue = WorkerQueue()
    queue.begin()
    for one in chunks:
        queue.feed(one)
    if started:
        queue.note_start()
    return queue


def test_a_process_gets_a_chunk_for_each_request() -> None:
    queue = queue_with(chunk(0), chunk(1), chunk(2))
    assert number_of(queue.next()) == 0
    assert queue.next() is None, "the process has not asked again"
    queue.note_request()
    assert number_of(queue.next()) == 1, "it asks while it makes the last samples of chunk 0"
    queue.note_chunk_ended()
    queue.note_chunk_ended()
    assert queue.next() is None
    queue.note_request()
    assert number_of(queue.next()) == 2


def test_a_request_waits_for_a_chunk() -> None:
    queue = queue_with()
    assert queue.next() is None
    queue.feed(chunk(0))
    assert number_of(queue.next()) == 0


def test_a_small_chunk_need_not_wait_for_the_start() -> None:
    assert number_of(queue_with(chunk(0), started=False).next()) == 0


def test_a_large_chunk_waits_until_the_process_reads() -> None:
    large = tuning.EARLY_CHUNK_BYTES + 1
    queue = queue_with(chunk(0, size=large), chunk(1, size=large), started=False)
    assert queue.next() is None
    queue.note_start()
    assert number_of(queue.next()) == 0
    queue.note_request()
    assert queue.next() is None
    queue.note_chunk_ended()
    assert number_of(queue.next()) == 1


def test_a_process_that_has_a_chunk_at_its_start_does_not_read() -> None:
    large = tuning.EARLY_CHUNK_BYTES + 1
    queue = queue_with(chunk(0), chunk(1, size=large), started=False)
    assert number_of(queue.next()) == 0
    queue.note_start()
    queue.note_request()
    assert queue.next() is None


def test_what_a_dead_process_had_is_made_again_in_order() -> None:
    queue = queue_with(chunk(0), chunk(1), chunk(2))
    queue.next()
    queue.note_request()
    queue.next()
    assert queue.note_death("killed") is None
    first = queue.next()
    assert number_of(first) == 0
    assert first is not None
    assert first.again
    assert first.restarted
    assert first.place == 0
    queue.note_request()
    second = queue.next()
    assert number_of(second) == 1
    assert second is not None
    assert not second.again, "no process has begun it"
    assert not second.restarted
    queue.note_request()
    assert number_of(queue.next()) == 2


def test_an_idle_process_that_dies_loses_no_chunk_but_its_state() -> None:
    queue = queue_with(chunk(0))
    queue.next()
    queue.note_request()
    queue.note_chunk_ended()
    assert queue.note_death("killed") is None
    queue.feed(chunk(1))
    assigned = queue.next()
    assert assigned is not None
    assert assigned.restarted
    assert not assigned.again


def test_a_process_that_dies_before_its_first_chunk_loses_no_state() -> None:
    queue = queue_with()
    queue.note_death("killed")
    queue.feed(chunk(0))
    assigned = queue.next()
    assert assigned is not None
    assert not assigned.restarted


def test_a_chunk_that_kills_its_processes_is_lost() -> None:
    queue = queue_with(chunk(0), chunk(1))
    for _ in range(tuning.MAX_DEATHS - 1):
        assert number_of(queue.next()) == 0
        assert queue.note_death("worker process 7 was killed by SIGKILL") is None
    assert number_of(queue.next()) == 0
    loss = queue.note_death("worker process 7 was killed by SIGKILL")
    assert loss is not None
    assert loss.part == Part("run", 0)
    assert "worker process 7 was killed by SIGKILL" in loss.text
    assert number_of(queue.next()) == 1
    queue.feed(chunk(2))
    queue.feed(chunk(0, resent=True))
    queue.note_request()
    assert number_of(queue.next()) == 0, "the training loop waits for it"


def test_nothing_is_made_again_for_an_iteration_that_has_ended() -> None:
    queue = queue_with(chunk(0), chunk(1))
    queue.next()
    queue.end()
    assert queue.note_death("killed") is None
    assert queue.next() is None
    queue.begin()
    queue.feed(chunk(2))
    assigned = queue.next()
    assert assigned is not None
    assert (number_of(assigned), assigned.iteration) == (2, 2)


def test_a_chunk_of_the_next_iteration_waits_for_the_present_sample() -> None:
    large = tuning.EARLY_CHUNK_BYTES + 1
    queue = queue_with(chunk(0))
    queue.next()
    queue.end()
    queue.begin()
    queue.feed(chunk(1, size=large))
    queue.note_request()
    assert queue.next() is None
    queue.note_chunk_ended()
    assert number_of(queue.next()) == 1
