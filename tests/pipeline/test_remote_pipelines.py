"""Tests of a session's pipelines with a fake pipeline actor: reuse, and what is closed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError

from dpex.pipeline.dataset import PipelineSpec
from dpex.pipeline.remote_pipelines import ACTOR_LOST, Claim, PipelineBegins, RemotePipelines
from dpex.worker.logical_worker import Run
from dpex.worker.training_settings import Settings

SPEC = PipelineSpec([], "job", "actor")
RUN = Run("first", "loader", 7, 0, 2, 0, Settings(".", torch.float32))


class FakePipelineActor:
    """A pipeline actor that records its calls."""

    alive = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.handle = self

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)

    def names(self, *pipelines: PipelineBegins) -> list[tuple[str, int]]:
        """Return the calls, each with the number of its pipeline; forget them.

        They leave out ``cancel``, which comes only if this process is connected to a Ray.
        """
        keys = [begins.pipeline.key for begins in pipelines]
        calls = [(name, keys.index(key)) for name, key in self.calls if name != "cancel"]
        self.calls.clear()
        return calls


class Method:
    def __init__(self, actor: FakePipelineActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, pipeline_key: str, *_: Any) -> str:
        self._actor.calls.append((self._name, pipeline_key))
        return self._name


class Nodes:
    """Nodes that pass on the pipeline actor's answers."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def answered(self, ref: str) -> Any:
        assert ref == "begin"
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def pipelines_of(*answers: Any) -> tuple[FakePipelineActor, RemotePipelines]:
    actor: Any = FakePipelineActor()
    nodes: Any = Nodes(*answers)
    return actor, RemotePipelines(actor, nodes)


def test_an_idle_pipeline_serves_the_next_run() -> None:
    actor, pipelines = pipelines_of(True, True)
    claim = Claim()
    first = pipelines.begin(RUN, SPEC, claim)
    assert pipelines.begun(first)
    for _ in range(2):
        del claim
        claim = Claim()
        again = pipelines.begin(RUN, SPEC, claim)
        assert pipelines.begun(again)
        assert again.pipeline is first.pipeline
    assert actor.names(first) == [("open", 0), ("begin", 0), ("begin", 0)]


def test_a_pipeline_serves_one_run_at_a_time() -> None:
    actor, pipelines = pipelines_of()
    claims = [Claim(), Claim()]
    first, second = (pipelines.begin(RUN, SPEC, claim) for claim in claims)
    assert actor.names(first, second) == [("open", 0), ("open", 1)]


def test_a_pipeline_of_another_job_is_closed() -> None:
    actor, pipelines = pipelines_of()
    claim = Claim()
    first = pipelines.begin(RUN, SPEC, claim)
    del claim
    claim = Claim()
    second = pipelines.begin(RUN, replace(SPEC, job_key="another"), claim)
    assert actor.names(first, second) == [("open", 0), ("close", 0), ("open", 1)]


def test_one_of_two_idle_pipelines_is_closed() -> None:
    actor, pipelines = pipelines_of(True)
    claims = [Claim(), Claim()]
    first, second = (pipelines.begin(RUN, SPEC, claim) for claim in claims)
    claims.clear()
    claim = Claim()
    assert pipelines.begin(RUN, SPEC, claim).pipeline is first.pipeline
    assert actor.names(first, second)[2:] == [("begin", 0), ("close", 1)]


def test_a_pipeline_that_does_not_begin_is_closed() -> None:
    """It is broken, or still works for a cancelled run."""
    actor, pipelines = pipelines_of(False)
    claim = Claim()
    first = pipelines.begin(RUN, SPEC, claim)
    del claim
    claim = Claim()
    assert not pipelines.begun(pipelines.begin(RUN, SPEC, claim))
    second = pipelines.new(RUN, SPEC, claim)
    assert actor.names(first, second) == [("open", 0), ("begin", 0), ("close", 0), ("open", 1)]


def test_a_pipeline_whose_answer_was_not_awaited_is_closed() -> None:
    """After an interrupt, the pipeline may begin the run late."""
    actor, pipelines = pipelines_of()
    claim = Claim()
    first = pipelines.begin(RUN, SPEC, claim)
    del claim
    claim = Claim()
    pipelines.begin(RUN, SPEC, claim)
    del claim
    claim = Claim()
    second = pipelines.begin(RUN, SPEC, claim)
    assert actor.names(first, second) == [("open", 0), ("begin", 0), ("close", 0), ("open", 1)]


def test_a_dead_actor_is_an_error_for_the_session() -> None:
    _, pipelines = pipelines_of(ActorDiedError())
    claim = Claim()
    pipelines.begin(RUN, SPEC, claim)
    del claim
    claim = Claim()
    begins = pipelines.begin(RUN, SPEC, claim)
    with pytest.raises(ACTOR_LOST):
        pipelines.begun(begins)


@pytest.mark.parametrize("alive", [True, False])
def test_close_closes_all_pipelines_of_a_live_actor(alive: bool) -> None:
    actor, pipelines = pipelines_of()
    claims = [Claim(), Claim()]
    begun = [pipelines.begin(RUN, SPEC, claim) for claim in claims]
    actor.names(*begun)
    actor.alive = alive
    for _ in range(2):
        pipelines.close()
    assert actor.names(*begun) == ([("close", 0), ("close", 1)] if alive else [])
