"""Tests of the scheduler: which task gets which chunk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import played_scheduler
import pytest
from played_scheduler import PlayedScheduler

from dpex import tuning
from dpex.carriers.ray import task_requests
from dpex.carriers.ray.fair_share import FairShare
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Part, PickledChunk, Replaced
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.protocol.scheduler import OtherJobs
from dpex.tuning import MAX_DEATHS

Scenario = Callable[[PlayedScheduler], Awaitable[None]]

SECONDS = 10
BOUND: dict[str, Any] = {"binding": Binding.ALWAYS, "num_workers": 4}


lost: list[Loss] = []
"""The losses that the scheduler of the present scenario has reported."""


def play(scenario: Scenario, **options: Any) -> None:
    lost.clear()

    async def run() -> None:
        scheduler = PlayedScheduler(lost.append, **options)
        scheduler.limit(parallel=4, starting=4)
        await scenario(scheduler)

    asyncio.run(asyncio.wait_for(run(), 3 * SECONDS))


def feed_one(
    scheduler: PlayedScheduler, payload: bytes, worker: int = 0, *, alone: bool = False
) -> None:
    """Feed a chunk, which its losses name by its payload."""
    part = Part(payload.decode(), 0)
    scheduler.feed(PickledChunk(payload, worker, part, alone=alone, resent=alone))


def feed(scheduler: PlayedScheduler, *payloads: bytes, alone: bool = False) -> None:
    for worker, payload in enumerate(payloads):
        feed_one(scheduler, payload, worker, alone=alone)


def lost_payloads() -> list[str]:
    return [loss.part.run for loss in lost if loss.part is not None]


async def waits(scheduler: PlayedScheduler, *request: Any, early: bool = False) -> bool:
    """Return whether a task has to wait for its next chunk."""
    asking = asyncio.ensure_future(scheduler.next_chunk(*request, early=early))
    await asyncio.sleep(0)
    waiting = not asking.done()
    asking.cancel()
    return waiting


async def answers() -> None:
    """Let the requests return whose answer is known."""
    for _ in range(5):
        await asyncio.sleep(0)


def payload_of(assignment: AssignedChunk | None) -> bytes | None:
    return None if assignment is None else assignment.payload


def test_who_asks_first_gets_the_first_chunk() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0"
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1"
        assert scheduler.has_work
        waiting = [
            asyncio.ensure_future(scheduler.next_chunk("b", 1, 1)),
            asyncio.ensure_future(scheduler.next_chunk("a", 1, 1)),
        ]
        await asyncio.sleep(0)
        assert not scheduler.has_work
        feed(scheduler, b"2", b"3")
        assert [payload_of(answer) for answer in await asyncio.gather(*waiting)] == [b"2", b"3"]

    play(scenario)


@pytest.mark.parametrize("again", [1, 2])
def test_a_task_that_begins_again_redoes_what_may_be_lost(again: int) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1", b"2", b"3")
        for place, blocks in enumerate([0, 3, 5]):
            await scheduler.next_chunk("a", place, blocks)
        for _ in range(again):
            redone = await scheduler.next_chunk("a", 0, 0)
            assert redone == AssignedChunk(b"1", place=1, again=True, skipped_blocks=3)
            # The restarted task has made more blocks of this chunk than before.
            redone = await scheduler.next_chunk("a", 2, 9)
            assert redone == AssignedChunk(b"2", place=2, again=True, skipped_blocks=0)
        assert await scheduler.next_chunk("a", 3, 12) == AssignedChunk(b"3", place=3)
        redone = await scheduler.next_chunk("a", 0, 0)
        assert redone == AssignedChunk(b"2", place=2, again=True, skipped_blocks=9)

    play(scenario)


def test_a_task_is_not_begun_for_ever() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        async def begin(times: int) -> None:
            for _ in range(times):
                assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0"

        feed(scheduler, b"0", b"1", b"2")
        await begin(MAX_DEATHS)
        assert payload_of(await scheduler.next_chunk("a", 1, 1)) == b"1"  # the task makes progress
        await begin(MAX_DEATHS - 1)
        assert await scheduler.next_chunk("a", 0, 0) is None
        assert lost_payloads() == ["0", "1"], "each may have killed the process"
        assert "died 4 times in a row" in lost[0].text
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"2"
        assert scheduler.has_work
        assert await waits(scheduler, "b", 1, 0)

    play(scenario)


def test_a_task_that_begins_again_takes_its_place_among_those_that_wait() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        await scheduler.next_chunk("a", 0, 0)
        of_the_dead = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1))
        await asyncio.sleep(0)
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0"
        feed_one(scheduler, b"1", 1)  # only the dead process waits for it
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1"
        feed(scheduler, b"2")
        assert payload_of(await scheduler.next_chunk("a", 1, 2)) == b"2"
        of_the_dead.cancel()

    play(scenario)


def test_a_chunk_that_is_to_be_alone_is_alone() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0"
        feed(scheduler, b"1", alone=True)
        assert await scheduler.next_chunk("a", 1, 1) is None
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1"
        feed(scheduler, b"2")
        assert await scheduler.next_chunk("b", 1, 1) is None
        assert payload_of(await scheduler.next_chunk("c", 0, 0)) == b"2"

    play(scenario)


@pytest.mark.parametrize("options", [{"claims_cpus": True}, {"holds_resources": True}])
def test_a_task_soon_gives_back_what_other_tasks_may_want(options: dict[str, bool]) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        assert await scheduler.next_chunk("a", 0, 0) is None

    play(scenario, **options)


def test_a_task_waits_longer_where_no_other_task_wants_its_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "IDLE_S", 0.01)

    async def scenario(scheduler: PlayedScheduler) -> None:
        asking = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0))
        await asyncio.wait([asking], timeout=10 * tuning.IDLE_S)
        assert not asking.done()
        monkeypatch.setattr(scheduler.scheduler, "_patience_s", 0.0)
        assert await asking is None

    play(scenario)


def test_a_task_that_waits_ends_with_its_pipeline() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.begin(in_run=False)
        between_runs = asyncio.ensure_future(scheduler.next_chunk("b", 0, 0))
        await asyncio.sleep(0)
        scheduler.close()
        assert await between_runs is None
        assert await scheduler.next_chunk("c", 0, 0) is None

    play(scenario)


def test_an_iteration_that_begins_waits_for_no_task_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "LEASE_S", 0.0)

    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.begin(in_run=True)
        feed(scheduler, b"0")
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0"
        waiting = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1))
        await asyncio.sleep(0)
        scheduler.begin(in_run=False)
        scheduler.begin(in_run=True)
        feed(scheduler, b"1", b"2")
        assert payload_of(await waiting) == b"1"
        assert await scheduler.next_chunk("a", 2, 2) is None
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"2"

    play(scenario, claims_cpus=True)


def test_as_many_tasks_are_wanted_as_chunks_wait() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        assert scheduler.new_tasks() == 0
        feed(scheduler, b"0", b"1")
        assert scheduler.new_tasks() == 2
        assert scheduler.new_tasks() == 0  # the new tasks have not asked yet
        await scheduler.next_chunk("a", 0, 0)
        assert scheduler.new_tasks() == 0
        await scheduler.next_chunk("b", 0, 0)
        feed(scheduler, *[b"more"] * 9)
        assert scheduler.new_tasks() == 2  # at most four tasks work at once

    play(scenario)


@pytest.mark.parametrize("binding", [Binding.WATCHED, Binding.RELEASED])
def test_a_task_may_wait_for_the_first_chunk(binding: Binding) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        prepared = asyncio.ensure_future(scheduler.start_task())
        await asyncio.sleep(0)
        assert scheduler.new_tasks() == 1
        assert scheduler.new_tasks() == 0
        assert not prepared.done()
        asking = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0))
        await asyncio.wait_for(prepared, SECONDS)
        await asyncio.wait_for(scheduler.start_task(), SECONDS)
        assert scheduler.new_tasks() == 0, "one waits already"
        assert not asking.done()
        feed(scheduler, b"0")
        assert payload_of(await asking) == b"0"

    play(scenario, binding=binding, num_workers=4)


def test_a_task_that_starts_with_the_pipeline_is_the_one_that_waits() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        prepared = asyncio.ensure_future(scheduler.start_task())
        await asyncio.sleep(0)
        assert scheduler.new_tasks() == 0
        assert not prepared.done()
        asking = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0))
        await asyncio.wait_for(prepared, SECONDS)
        scheduler.close()
        await asking

    play(scenario, first_tasks=1)


def test_a_task_replaces_one_that_ends_while_it_waits(clock: SimpleNamespace) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        prepared = asyncio.ensure_future(scheduler.start_task())
        asking = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0))
        await asyncio.wait_for(prepared, SECONDS)
        clock.now += tuning.LONG_IDLE_S
        scheduler.note(scheduler.tick)
        assert await asyncio.wait_for(asking, SECONDS) is None
        assert scheduler.new_tasks() == 1

    play(scenario, first_tasks=1)


@pytest.mark.parametrize(
    "end",
    [
        PlayedScheduler.close,
        PlayedScheduler.stop_preparing,
        lambda scheduler: feed(scheduler, b"0"),
    ],
)
def test_no_task_is_awaited_after_the_end_or_the_first_chunk(
    end: Callable[[PlayedScheduler], None],
) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        prepared = asyncio.ensure_future(scheduler.start_task())
        await asyncio.sleep(0)
        end(scheduler)
        await asyncio.wait_for(prepared, SECONDS)

    play(scenario)


def test_no_task_replaces_one_that_ends_after_the_iteration(clock: SimpleNamespace) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        prepared = asyncio.ensure_future(scheduler.start_task())
        asking = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0))
        await asyncio.wait_for(prepared, SECONDS)
        scheduler.begin(in_run=False)
        clock.now += tuning.LONG_IDLE_S
        assert await asyncio.wait_for(asking, SECONDS) is None
        assert scheduler.new_tasks() == 0

    play(scenario, first_tasks=1)


def test_who_starts_the_tasks_may_begin_again() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        assert await scheduler.more_tasks(0) == 2
        assert await scheduler.more_tasks(0) == 2, "its process has died"
        waiting = asyncio.ensure_future(scheduler.more_tasks(2))
        await asyncio.sleep(0)
        assert not waiting.done()
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("b", 0, 0)
        feed_one(scheduler, b"2", 2)
        assert await waiting == 1
        waiting = asyncio.ensure_future(scheduler.more_tasks(3))
        await asyncio.sleep(0)
        scheduler.close()
        assert await waiting is None

    play(scenario)


def test_who_starts_the_tasks_may_end_with_them() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        assert await scheduler.more_tasks(0, until_idle=True) == 1
        assert scheduler.handed_out == 1
        waiting = asyncio.ensure_future(scheduler.more_tasks(1, until_idle=True))
        await scheduler.next_chunk("a", 0, 0)
        await answers()
        assert not waiting.done(), "a task works"
        assert await scheduler.next_chunk("a", 1, 1) is None
        assert await waiting is None
        feed_one(scheduler, b"1")
        assert await scheduler.more_tasks(1, until_idle=True) == 1

    play(scenario, claims_cpus=True)


def finish(scheduler: PlayedScheduler) -> None:
    scheduler.finish("a", "process", 1)


def test_a_task_that_asks_early_is_at_work_until_its_last_sample() -> None:
    """Otherwise the next iteration would give a chunk to a task whose last sample hangs."""

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        await scheduler.next_chunk("a", 0, 0, "process")
        request = scheduler.next_chunk("a", 1, 2, "process", early=True)
        waiting = asyncio.ensure_future(request)
        await asyncio.sleep(0)
        scheduler.begin(in_run=False)
        assert scheduler.has_work
        finish(scheduler)
        assert not scheduler.has_work
        scheduler.begin(in_run=True)
        feed(scheduler, b"1")
        assert payload_of(await waiting) == b"1"

    play(scenario)


def test_the_end_of_the_last_sample_may_overtake_the_request() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        await scheduler.next_chunk("a", 0, 0, "process")
        finish(scheduler)
        waiting = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1, "process", early=True))
        await asyncio.sleep(0)
        assert not scheduler.has_work
        scheduler.close()
        assert await waiting is None

    play(scenario)


def test_a_worker_s_next_chunk_waits_for_the_last_sample_of_a_task_that_asked_early() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        await scheduler.next_chunk("a", 0, 0, "process")
        given = await scheduler.next_chunk("a", 1, 1, "process", early=True)
        assert payload_of(given) == b"1"
        feed(scheduler, b"0 again")
        waiting = asyncio.ensure_future(scheduler.next_chunk("b", 0, 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        finish(scheduler)
        await answers()
        assert waiting.done(), "it does not wait for a later look"
        assert payload_of(await waiting) == b"0 again"

    play(scenario)


def test_a_worker_s_next_chunk_goes_to_a_task_that_waits_when_a_lease_ends() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", alone=True)
        await scheduler.next_chunk("a", 0, 0)
        waiting = asyncio.ensure_future(scheduler.next_chunk("b", 0, 0))
        feed(scheduler, b"0 again")
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await scheduler.next_chunk("a", 1, 1) is None
        await answers()
        assert waiting.done(), "it does not wait for a later look"
        assert payload_of(await waiting) == b"0 again"

    play(scenario)


def test_the_oldest_chunk_is_given_whose_worker_is_free() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1", b"2")
        feed(scheduler, b"0 again", b"1 again")
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0"
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1"
        assert payload_of(await scheduler.next_chunk("a", 1, 1)) == b"2"
        assert payload_of(await scheduler.next_chunk("a", 2, 2)) == b"0 again"
        assert payload_of(await scheduler.next_chunk("b", 1, 1)) == b"1 again"

    play(scenario)


def test_no_task_is_started_for_a_worker_that_has_a_process() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        assert scheduler.new_tasks() == 1
        await scheduler.next_chunk("a", 0, 0)
        feed(scheduler, b"0 again")
        assert scheduler.new_tasks() == 0
        feed(scheduler, b"0", b"1")
        assert scheduler.new_tasks() == 1

    play(scenario)


@pytest.mark.parametrize("early", [False, True])
def test_a_chunk_is_repeated_once_its_worker_is_free_and_before_later_ones(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LOOK_S", 0.0)

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        feed(scheduler, b"0 again")
        for place in range(2):
            await scheduler.next_chunk("a", place, place, "first")
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"0 again"
        repeating = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0, "second"))
        await answers()
        assert not repeating.done(), "another process is worker 0"
        feed(scheduler, b"0 later")
        assert await waits(scheduler, "b", 1, 1, early=early), "the repeated chunk comes first"
        scheduler.finish("b", "", 1)
        given = await repeating
        assert (payload_of(given), given and given.replaced) == (b"0", ("first",))
        assert payload_of(await scheduler.next_chunk("a", 1, 1, "second")) == b"1"

    play(scenario)


def test_a_process_that_is_replaced_while_it_waits_for_a_worker_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "LOOK_S", 0.0)

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        feed(scheduler, b"0 again")
        for place in range(2):
            await scheduler.next_chunk("a", place, place, "first")
        await scheduler.next_chunk("b", 0, 0)
        second = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0, "second"))
        await asyncio.sleep(0)
        third = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0, "third"))
        assert await second == Replaced()
        assert await waits(scheduler, "b", 1, 1)
        assert payload_of(await third) == b"0"

    play(scenario)


def test_a_process_that_dies_after_an_early_request_makes_no_sample() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        await scheduler.next_chunk("a", 0, 0, "first")
        assert await waits(scheduler, "a", 1, 1, "first", early=True)
        assert payload_of(await scheduler.next_chunk("a", 0, 0, "second")) == b"0"
        scheduler.finish("a", "first", 1)
        assert await waits(scheduler, "a", 1, 1, "second")
        assert not scheduler.has_work

    play(scenario)


def test_blocks_made_before_an_iteration_ended_are_skipped_if_the_task_restarts() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        await scheduler.next_chunk("a", 0, 0, "first")
        waiting = asyncio.ensure_future(scheduler.next_chunk("a", 1, 9, "first"))
        await asyncio.sleep(0)
        scheduler.begin(in_run=True)
        feed(scheduler, b"1")
        assert payload_of(await waiting) == b"1"
        assert payload_of(await scheduler.next_chunk("a", 0, 0, "second")) == b"0"
        redone = await scheduler.next_chunk("a", 1, 3, "second")
        assert redone == AssignedChunk(
            b"1", place=1, again=True, skipped_blocks=6, replaced=("first",), iteration=1
        )

    play(scenario)


def test_a_late_call_of_an_earlier_process_gets_no_chunk() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        await scheduler.next_chunk("a", 0, 0, "first")
        assert payload_of(await scheduler.next_chunk("a", 0, 0, "second")) == b"0"
        waiting = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1, "second"))
        await asyncio.sleep(0)
        # It could not be reached for a while, and repeats its call.
        assert await scheduler.next_chunk("a", 1, 1, "first") == Replaced()
        feed(scheduler, b"1")
        assert payload_of(await waiting) == b"1"

    play(scenario)


def test_a_lease_that_is_forgotten_gets_nothing() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        assert await scheduler.next_chunk("unknown", 3, 3) is None
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0"

    play(scenario)


@pytest.mark.parametrize("limited", ["claims_cpus", "holds_resources", "later_stages", ""])
def test_a_lease_ends_after_a_while_if_something_depends_on_it(
    limited: str, clock: SimpleNamespace
) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        await scheduler.next_chunk("a", 0, 0)
        clock.now += 1_000
        assert (await scheduler.next_chunk("a", 1, 1) is None) is bool(limited)

    play(scenario, **({limited: True} if limited else {}))


IN_ACTORS: dict[str, Any] = {"in_actors": True, "holds_resources": True}


def test_an_actor_waits_for_long_only_while_no_other_task_waits(clock: SimpleNamespace) -> None:
    waiting = False

    async def scenario(scheduler: PlayedScheduler) -> None:
        nonlocal waiting
        asking = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0))
        await asyncio.sleep(0)
        clock.now += 2 * tuning.IDLE_S
        scheduler.note(scheduler.tick)
        await answers()
        assert not asking.done(), "its process would end with its lease"
        waiting = True
        scheduler.note(scheduler.tick)
        assert await asking is None

    play(scenario, **IN_ACTORS, somebody_waits=lambda: waiting)


def test_another_job_gets_the_cpu_of_an_actor_that_has_ended(clock: SimpleNamespace) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.limit(parallel=1, starting=1)
        feed(scheduler, *[b"chunk"] * 9)
        assert scheduler.new_tasks() == 1
        await scheduler.next_chunk("a", 0, 0)
        clock.now += tuning.ACTOR_LEASE_S
        assert await scheduler.next_chunk("a", 1, 1) is None
        clock.now += tuning.ACTOR_FREED_S / 2
        assert scheduler.new_tasks() == 0, "the head would start it before the task of another job"
        clock.now += tuning.ACTOR_FREED_S
        assert scheduler.new_tasks() == 1

    play(scenario, **IN_ACTORS)


def test_the_lease_of_an_actor_takes_longer_and_ends_when_no_other_starts(
    clock: SimpleNamespace,
) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, *[b"chunk"] * 9)
        assert scheduler.new_tasks() == 4
        await scheduler.next_chunk("a", 0, 0)
        clock.now += tuning.LEASE_S + 1
        assert await scheduler.next_chunk("a", 1, 1) is not None
        clock.now += tuning.ACTOR_LEASE_S
        assert await scheduler.next_chunk("a", 2, 2) is not None, "the other processes still start"
        for name in ("b", "c", "d"):
            await scheduler.next_chunk(name, 0, 0)
        assert await scheduler.next_chunk("a", 3, 3) is None

    play(scenario, **IN_ACTORS)


def test_a_task_too_many_ends() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1", b"2", b"3")
        assert scheduler.new_tasks() == 4
        for name in ("a", "b", "c"):
            await scheduler.next_chunk(name, 0, 0)
        scheduler.scheduler.parallel = 2
        assert await scheduler.next_chunk("a", 1, 1) is None
        assert scheduler.new_tasks() == 0
        assert payload_of(await scheduler.next_chunk("b", 1, 1)) == b"3"

    play(scenario)


# --- other training jobs on the cluster -----------------------------------------------------------


@pytest.mark.parametrize("binding", [Binding.RELEASED, Binding.WATCHED])
def test_none_is_started_while_those_of_others_wait(binding: Binding) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        feed(scheduler, *[b"chunk"] * 9)
        assert scheduler.new_tasks() == 0
        assert not scheduler.waits
        scheduler.note_others(OtherJobs(wait=False, may_wait=0))
        assert scheduler.new_tasks() == 1
        assert scheduler.waits
        assert scheduler.new_tasks() == 0
        await scheduler.next_chunk("a", 0, 0)
        assert not scheduler.waits
        assert scheduler.new_tasks() == 0  # the job has a task
        scheduler.note_others(OtherJobs(wait=True, may_wait=2))  # some CPUs are free
        assert scheduler.new_tasks() == 2
        assert scheduler.new_tasks() == 0
        scheduler.note_others(None)
        assert scheduler.new_tasks() == 1  # at most four tasks work at once

    play(scenario, binding=binding, num_workers=9)


def test_a_task_that_never_begins_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        assert scheduler.new_tasks() == 1
        assert scheduler.waits
        monkeypatch.setattr(tuning, "HOPELESS_S", 0.0)
        assert not scheduler.waits

    play(scenario)


def test_a_task_lease_is_shorter_if_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "WAITED_FOR_LEASE_S", 0.0)

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, *[b"chunk"] * 9)
        scheduler.note_others(OtherJobs(wait=False, may_wait=1))
        await scheduler.next_chunk("a", 0, 0)
        assert await scheduler.next_chunk("a", 1, 1) is not None
        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        assert await scheduler.next_chunk("a", 2, 2) is None
        assert await scheduler.next_chunk("b", 0, 0) is not None  # every lease gets a chunk

    play(scenario)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the scheduler's clock by an object whose ``now`` is the time in seconds."""
    made = SimpleNamespace(now=100.0)
    for module in (task_requests, played_scheduler):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_a_stream_s_task_lease_ends_for_nobody_but_it_waits_for_others(
    clock: SimpleNamespace,
) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        for worker in (0, 0, 0, 1):
            feed_one(scheduler, b"chunk", worker)
        assert scheduler.new_tasks() == 2
        assert await scheduler.next_chunk("a", 0, 0) is not None  # no logical worker is bound yet

        second = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1))
        clock.now += 4
        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        await asyncio.sleep(0)
        assert not second.done()
        scheduler.note_others(OtherJobs(wait=False, may_wait=0))
        assert await second is not None

        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        third = asyncio.ensure_future(scheduler.next_chunk("a", 2, 2))
        await asyncio.sleep(0)
        assert not third.done()
        clock.now += 6  # longer than one period without chunks
        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        assert await third is not None

    play(scenario, **BOUND)


def test_streams_are_not_held_back_for_a_process_that_starts(clock: SimpleNamespace) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        for _ in range(4):
            feed_one(scheduler, b"chunk", 0)
        assert await scheduler.next_chunk("a", 0, 0) is not None
        scheduler.note_others(OtherJobs(wait=True, may_wait=1))  # a CPU is free
        assert await scheduler.next_chunk("a", 1, 1) is not None
        clock.now += 11  # the other job's task cannot use the free CPU
        scheduler.note_others(OtherJobs(wait=True, may_wait=1))
        third = asyncio.ensure_future(scheduler.next_chunk("a", 2, 2))
        await asyncio.sleep(0)
        assert not third.done()
        scheduler.note_others(None)
        assert await third is not None

    play(scenario, **BOUND)


def test_streams_that_hold_more_than_cpus_are_not_held_back() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed_one(scheduler, b"chunk", 0)
        feed_one(scheduler, b"chunk", 0)
        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        assert await scheduler.next_chunk("a", 0, 0) is not None
        assert await scheduler.next_chunk("a", 1, 1) is not None

    play(scenario, **BOUND, holds_resources=True)


def test_pipeline_actors_learn_of_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "POLL_S", 0.0)
    free = 9.0

    async def scenario() -> None:
        nonlocal free
        notes = FairShare(lambda: free)

        async def ask(name: str, *, waits: bool) -> OtherJobs | None:
            return (await notes.others(name, waits))[0]

        assert await ask("a", waits=True) is None
        assert await ask("b", waits=False) == OtherJobs(wait=True, may_wait=0)
        # The jobs share the lower of the last two counts of free CPUs.
        assert await ask("a", waits=True) == OtherJobs(wait=False, may_wait=4)
        free = 0.5
        assert await ask("b", waits=False) == OtherJobs(wait=True, may_wait=0)
        assert await ask("a", waits=False) == OtherJobs(wait=False, may_wait=0)
        monkeypatch.setattr(tuning, "CALM_S", 0.0)
        assert await ask("a", waits=False) == OtherJobs(wait=False, may_wait=1)
        monkeypatch.setattr(tuning, "GONE_S", 1e-9)
        monkeypatch.setattr(tuning, "GONE_PAUSES", 0)
        assert await ask("b", waits=False) is None  # "a" no longer reports

    asyncio.run(scenario())


def test_many_pipeline_actors_ask_more_rarely() -> None:
    async def scenario() -> None:
        notes = FairShare(lambda: 0.0)
        pauses = [(await notes.others(str(actor), waits=False))[1] for actor in range(256)]
        assert pauses[:16] == [0.25] * 16
        assert 256 / pauses[-1] == 64

    asyncio.run(scenario())


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_s_chunks_go_to_the_task_that_has_it() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        for payload, worker in ((b"0a", 0), (b"1a", 1), (b"0b", 0), (b"1b", 1)):
            feed_one(scheduler, payload, worker)
        assert scheduler.new_tasks() == 2  # one task for each stream
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0a"
        assert scheduler.new_tasks() == 0
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1a"
        assert scheduler.new_tasks() == 0
        assert payload_of(await scheduler.next_chunk("b", 1, 1)) == b"1b"
        waiting = asyncio.ensure_future(scheduler.next_chunk("b", 2, 2))
        await asyncio.sleep(0)
        feed_one(scheduler, b"0c", 0)
        assert not waiting.done()
        feed_one(scheduler, b"1c", 1)
        assert payload_of(await waiting) == b"1c"
        assert payload_of(await scheduler.next_chunk("a", 1, 1)) == b"0b"
        assert payload_of(await scheduler.next_chunk("a", 2, 2)) == b"0c"

    play(scenario, **BOUND)


async def die(scheduler: PlayedScheduler, name: str) -> None:
    """Restart a task on its first chunk until the scheduler ends its lease."""
    for _ in range(MAX_DEATHS - 1):
        assert await scheduler.next_chunk(name, 0, 0) is not None
    assert await scheduler.next_chunk(name, 0, 0) is None


def test_when_a_stream_is_lost_its_chunk_is_named_and_the_others_go_on() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        for payload, worker in ((b"0a", 0), (b"1a", 1), (b"0b", 0), (b"1b", 1)):
            feed_one(scheduler, payload, worker)
        assert scheduler.new_tasks() == 2
        await scheduler.next_chunk("dies", 0, 0)
        assert payload_of(await scheduler.next_chunk("lives", 0, 0)) == b"1a"
        await die(scheduler, "dies")
        assert lost_payloads() == ["0a"]
        # The training process may send more before it learns of the loss.
        feed_one(scheduler, b"0c", 0)
        feed_one(scheduler, b"0a again", 0, alone=True)
        assert payload_of(await scheduler.next_chunk("lives", 1, 1)) == b"1b"
        assert scheduler.new_tasks() == 1
        assert payload_of(await scheduler.next_chunk("c", 0, 0)) == b"0a again"
        assert await scheduler.next_chunk("c", 1, 1) is None
        assert scheduler.new_tasks() == 1
        for place, payload in enumerate((b"0b", b"0c")):
            assert payload_of(await scheduler.next_chunk("d", place, place)) == payload
        feed_one(scheduler, b"1c", 1)
        assert payload_of(await scheduler.next_chunk("lives", 2, 2)) == b"1c"

    play(scenario, **BOUND)


def test_a_stream_that_began_again_before_its_loss_was_known_begins_once_more() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed_one(scheduler, b"0a", 0)
        feed_one(scheduler, b"0b", 0)
        await scheduler.next_chunk("dies", 0, 0)
        await die(scheduler, "dies")
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"0b"
        feed_one(scheduler, b"0c", 0)
        feed_one(scheduler, b"0a again", 0, alone=True)
        waiting = asyncio.ensure_future(scheduler.next_chunk("c", 0, 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await scheduler.next_chunk("b", 1, 1) is None
        assert payload_of(await waiting) == b"0a again"
        assert await scheduler.next_chunk("c", 1, 1) is None
        assert payload_of(await scheduler.next_chunk("d", 0, 0)) == b"0c"

    play(scenario, **BOUND)


def test_a_batch_that_fails_alone_leaves_the_others_of_its_worker_to_be_made() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed_one(scheduler, b"5", 1, alone=True)
        feed_one(scheduler, b"7", 1, alone=True)
        assert scheduler.new_tasks() == 1
        await scheduler.next_chunk("dies", 0, 0)
        assert scheduler.new_tasks() == 0
        await die(scheduler, "dies")
        assert lost_payloads() == ["5"]
        assert scheduler.new_tasks() == 1
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"7"

    play(scenario, **BOUND)


def test_resent_chunks_come_first_and_end_no_more_leases_than_they_need() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1", b"2", b"3")
        assert scheduler.new_tasks() == 4
        names = ("a", "b", "c", "d")
        for name in names:
            await scheduler.next_chunk(name, 0, 0)
        for payload, worker in ((b"4", 4), (b"5", 5), (b"6", 6)):
            feed_one(scheduler, payload, worker)
        feed_one(scheduler, b"7 alone", 7, alone=True)
        feed_one(scheduler, b"8 alone", 7, alone=True)
        assert await scheduler.next_chunk("a", 1, 1) is None, "one task makes room"
        assert scheduler.new_tasks() == 1
        assert payload_of(await scheduler.next_chunk("b", 1, 1)) == b"4"
        assert payload_of(await scheduler.next_chunk("e", 0, 0)) == b"7 alone"
        assert payload_of(await scheduler.next_chunk("c", 1, 1)) == b"5", "its worker has a task"
        assert await scheduler.next_chunk("e", 1, 1) is None
        assert scheduler.new_tasks() == 1
        assert payload_of(await scheduler.next_chunk("d", 1, 1)) == b"6"
        assert payload_of(await scheduler.next_chunk("f", 0, 0)) == b"8 alone"

    play(scenario, num_workers=9)


def test_a_task_that_waits_gives_way_if_only_one_may_run() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        assert scheduler.new_tasks() == 1
        await scheduler.next_chunk("a", 0, 0)
        waiting = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1))
        await asyncio.sleep(0)
        scheduler.scheduler.one_by_one = True
        feed_one(scheduler, b"1 again", 1, alone=True)
        assert await waiting is None
        assert scheduler.new_tasks() == 1
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1 again"

    play(scenario, **BOUND)


def test_a_resent_chunk_that_need_not_be_alone_comes_before_new_ones() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        scheduler.feed(PickledChunk(b"2", 2, Part("2", 0), resent=True))
        scheduler.feed(PickledChunk(b"3", 3, Part("3", 0), resent=True))
        payloads = [payload_of(await scheduler.next_chunk("a", n, n)) for n in range(4)]
        assert payloads == [b"2", b"3", b"0", b"1"]

    play(scenario)


# --- bound logical workers ------------------------------------------------------------------------

WATCHED: dict[str, Any] = {**BOUND, "binding": Binding.WATCHED}


def test_workers_are_released_when_all_first_batches_are_known() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a", b"2a", b"3a")
        feed(scheduler, b"0b", b"1b")
        assert await scheduler.next_chunk("a", 0, 0) == AssignedChunk(b"0a", 0, Binding.WATCHED)
        await scheduler.next_chunk("b", 0, 0)
        for place, payload in enumerate([b"2a", b"3a", b"0b"], 1):
            given = await scheduler.next_chunk("a", place, place, unchanged=True)
            assert given == AssignedChunk(payload, place, Binding.WATCHED)
        waiting = asyncio.ensure_future(scheduler.next_chunk("c", 0, 0))
        await asyncio.sleep(0)
        assert not waiting.done(), "a process is still worker 1"
        given = await scheduler.next_chunk("b", 1, 1, unchanged=True)
        assert given == AssignedChunk(b"1b", 1, Binding.RELEASED)
        waiting.cancel()

    play(scenario, **WATCHED)


@pytest.mark.parametrize("unchanged", [True, False])
def test_a_batch_in_flight_at_the_release_is_reported_before_its_worker_s_next(
    unchanged: bool,
) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a")
        feed(scheduler, b"0b")
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("b", 0, 0)
        assert payload_of(await scheduler.next_chunk("a", 1, 1, unchanged=True)) == b"0b"
        feed(scheduler, b"0c", b"1b")
        given = await scheduler.next_chunk("b", 1, 1, unchanged=True)
        assert given == AssignedChunk(b"1b", 1, Binding.RELEASED)
        waiting = asyncio.ensure_future(scheduler.next_chunk("b", 2, 2))
        await asyncio.sleep(0)
        assert not waiting.done()
        # A restarted task still has to report.
        again = await scheduler.next_chunk("a", 0, 0)
        assert again == AssignedChunk(b"0a", 0, Binding.WATCHED, again=True, restarted=True)
        binding = Binding.RELEASED if unchanged else Binding.ALWAYS
        given = await scheduler.next_chunk("a", 2, 2, unchanged=unchanged)
        assert given == AssignedChunk(b"0c", 2, binding)
        assert not waiting.done()
        waiting.cancel()

    play(scenario, **{**WATCHED, "num_workers": 2})


def test_a_task_that_cannot_look_keeps_no_worker_waiting() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a")
        feed(scheduler, b"0b", b"1b")
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("b", 0, 0)
        assert await scheduler.next_chunk("a", 1, 1) == AssignedChunk(b"0b", 1, Binding.WATCHED)
        feed(scheduler, b"0c")
        given = await scheduler.next_chunk("b", 1, 1, unchanged=True)
        assert given == AssignedChunk(b"1b", 1, Binding.WATCHED)
        given = await scheduler.next_chunk("a", 2, 2, unchanged=True)
        assert given == AssignedChunk(b"0c", 2, Binding.RELEASED)

    play(scenario, **{**WATCHED, "num_workers": 2})


def test_a_task_that_fails_for_good_keeps_no_worker_waiting() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a")
        feed(scheduler, b"0b", b"0c")
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("b", 0, 0)
        assert payload_of(await scheduler.next_chunk("a", 1, 1, unchanged=True)) == b"0b"
        for _ in range(MAX_DEATHS):
            given = await scheduler.next_chunk("a", 0, 0)
        assert given is None
        feed(scheduler, b"0d")
        assert await scheduler.next_chunk("b", 1, 1, unchanged=True) is not None

    play(scenario, **{**WATCHED, "num_workers": 2})


def test_one_first_batch_that_changes_its_copy_binds_all() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a", b"2a")
        feed(scheduler, b"0b", b"1b")
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("b", 0, 0)
        given = await scheduler.next_chunk("a", 1, 1, unchanged=True)
        assert given == AssignedChunk(b"2a", 1, Binding.WATCHED)
        given = await scheduler.next_chunk("b", 1, 1, unchanged=False)
        assert given == AssignedChunk(b"1b", 1, Binding.ALWAYS)
        # Logical worker 0 has not changed its copy. So it may continue in another process, on a
        # new copy.
        assert await scheduler.next_chunk("c", 0, 0) == AssignedChunk(b"0b", 0, Binding.ALWAYS)

    play(scenario, **WATCHED)


def test_workers_stay_bound_once_a_batch_has_changed_its_copy() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a", b"2a")
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0a"
        waiting = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1, unchanged=False))
        await asyncio.sleep(0)
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1a"
        feed_one(scheduler, b"1b", worker=1)
        # Other samples may still change it.
        given = await scheduler.next_chunk("b", 1, 1, unchanged=True)
        assert given == AssignedChunk(b"1b", 1, Binding.ALWAYS)
        feed(scheduler, b"0b")
        assert await waiting == AssignedChunk(b"0b", 1, Binding.ALWAYS)

    play(scenario, **WATCHED)


def test_a_worker_whose_copy_changes_late_is_bound_where_it_is() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.scheduler.parallel = 1
        feed(scheduler, b"0a", b"1a")
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("a", 1, 1, unchanged=True)
        feed(scheduler, b"0b", b"1b")
        given = await scheduler.next_chunk("a", 2, 2, unchanged=False)
        assert given == AssignedChunk(b"1b", 2, Binding.ALWAYS)
        assert await scheduler.next_chunk("b", 0, 0) == AssignedChunk(b"0b", 0, Binding.ALWAYS)

    play(scenario, **WATCHED)


def test_a_late_change_binds_the_worker_that_the_message_names() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.scheduler.parallel = 1
        feed(scheduler, b"0a", b"1a")
        await scheduler.next_chunk("a", 0, 0, unchanged=True)
        await scheduler.next_chunk("a", 1, 1)
        scheduler.note_change("a", 0)  # the next request has overtaken the message
        feed_one(scheduler, b"1b", worker=1)
        feed_one(scheduler, b"0b", worker=0)
        assert await scheduler.next_chunk("a", 2, 2) == AssignedChunk(b"0b", 2, Binding.ALWAYS)

    play(scenario, **{**BOUND, "num_workers": 2, "binding": Binding.RELEASED})


def test_a_repeated_request_reports_no_state_of_a_later_chunk() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a")
        await scheduler.next_chunk("a", 0, 0, "process")
        for _ in range(2):
            given = await scheduler.next_chunk("a", 1, 1, "process", unchanged=True)
            assert given == AssignedChunk(b"1a", 1, Binding.WATCHED)
        feed(scheduler, b"0b")
        assert await scheduler.next_chunk("b", 0, 0) == AssignedChunk(b"0b", 0, Binding.WATCHED)

    play(scenario, **{**WATCHED, "num_workers": 2})


def test_a_repeated_chunk_reports_the_state_of_its_own_worker() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a")
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("a", 1, 1, unchanged=True)
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0a"  # the task restarts
        again = await scheduler.next_chunk("a", 1, 1, unchanged=True)
        assert isinstance(again, AssignedChunk)
        assert again.binding is Binding.WATCHED, "logical worker 1 has not reported"

    play(scenario, **{**WATCHED, "num_workers": 2})


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_keep_their_process_as_long_as_they_persist(persistent: bool) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        await scheduler.next_chunk("a", 0, 0)
        await scheduler.next_chunk("b", 0, 0)
        asking = {n: asyncio.ensure_future(scheduler.next_chunk(n, 1, 1)) for n in "ab"}
        await asyncio.sleep(0)
        scheduler.begin(in_run=False)
        scheduler.begin(in_run=True)
        of_1, of_0 = "ba" if persistent else "ab"
        feed_one(scheduler, b"1 of the next epoch", 1)
        assert payload_of(await asking[of_1]) == b"1 of the next epoch"
        assert not asking[of_0].done()
        feed(scheduler, b"0 of the next epoch")
        assert payload_of(await asking[of_0]) == b"0 of the next epoch"

    play(scenario, **BOUND, persistent=persistent)


def test_a_worker_that_lived_elsewhere_is_told_so() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a")
        await scheduler.next_chunk("dies", 0, 0)
        await die(scheduler, "dies")
        feed(scheduler, b"0b", b"1b")
        assert await scheduler.next_chunk("b", 0, 0) == AssignedChunk(
            b"0b", 0, Binding.ALWAYS, restarted=True
        )
        assert await scheduler.next_chunk("c", 0, 0) == AssignedChunk(b"1b", 0, Binding.ALWAYS)

    play(scenario, **BOUND)


def test_where_tasks_hold_what_others_need_a_process_has_several_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "IDLE_S", 0.01)

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0a", b"1a")
        assert payload_of(await scheduler.next_chunk("a", 0, 0)) == b"0a"
        assert payload_of(await scheduler.next_chunk("a", 1, 1)) == b"1a"
        feed(scheduler, b"0b", b"1b")
        assert payload_of(await scheduler.next_chunk("a", 2, 2)) == b"0b"
        assert payload_of(await scheduler.next_chunk("a", 3, 3)) == b"1b"

    play(scenario, **BOUND, holds_resources=True)


def test_all_workers_start_where_no_task_asks_for_long(clock: SimpleNamespace) -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.limit(parallel=2, starting=2)
        feed(scheduler, b"0", b"1", b"2", b"3")
        assert scheduler.new_tasks() == 2
        for name in "ab":
            await scheduler.next_chunk(name, 0, 0)
        assert scheduler.new_tasks() == 0
        clock.now += tuning.STUCK_IDLE_S
        assert scheduler.new_tasks() == 0, "no processor is idle"
        clock.now += tuning.STUCK_S
        assert scheduler.new_tasks() == 2
        for name in "cd":
            assert await scheduler.next_chunk(name, 0, 0) is not None

    play(scenario, **WATCHED, idle=lambda: False)


def test_a_repeated_request_gets_the_same_answer() -> None:
    """Its answer was lost with the connection, and nothing was lost with the process."""

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1")
        for place, payload in enumerate((b"0", b"1")):
            request = "a", place, place, "process"
            asked = [await scheduler.next_chunk(*request) for _ in range(MAX_DEATHS + 1)]
            assert asked == [AssignedChunk(payload, place)] * len(asked)
        request = "a", 2, 2, "process"
        twice = [asyncio.ensure_future(scheduler.next_chunk(*request)) for _ in range(2)]
        await asyncio.sleep(0)
        feed(scheduler, b"2")
        assert [payload_of(answer) for answer in await asyncio.gather(*twice)] == [b"2"] * 2

    play(scenario)


def test_a_restarted_task_makes_room_for_one_that_cannot_restart(clock: SimpleNamespace) -> None:
    """Two tasks have died on chunks of one logical worker, and only one fits on the nodes."""

    async def scenario(scheduler: PlayedScheduler) -> None:
        for place, worker in enumerate((1, 0)):
            feed_one(scheduler, b"%d" % place, worker)
            assert await scheduler.next_chunk("a", place, place, "a 1") is not None
        feed_one(scheduler, b"2", 1)
        assert payload_of(await scheduler.next_chunk("b", 0, 0, "b 1")) == b"2"
        restarted = asyncio.ensure_future(scheduler.next_chunk("a", 0, 0, "a 2"))
        await asyncio.sleep(0)
        assert not restarted.done(), "b may still run"
        clock.now += tuning.IDLE_S
        scheduler.note(scheduler.scheduler.tick)
        assert await restarted is None
        assert not lost
        for place, payload in enumerate((b"2", b"0", b"1")):
            assert payload_of(await scheduler.next_chunk("b", place, place, "b 2")) == payload

    play(scenario, holds_resources=True)


def test_a_task_that_had_ended_reports_the_chunks_that_it_cannot_repeat(
    clock: SimpleNamespace,
) -> None:
    """Another task has made later chunks of the logical worker, whose state must not go back."""

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed_one(scheduler, b"0", 0)
        assert await scheduler.next_chunk("a", 0, 0, "a 1") is not None
        asked = asyncio.ensure_future(scheduler.next_chunk("a", 1, 1, "a 1"))
        await asyncio.sleep(0)
        clock.now += tuning.IDLE_S
        scheduler.note_others(OtherJobs(wait=True, may_wait=0))
        scheduler.note(scheduler.scheduler.tick)
        assert await asked is None
        feed_one(scheduler, b"1", 0)
        assert payload_of(await scheduler.next_chunk("b", 0, 0, "b 1")) == b"1"
        assert await scheduler.next_chunk("a", 0, 0, "a 2") is None
        assert [(loss.cause, loss.part) for loss in lost] == [(LossCause.BLOCK, Part("0", 0))]
        assert await waits(scheduler, "b", 1, 1, "b 1"), "no chunk waits"
        assert await scheduler.next_chunk("a", 0, 0, "a 3") is None
        assert len(lost) == 1

    play(scenario, **BOUND, holds_resources=True)


def test_a_chunk_that_is_repeated_binds_its_logical_worker() -> None:
    """When it was given first, any task could make it. Since then, a batch has changed a copy."""

    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.begin(in_run=True)
        for name, worker in (("a", 0), ("b", 1)):
            feed_one(scheduler, name.encode(), worker)
            assert await scheduler.next_chunk(name, 0, 0, f"{name} 1") is not None
        scheduler.note_change("b", 1)
        assert payload_of(await scheduler.next_chunk("a", 0, 0, "a 2")) == b"a"
        feed_one(scheduler, b"2", 2)
        feed_one(scheduler, b"0", 0)
        assert payload_of(await scheduler.next_chunk("a", 1, 1, "a 2")) == b"0"
        assert await waits(scheduler, "a", 2, 2, "a 2"), "the other one needs its own process"

    play(scenario, num_workers=4)


def test_a_chunk_whose_last_sample_kills_its_process_counts_deaths_after_the_lease() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.begin(in_run=True)
        feed_one(scheduler, b"deadly", alone=True)
        assert await scheduler.next_chunk("a", 0, 0, "a 1") is not None
        assert await scheduler.next_chunk("a", 1, 1, "a 1", early=True) is None
        for number in range(2, MAX_DEATHS + 1):
            again = await scheduler.next_chunk("a", 0, 0, f"a {number}")
            assert payload_of(again) == b"deadly"
            assert await scheduler.next_chunk("a", 1, 1, f"a {number}", early=True) is None
        assert await scheduler.next_chunk("a", 0, 0, "last") is None
        assert [loss.cause for loss in lost] == [LossCause.TASK]

    play(scenario)


def test_a_chunk_that_is_repeated_after_a_lease_holds_its_worker_for_a_limited_time(
    clock: SimpleNamespace,
) -> None:
    """Ray may have replaced the process that repeats it, so that nobody learns of its end."""

    async def scenario(scheduler: PlayedScheduler) -> None:
        scheduler.begin(in_run=True)
        feed_one(scheduler, b"0")
        assert await scheduler.next_chunk("a", 0, 0, "a 1") is not None
        feed_one(scheduler, b"alone", alone=True)
        assert await scheduler.next_chunk("a", 1, 1, "a 1") is None
        assert payload_of(await scheduler.next_chunk("a", 0, 0, "a 2")) == b"0"
        assert await waits(scheduler, "b", 0, 0)
        clock.now += tuning.STATE_QUIET_S
        scheduler.note(scheduler.scheduler.tick)
        assert payload_of(await scheduler.next_chunk("c", 0, 0)) == b"alone"

    play(scenario, later_stages=True)


def test_a_restarted_task_holds_the_workers_of_all_chunks_that_it_has_to_repeat() -> None:
    async def scenario(scheduler: PlayedScheduler) -> None:
        for place in range(2):
            feed_one(scheduler, b"%d" % place, worker=place)
            assert await scheduler.next_chunk("a", place, place, "a 1") is not None
        assert payload_of(await scheduler.next_chunk("a", 0, 0, "a 2")) == b"0"
        feed_one(scheduler, b"later", worker=1)
        assert await waits(scheduler, "b", 0, 0), "a has to repeat a chunk of the logical worker"
        assert payload_of(await scheduler.next_chunk("a", 1, 1, "a 2")) == b"1"
        assert payload_of(await scheduler.next_chunk("a", 2, 2, "a 2")) == b"later"

    play(scenario)


def test_processes_that_do_not_end_with_their_tasks_are_known_to_later_pipelines() -> None:
    replaced: deque[str] = deque()

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0", b"1", b"2", b"3")
        for name in "abcd":
            assert await scheduler.next_chunk(name, 0, 0, f"{name} 1") is not None
        scheduler.note(scheduler.scheduler.close)
        assert await scheduler.next_chunk("d", 1, 1, "d 1", early=True) is None
        assert await scheduler.next_chunk("a", 1, 1, "a 1") is None
        assert await scheduler.next_chunk("b", 0, 0, "b 2") is None, "Ray has restarted it"
        scheduler.scheduler.note_joined()
        assert set(replaced) == {"b 1", "c 1"}

    play(scenario, replaced=replaced)


def test_a_replaced_process_that_reports_its_last_sample_is_not_waited_for() -> None:
    replaced: deque[str] = deque()

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        assert await scheduler.next_chunk("a", 0, 0, "a 2") is not None
        scheduler.note(scheduler.scheduler.close)
        assert await scheduler.next_chunk("a", 1, 1, "a 2", early=True) is None
        assert await scheduler.next_chunk("a", 0, 0, "a 1") is None, "it had been silent"
        assert set(replaced) == {"a 2"}, "it may still make samples"
        scheduler.note(scheduler.scheduler.finish, "a", "a 2", 1)
        assert not replaced

    play(scenario, replaced=replaced)


def test_a_restarted_task_gets_no_chunk_of_a_further_iteration_before_a_later_stage() -> None:
    """Ray drops its first blocks, because it takes them for those of the dead process."""

    async def scenario(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        await scheduler.next_chunk("a", 0, 0, "first")
        scheduler.begin(in_run=True)
        assert payload_of(await scheduler.next_chunk("a", 0, 0, "second")) == b"0"
        feed(scheduler, b"1")
        assert await scheduler.next_chunk("a", 1, 0, "second") is None
        assert payload_of(await scheduler.next_chunk("b", 0, 0)) == b"1"

    play(scenario, later_stages=True)


def test_a_later_pipeline_knows_the_processes_that_were_replaced() -> None:
    replaced: deque[str] = deque()

    async def restarts(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        for attempt in ("first", "second"):
            assert await scheduler.next_chunk("a", 0, 0, attempt) is not None

    async def begins(scheduler: PlayedScheduler) -> None:
        feed(scheduler, b"0")
        given = await scheduler.next_chunk("b", 0, 0, "third")
        assert given == AssignedChunk(b"0", 0, replaced=("first",))

    for scenario in (restarts, begins):
        play(scenario, replaced=replaced)
