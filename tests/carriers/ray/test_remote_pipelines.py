"""Tests of a session's pipelines with a fake pipeline actor: reuse, and what is closed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from fake_actor import FakeNodes, FakePipelineActor
from ray.exceptions import ActorDiedError, RayTaskError

from dpex.carriers.ray.ray_dataset import PipelineSpec
from dpex.carriers.ray.remote_pipelines import (
    ACTOR_LOST,
    PipelineStart,
    RemotePipelines,
    RunToken,
    warn_of_holders,
)
from dpex.worker.process_identity import process_name

JOB: Any = "a reference"
SPEC = PipelineSpec([JOB], "job", "actor")
RUN = "first"


def pipelines_of(actor: FakePipelineActor) -> RemotePipelines:
    fake: Any = actor
    nodes: Any = FakeNodes()
    return RemotePipelines(fake, nodes)


def names(actor: FakePipelineActor, *pipelines: PipelineStart) -> list[tuple[str, int]]:
    """Return the actor's calls, each with the number of its pipeline, and forget them."""
    keys = [begins.pipeline.key for begins in pipelines]
    calls = [(method, keys.index(key)) for method, key, *_ in actor.calls]
    actor.calls.clear()
    return calls


def test_an_idle_pipeline_serves_the_next_run() -> None:
    actor = FakePipelineActor()
    pipelines = pipelines_of(actor)
    token = RunToken()
    first = pipelines.begin(RUN, SPEC, token)
    assert pipelines.begun(first)
    for _ in range(2):
        del token
        token = RunToken()
        again = pipelines.begin(RUN, SPEC, token)
        assert pipelines.begun(again)
        assert again.pipeline is first.pipeline
    assert names(actor, first) == [("open", 0), ("begin", 0), ("begin", 0)]


def test_a_pipeline_serves_one_run_at_a_time() -> None:
    actor = FakePipelineActor()
    pipelines = pipelines_of(actor)
    tokens = [RunToken(), RunToken()]
    first, second = (pipelines.begin(RUN, SPEC, token) for token in tokens)
    assert names(actor, first, second) == [("open", 0), ("open", 1)]


def test_a_pipeline_of_another_job_is_closed() -> None:
    actor = FakePipelineActor()
    pipelines = pipelines_of(actor)
    token = RunToken()
    first = pipelines.begin(RUN, SPEC, token)
    del token
    token = RunToken()
    second = pipelines.begin(RUN, replace(SPEC, job_key="another"), token)
    assert names(actor, first, second) == [("open", 0), ("close", 0), ("open", 1)]


def test_a_pipeline_that_lost_a_node_serves_no_further_run() -> None:
    actor = FakePipelineActor()
    pipelines = pipelines_of(actor)
    token = RunToken()
    first = pipelines.begin(RUN, SPEC, token)
    token.abandon_pipeline()
    del token
    token = RunToken()
    second = pipelines.begin(RUN, SPEC, token)
    assert names(actor, first, second) == [("open", 0), ("close", 0), ("open", 1)]


def test_one_of_two_idle_pipelines_is_closed() -> None:
    actor = FakePipelineActor()
    pipelines = pipelines_of(actor)
    tokens = [RunToken(), RunToken()]
    first, second = (pipelines.begin(RUN, SPEC, token) for token in tokens)
    tokens.clear()
    token = RunToken()
    assert pipelines.begin(RUN, SPEC, token).pipeline is first.pipeline
    assert names(actor, first, second)[2:] == [("begin", 0), ("close", 1)]


def test_a_pipeline_that_does_not_begin_is_closed() -> None:
    """It is broken, or still works for a cancelled run."""
    actor = FakePipelineActor(begin=(False, False))
    pipelines = pipelines_of(actor)
    token = RunToken()
    first = pipelines.begin(RUN, SPEC, token)
    del token
    token = RunToken()
    assert not pipelines.begun(pipelines.begin(RUN, SPEC, token))
    second = pipelines.new(RUN, SPEC, token)
    assert names(actor, first, second) == [
        ("open", 0),
        ("begin", 0),
        ("close", 0),
        ("open", 1),
    ]


class FailedToOpen(RayTaskError):
    def __init__(self) -> None:
        super().__init__("open", "", LookupError())


@pytest.mark.parametrize(
    ("answer", "lost"),
    [((False, True), True), ((False, False), False), (FailedToOpen, False)],
)
def test_a_pipeline_that_does_not_begin_says_if_state_is_lost(
    answer: Any, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pipelines = pipelines_of(FakePipelineActor(begin=answer))
    token = RunToken()
    pipelines.begin(RUN, SPEC, token)
    del token
    token = RunToken()
    assert not pipelines.begun(pipelines.begin(RUN, SPEC, token))
    assert ("persistent workers of the last epoch are lost" in caplog.text) == lost


def test_a_pipeline_whose_answer_was_not_awaited_is_closed() -> None:
    """After an interrupt, the pipeline may begin the run late."""
    actor = FakePipelineActor()
    pipelines = pipelines_of(actor)
    token = RunToken()
    first = pipelines.begin(RUN, SPEC, token)
    del token
    token = RunToken()
    pipelines.begin(RUN, SPEC, token)
    del token
    token = RunToken()
    second = pipelines.begin(RUN, SPEC, token)
    assert names(actor, first, second) == [("open", 0), ("begin", 0), ("close", 0), ("open", 1)]


def test_a_dead_actor_is_an_error_for_the_session() -> None:
    actor = FakePipelineActor(begin=ActorDiedError)
    pipelines = pipelines_of(actor)
    token = RunToken()
    pipelines.begin(RUN, SPEC, token)
    del token
    token = RunToken()
    begins = pipelines.begin(RUN, SPEC, token)
    with pytest.raises(ACTOR_LOST):
        pipelines.begun(begins)


@pytest.mark.parametrize("alive", [True, False])
def test_close_closes_all_pipelines_of_a_live_actor(alive: bool) -> None:
    actor = FakePipelineActor()
    pipelines = pipelines_of(actor)
    tokens = [RunToken(), RunToken()]
    begun = [pipelines.begin(RUN, SPEC, token) for token in tokens]
    names(actor, *begun)
    actor.connected = alive
    for _ in range(2):
        pipelines.close()
    assert names(actor, *begun) == ([("close", 0), ("close", 1)] if alive else [])


def test_the_warning_names_process_and_node(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_holders([process_name()])
    [text] = caplog.messages
    assert f"worker process {os.getpid()} on node {os.uname().nodename} still holds" in text
