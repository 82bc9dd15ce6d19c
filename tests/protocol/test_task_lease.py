"""Tests of the states of a task lease."""

from __future__ import annotations

import copy

import pytest

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Part, PickledChunk
from dpex.protocol.task_lease import DeadlyChunkError, LeaseState, TaskLease
from dpex.tuning import MAX_DEATHS

RELEASED = Binding.RELEASED


def new_lease() -> TaskLease:
    return TaskLease("task", "process", began=0.0)


def give(lease: TaskLease, payload: bytes, *, worker: int = 0, alone: bool = False) -> None:
    lease.give(PickledChunk(payload, worker, Part(payload.decode(), 0), alone), run=0)


def ask(lease: TaskLease, place: int = 1, *, made: int = 0, attempt: str = "process") -> None:
    lease.note_request(attempt, place, made, early=False)
    lease.ask()


def test_a_lease_waits_works_and_ends() -> None:
    lease = new_lease()
    seen = [lease.state]
    give(lease, b"0")
    seen.append(lease.state)
    ask(lease)
    seen.append(lease.state)
    lease.end()
    seen.append(lease.state)
    assert seen == [
        LeaseState.WAITING,
        LeaseState.WORKING,
        LeaseState.WAITING,
        LeaseState.ENDED,
    ]


@pytest.mark.parametrize("state", list(LeaseState))
def test_each_state_has_one_meaning(state: LeaseState) -> None:
    lease = new_lease()
    lease._enter(state)
    assert lease.waiting is (state is LeaseState.WAITING)
    assert lease.busy is (state in {LeaseState.WORKING, LeaseState.REPEATING})
    assert lease.ended is (state in {LeaseState.ENDED, LeaseState.REPEATING})
    assert not (lease.waiting and (lease.busy or lease.ended))


@pytest.mark.parametrize("ended", [False, True])
def test_a_restarted_task_repeats_its_chunk_and_ends_only_if_it_had_ended(ended: bool) -> None:
    lease = new_lease()
    give(lease, b"0")
    if ended:
        ask(lease)
        lease.end()
    assert lease.repeat(0, RELEASED) == AssignedChunk(b"0", 0, RELEASED, again=True)
    assert lease.state is (LeaseState.REPEATING if ended else LeaseState.WORKING)
    ask(lease)
    assert lease.state is (LeaseState.ENDED if ended else LeaseState.WAITING)


def test_a_chunk_that_kills_its_processes_ends_the_lease() -> None:
    lease = new_lease()
    give(lease, b"0")
    ask(lease, 0, made=3)
    for _ in range(MAX_DEATHS - 1):
        lease.repeat(0, RELEASED)
    with pytest.raises(
        DeadlyChunkError, match=rf"died {MAX_DEATHS} times in a row\. Ray's"
    ) as info:
        lease.repeat(0, RELEASED)
    assert info.value.parts == [Part("0", 0)]
    assert lease.state is LeaseState.ENDED


def test_a_new_chunk_forgets_the_deaths_on_the_last_one() -> None:
    lease = new_lease()
    for payload in (b"0", b"1"):
        give(lease, payload)
        for _ in range(MAX_DEATHS - 1):
            lease.repeat(0, RELEASED)
        ask(lease)
    assert lease.waiting


def test_an_early_request_keeps_the_deaths_until_the_last_sample_is_made() -> None:
    lease = new_lease()
    give(lease, b"0")
    for _ in range(MAX_DEATHS - 1):
        lease.repeat(0, RELEASED)
    lease.begin_repeat()
    lease.note_request("process", 1, 1, early=True)
    lease.ask()
    give(lease, b"1")
    with pytest.raises(DeadlyChunkError):
        copy.deepcopy(lease).repeat(0, RELEASED)
    lease.finish(1)
    lease.repeat(0, RELEASED)


def test_a_lease_gives_back_the_chunks_of_one_iteration_and_repeats_none_of_them() -> None:
    lease = new_lease()
    for run in (1, 2):
        lease.give(PickledChunk(b"%d" % run, 0, Part(str(run), 0)), run)
    ask(lease, 2)
    lease.note_request("second process", 0, 0, early=False)
    lease.repeat(0, RELEASED)
    given_back = lease.give_back(run=2)
    assert [(chunk.payload, chunk.resent) for chunk in given_back] == [(b"2", True)]
    assert lease.state is LeaseState.ENDED
    assert lease.given == 0
    assert lease.held == set()


def give_bound(lease: TaskLease, worker: int) -> AssignedChunk:
    """Give a chunk of a logical worker that is bound to the lease."""
    lease.workers.add(worker)
    lease.give(PickledChunk(b"", worker, Part("run", 0)), run=1)
    return lease.last_chunk(Binding.ALWAYS)


def request(lease: TaskLease, place: int, made: int, attempt: str = "process") -> None:
    lease.note_request(attempt, place, made, early=False)
    lease.ask()


def test_a_state_that_starts_again_is_reported_once() -> None:
    lease = new_lease()
    lease.restarted = {0}
    assert give_bound(lease, 0).restarted
    request(lease, 1, made=1)
    assert not give_bound(lease, 0).restarted


def test_a_chunk_that_is_cancelled_before_its_first_batch_reports_nothing() -> None:
    lease = new_lease()
    lease.restarted = {0}
    assert give_bound(lease, 0).restarted
    request(lease, 1, made=0)
    assert give_bound(lease, 0).restarted


def test_a_restarted_task_reports_each_logical_worker_that_starts_again() -> None:
    lease = new_lease()
    for place, worker in enumerate((0, 1, 2), 1):
        assert not give_bound(lease, worker).restarted
        request(lease, place, made=place)
    lease.unbind(1)
    reported = []
    request(lease, 0, made=0, attempt="another process")
    for place, made in ((0, 0), (2, 2)):
        again = lease.repeat(place, Binding.ALWAYS)
        lease.begin_repeat()
        reported.append(again.restarted)
        request(lease, again.place + 1, made + 1 + again.skipped_blocks, "another process")
    assert reported == [False, True], "only logical worker 2 is bound to the task"
    assert give_bound(lease, 0).restarted
    request(lease, 4, made=4, attempt="another process")
    assert not give_bound(lease, 0).restarted


def test_a_call_of_an_earlier_process_is_known() -> None:
    lease = new_lease()
    ask(lease, 0)
    assert not lease.is_past("process")
    ask(lease, 0, attempt="another")
    assert lease.is_past("process")
    assert not lease.is_past("another")
