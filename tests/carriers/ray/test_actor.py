"""Tests of the pipeline actor: which run gets which news, in whatever order the calls arrive."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import ray

from dpex import tuning
from dpex.carriers.ray import actor as actor_module
from dpex.carriers.ray.actor import Reply, _PipelineActor, get_pipeline_actor
from dpex.carriers.ray.ray_dataset import LaterStage, PipelineSpec
from dpex.compat.executor import ACTOR_ONLY
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Part, PickledChunk
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.wire.packed_calls import pack

JOB: Any = "a reference"
SPEC = PipelineSpec([JOB], "job", "actor", claims_cpus=False, num_workers=2)
STAGE = LaterStage([], "stage", {}, 1, capped=False, keeps_processes=False)
ORIGIN = ("lease", "process")
PROCESS = "machine 1 2 node unique"
PART = Part("first", 0, (0,))
LOST = Loss(LossCause.TASK, "died", PART)

OnEnd = Callable[[BaseException | None], None]
Scenario = Callable[[_PipelineActor, list["FakeExecution"]], Awaitable[None]]


class FakeExecution:
    """An execution without Ray Data; it ends when a test says so."""

    def __init__(self, build: Any, on_end: OnEnd) -> None:
        self.build = build
        self.end = on_end
        self.closed = False
        self.tasks_ended = threading.Event()
        self.tasks_ended.set()

    def close(self, deadline: float) -> None:
        self.closed = True
        self.tasks_ended.wait(deadline - time.monotonic())


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Return a function that plays a scenario with an actor and its executions."""
    executions: list[FakeExecution] = []

    def execution(build: Any, on_end: OnEnd) -> FakeExecution:
        executions.append(FakeExecution(build, on_end))
        return executions[-1]

    monkeypatch.setattr(actor_module, "Execution", execution)
    monkeypatch.setenv(ACTOR_ONLY, "1")  # the actor sets it, here in the test's own process

    async def run(scenario: Scenario) -> None:
        await scenario(_PipelineActor(), executions)

    return lambda scenario: asyncio.run(asyncio.wait_for(run(scenario), 30))


async def feed(
    actor: _PipelineActor,
    number: int,
    *payloads: bytes,
    run: str = "first",
    pipeline: str = "pipeline",
    worker: int = 0,
) -> None:
    limits = {"parallel": 4, "starting": 4, "one_by_one": False}
    chunks = [
        PickledChunk(payload, worker, Part(run, chunk))
        for chunk, payload in enumerate(payloads, number)
    ]
    await actor.feed(pack(pipeline, run, number, chunks, **limits))


async def ask(
    actor: _PipelineActor,
    place: int = 0,
    made: int = 0,
    pipeline: str = "pipeline",
    attempt: str = ORIGIN[1],
) -> bytes | None:
    """Return the payload of the next chunk of a task."""
    request = pack(pipeline, (ORIGIN[0], attempt), place, made, unchanged=None)
    found = pickle.loads(await actor.next_chunk(request))
    return None if found is None else found.payload


async def deliver(
    actor: _PipelineActor,
    number: int,
    block: bytes | None = None,
    loss: Loss | None = None,
    part: Part = PART,
) -> None:
    """Deliver a message of a worker process."""
    content = (part, block, 9, loss, None)
    await actor.accept(pack("pipeline", ("sender", number), "block", content))


async def take(actor: _PipelineActor, run: str = "first") -> Reply:
    """Wait for the news of a run."""
    reply = await actor.take("pipeline", run)
    assert isinstance(reply, bytes), "no block is in the object store"
    return cast("Reply", pickle.loads(reply))


async def started(call: Awaitable[Any]) -> asyncio.Future[Any]:
    """Start a call, and return it once it waits."""
    future = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    return future


def test_calls_that_arrive_before_open_wait_for_it(play: Any) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        calls = [await started(call) for call in (feed(actor, 0, b"0"), ask(actor))]
        assert not any(call.done() for call in calls)
        await actor.open("pipeline", SPEC, "first")
        assert await asyncio.gather(*calls) == [None, b"0"]

    play(scenario)


def test_chunks_stay_in_order_though_their_calls_do_not(play: Any) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        await feed(actor, 2, b"2")
        await feed(actor, 0, b"0", b"1")
        assert [await ask(actor, place, place) for place in range(3)] == [b"0", b"1", b"2"]

    play(scenario)


def test_news_are_told_once_and_end_with_the_last_block(play: Any) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        await feed(actor, 0, b"0", b"1")
        await ask(actor)
        await deliver(actor, 0, b"block 0")
        assert await take(actor) == Reply([(b"block 0", 9, PART)])
        taking = await started(take(actor))
        assert not taking.done()
        await ask(actor, 1, 1)
        await deliver(actor, 1, b"block 1")
        assert await taking == Reply([(b"block 1", 9, PART)])
        taking = await started(take(actor))
        last = await started(ask(actor, 2, 2))
        assert not taking.done()
        await actor.close("pipeline")
        assert await last is None
        assert (await taking).ended

    play(scenario)


def test_a_repeated_message_is_ignored(play: Any) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        for _ in range(2):
            await deliver(actor, 0, b"block")
        assert await take(actor) == Reply([(b"block", 9, PART)])

    play(scenario)


def test_a_loss_is_told_and_the_tasks_go_on(play: Any) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        waiting = await started(ask(actor))
        await deliver(actor, 0, loss=LOST)
        assert await take(actor) == Reply(losses=[LOST])
        assert not waiting.done()
        await feed(actor, 0, b"0")
        assert await waiting == b"0"
        for number in range(tuning.MAX_DEATHS):
            payload = await ask(actor, attempt=f"process {number}")
        assert payload is None
        [loss] = (await take(actor)).losses
        assert (loss.cause, loss.part) == (LossCause.TASK, Part("first", 0))

    play(scenario)


def test_what_comes_of_an_earlier_run_is_dropped(play: Any) -> None:
    """Its chunks have the same numbers as those of the present run."""

    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        await actor.cancel("pipeline", "first")
        assert await actor.begin("pipeline", "second") == (True, False)
        await deliver(actor, 0, b"late")
        await deliver(actor, 1, loss=LOST)
        assert not (taking := await started(take(actor, "second"))).done()
        part = Part("second", 0, (0,))
        await deliver(actor, 2, b"block", part=part)
        assert await taking == Reply([(b"block", 9, part)])

    play(scenario)


def test_a_cancelled_run_ends_and_its_chunks_are_dropped(play: Any) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        await feed(actor, 0, b"0")
        over = await started(actor.next_end("pipeline", PROCESS, 0))
        await actor.cancel("pipeline", "first")
        assert await over == 1
        assert await take(actor) == Reply(ended=True)

        assert await actor.begin("pipeline", "second") == (True, False)
        await feed(actor, 0, b"late")
        await actor.cancel("pipeline", "first")  # late too
        asking = await started(ask(actor))
        assert not asking.done()
        await feed(actor, 0, b"another", run="second")
        assert await asking == b"another"

    play(scenario)


def test_the_next_run_waits_for_the_tasks_of_a_cancelled_run(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        await feed(actor, 0, b"0", b"1")
        assert await ask(actor) == b"0"
        await actor.cancel("pipeline", "first")
        begins = await started(actor.begin("pipeline", "second"))
        assert not begins.done()
        asking = await started(ask(actor, 1, 1))  # the task has made its chunk
        assert await begins == (True, False)
        await feed(actor, 0, b"2", run="second")
        assert await asking == b"2"
        monkeypatch.setattr(tuning, "QUIET_S", 0.0)
        await actor.cancel("pipeline", "second")
        assert await actor.begin("pipeline", "third") == (False, False)

    play(scenario)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pipeline_that_does_not_begin_says_if_state_is_lost(
    persistent: bool, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "QUIET_S", 0.0)
    monkeypatch.setattr(tuning, "STATE_QUIET_S", 0.0)
    spec = replace(SPEC, persistent=persistent, binding=Binding.ALWAYS)

    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", spec, "first")
        await feed(actor, 0, b"0")
        assert await ask(actor) == b"0"
        await actor.cancel("pipeline", "first")
        assert await actor.begin("pipeline", "second") == (False, persistent)

    play(scenario)


@pytest.mark.parametrize("at_work", [True, False])
def test_a_run_waits_for_the_tasks_of_a_pipeline_that_was_closed_before(
    play: Any, at_work: bool
) -> None:
    """These tasks may make samples of the same logical workers until they end."""

    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", SPEC, "first")
        executions[0].tasks_ended.clear()
        await feed(actor, 0, b"0")
        if at_work:
            assert await ask(actor) == b"0"
        await actor.cancel("pipeline", "first")
        closing = await started(actor.close("pipeline"))
        await actor.open("next", SPEC, "second")
        feeding = asyncio.ensure_future(feed(actor, 0, b"1", run="second", pipeline="next"))
        asking = asyncio.ensure_future(ask(actor, pipeline="next"))
        if at_work:
            await asyncio.wait([asking], timeout=0.05)
            assert not any(call.done() for call in (feeding, asking))
            executions[0].tasks_ended.set()
        await feeding
        assert await asking == b"1"
        executions[0].tasks_ended.set()
        await closing

    play(scenario)


def test_an_execution_that_fails_breaks_its_pipeline(play: Any) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", SPEC, "first")
        taking = await started(take(actor))
        await asyncio.to_thread(executions[0].end, OSError("no disk"))
        reply = await taking
        assert (reply.ended, reply.replaceable) == (True, False)
        [loss] = reply.losses
        assert "no disk" in loss.text
        assert await actor.begin("pipeline", "second") == (False, False)

    play(scenario)


def test_the_end_of_the_further_tasks_is_that_of_the_pipeline(play: Any) -> None:
    """The first task may end before, because it has an execution to itself."""

    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", replace(SPEC, binding=Binding.RELEASED), "first")
        await feed(actor, 0, b"0")
        await feed(actor, 1, b"1", worker=1)
        while len(executions) < 2:
            await asyncio.sleep(0)
        executions[0].end(None)
        assert not (await started(take(actor))).done()
        executions[1].end(None)
        assert (await take(actor)).ended

    play(scenario)


def test_a_later_stage_begins_a_block_a_few_times_only(play: Any) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", replace(SPEC, later=(STAGE,)), "first")
        part = PART
        may = [await actor.may_begin("pipeline", "stage", part, PROCESS) for _ in range(5)]
        assert may == [1] * tuning.MAX_DEATHS + [None]
        assert await actor.may_begin("pipeline", "stage", replace(part, batches=(1,)), PROCESS)
        [loss] = (await take(actor)).losses
        assert (loss.cause, loss.part) == (LossCause.TASK, part)
        await actor.cancel("pipeline", "first")
        await actor.begin("pipeline", "second")
        assert await actor.may_begin("pipeline", "stage", part, PROCESS) is None, "its run is over"
        again = await actor.may_begin("pipeline", "stage", replace(part, run="second"), PROCESS)
        assert again == 2, "each run counts again"

        executions[0].end(None)
        assert (await take(actor, "second")).ended, "one execution has all tasks"

    play(scenario)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def pending_tasks(actor: _PipelineActor, pipeline: str = "pipeline") -> int:
    return actor._pipelines[pipeline].result().scheduler.pending


@pytest.mark.parametrize(
    ("error", "replaceable"),
    [
        (NotImplementedError("Ray Data runs no tasks"), True),
        (ray.exceptions.RuntimeEnvSetupError("of the user"), False),
    ],
)
def test_a_pipeline_whose_tasks_cannot_run_is_replaced_by_one_in_actors(
    play: Any, error: Exception, replaceable: bool
) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", SPEC, "first")
        executions[0].end(error)
        reply = await take(actor)
        assert (reply.ended, reply.replaceable) == (True, replaceable)
        await actor.close("pipeline")
        await actor.open("other", SPEC, "second")
        assert actor._pipelines["other"].result()._in_actors is replaceable

    play(scenario)


def test_an_error_of_a_pipeline_whose_tasks_have_run_is_not_that_of_its_tasks(play: Any) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", SPEC, "first")
        await feed(actor, 0, b"0")
        await ask(actor)
        executions[0].end(ValueError("later"))
        assert not (await take(actor)).replaceable
        assert actor._task_pools.check()

    play(scenario)


def test_tasks_run_again_after_actors_have_failed_too(play: Any) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        for pipeline, run, replaceable in (("a", "1", True), ("b", "2", False), ("c", "3", True)):
            await actor.open(pipeline, SPEC, run)
            executions[-1].end(ValueError("of the options"))
            reply: Any = pickle.loads(cast("bytes", await actor.take(pipeline, run)))
            assert reply.replaceable is replaceable
            await actor.close(pipeline)

    play(scenario)


def test_tasks_that_do_not_start_are_replaced_by_actors(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "TASKS_START_S", 0.0)
    rooms = iter([False, True])
    monkeypatch.setattr(actor_module, "_has_room", lambda _: next(rooms))
    monkeypatch.setattr(tuning, "CLUSTER_LOOK_S", 0.0)

    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", SPEC, "first")
        reply = await take(actor)
        assert (reply.ended, reply.replaceable) == (True, True)
        assert "no task has started" in reply.losses[0].text
        assert not actor._task_pools.check()

    play(scenario)


def built(
    executions: list[FakeExecution], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, bool, int]]:
    """Return what each execution has been asked to build: leases, further ones, tasks in all."""
    with monkeypatch.context() as patch:
        patch.setattr(actor_module, "build", lambda _, **options: tuple(options.values()))
        return [execution.build() for execution in executions]


def test_each_group_of_actors_has_an_execution(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        spec = replace(SPEC, in_actors=True, num_workers=4, binding=Binding.RELEASED)
        await actor.open("pipeline", spec, "first")
        for worker in range(3):
            await feed(actor, worker, b"0", worker=worker)
        await until(lambda: len(executions) > 1)
        pending = pending_tasks(actor)
        assert pending > 1
        assert built(executions, monkeypatch) == [(1, False, 1), (pending - 1, False, pending)]
        executions[1].end(None)
        await ask(actor)
        reply = await started(take(actor))
        await asyncio.sleep(0)
        assert not reply.done(), "the end of a group is not that of the pipeline"
        await actor.close("pipeline")
        assert (await reply).ended
        assert [execution.closed for execution in executions] == [True, False]

    play(scenario)


def test_actors_before_a_later_stage_have_one_execution_at_a_time(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LEASE_S", 0.0)
    monkeypatch.setattr(tuning, "IDLE_S", 0.0)

    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        spec = replace(
            SPEC, in_actors=True, num_workers=1, later=(STAGE,), binding=Binding.RELEASED
        )
        await actor.open("pipeline", spec, "first")
        more = await started(actor.more_tasks("pipeline", 1))
        await feed(actor, 0, b"0")
        assert await ask(actor) == b"0"
        assert await ask(actor, 1) is None
        assert await more is None, "all tasks have ended, so the execution does"
        await feed(actor, 1, b"1")
        await asyncio.sleep(0)
        assert len(executions) == 1
        executions[0].end(None)
        await until(lambda: len(executions) > 1)
        assert built(executions, monkeypatch) == [(1, True, 1), (1, True, 2)]
        await actor.close("pipeline")

    play(scenario)


def test_actors_of_a_stage_that_keeps_its_processes_stay(play: Any) -> None:
    stage = replace(STAGE, keeps_processes=True)

    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", replace(SPEC, in_actors=True, later=(stage,)), "first")
        more = await started(actor.more_tasks("pipeline", 1))
        await asyncio.sleep(0)
        assert not more.done()
        executions[0].end(None)
        assert (await take(actor)).ended, "the execution lasts as long as the pipeline"
        await actor.close("pipeline")

    play(scenario)


def test_close_ends_every_call(play: Any) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.open("pipeline", SPEC, "first")
        calls = [
            await started(call)
            for call in (
                ask(actor),
                take(actor),
                actor.next_end("pipeline", PROCESS, 0),
                actor.more_tasks("pipeline", 9),
            )
        ]
        assert not any(call.done() for call in calls)
        await actor.close("pipeline")
        assert await asyncio.gather(*calls) == [None, Reply(ended=True), None, None]
        assert executions[0].closed
        # Later calls do not wait.
        assert await ask(actor) is None
        assert await take(actor) == Reply(ended=True)
        assert await actor.more_tasks("pipeline", 0) is None
        assert await actor.begin("pipeline", "second") == (False, False)
        assert await actor.next_end("pipeline", PROCESS, 0) is None
        assert await actor.released("pipeline") == []

    play(scenario)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_end_of_a_run_waits_until_processes_have_dropped_their_copies(
    play: Any, persistent: bool
) -> None:
    async def scenario(actor: _PipelineActor, _: Any) -> None:
        await actor.open("pipeline", replace(SPEC, persistent=persistent), "first")
        ends = await started(actor.next_end("pipeline", ORIGIN[1], 0))
        await feed(actor, 0, b"chunk")
        assert await ask(actor) == b"chunk"
        assert await actor.released("pipeline") == [], "the run is not over"
        await actor.cancel("pipeline", "first")
        if persistent:
            assert await actor.released("pipeline") == [], "its copies stay until close()"
            assert await ends == 1
            await actor.close("pipeline")
            released = await started(actor.released("pipeline"))
            assert not released.done()
            assert await actor.next_end("pipeline", ORIGIN[1], 9) is None
        else:
            released = await started(actor.released("pipeline"))
            assert await ends == 1
            assert not released.done()
            confirmed = await started(actor.next_end("pipeline", ORIGIN[1], 1))
            await actor.close("pipeline")
            assert await confirmed is None
        assert await released == []

    play(scenario)


def test_close_may_arrive_before_open(play: Any) -> None:
    async def scenario(actor: _PipelineActor, executions: list[FakeExecution]) -> None:
        await actor.close("pipeline")
        await actor.open("pipeline", SPEC, "first")
        assert executions == []
        assert await ask(actor) is None

    play(scenario)


def test_a_pipeline_that_cannot_open_raises_in_every_call(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no thread")

    async def scenario(actor: _PipelineActor, _: Any) -> None:
        taking = await started(take(actor))
        monkeypatch.setattr(actor_module, "Execution", refuse)
        await actor.open("pipeline", SPEC, "first")
        for call in (taking, actor.begin("pipeline", "second")):
            with pytest.raises(OSError, match="no thread"):
                await call
        await actor.close("pipeline")

    play(scenario)


def test_only_the_latest_closed_pipelines_are_remembered(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MOST_REMEMBERED", 2)

    async def scenario(actor: _PipelineActor, _: Any) -> None:
        for key in "abc":
            await actor.close(key)
        assert list(actor._closed) == ["b", "c"]

    play(scenario)


@pytest.mark.usefixtures("shared_ray")
def test_only_the_pipeline_actor_keeps_ray_data_from_running_tasks_in_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    def value(_: Any = None) -> str | None:
        return os.environ.get(ACTOR_ONLY)

    monkeypatch.setenv(ACTOR_ONLY, "1")
    handle = get_pipeline_actor(None).handle
    assert ray.get(handle.__ray_call__.remote(value)) == "0"
    assert value() == "1", "in the training process"
    assert ray.get(ray.remote(num_cpus=0)(value).remote()) != "0", "in a worker process"
