"""Tests of messages to a pipeline actor whose connection breaks."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from dpex import tuning
from dpex.protocol.loss_causes import LossCause
from dpex.worker import actor_calls
from dpex.worker.actor_calls import Arrived, Messages, Patience, loss_of


class Answer:
    def __init__(self, error: Exception | None) -> None:
        self._future: Future[None] = Future()
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    def future(self) -> Future[None]:
        return self._future


class FakePipelineActor:
    """A pipeline actor that answers each call with the next error, and then without error."""

    def __init__(self, *errors: Exception | None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._errors = list(errors)
        self.accept = self

    def remote(self, *arguments: Any) -> Answer:
        values, _ = pickle.loads(arguments[0])
        self.calls.append(values)
        return Answer(self._errors.pop(0) if self._errors else None)


def away() -> ActorUnavailableError:
    return ActorUnavailableError("connection reset", None)


def messages_to(monkeypatch: pytest.MonkeyPatch, actor: FakePipelineActor) -> Messages:
    monkeypatch.setattr(actor_calls, "pipeline_actor", {"actor": actor}.__getitem__)
    monkeypatch.setattr(tuning, "PAUSE_S", 0.0)
    return Messages("actor", "pipeline")


def test_a_message_is_resent_until_the_pipeline_actor_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = FakePipelineActor(away(), None, away(), away())
    messages = messages_to(monkeypatch, actor)
    for block in "ab":
        messages.send("block", block)
    messages.confirm()
    assert [block for *_, (block,) in actor.calls] == ["a", "b", "a", "a", "a"]
    # The pipeline actor recognizes a repeated message by its sender and number.
    assert len({call[1] for call in actor.calls}) == 2


def test_a_chunk_waits_for_the_messages_of_earlier_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = FakePipelineActor(away(), away())
    messages = messages_to(monkeypatch, actor)
    messages.send("block", "earlier")
    messages.begin_chunk()
    messages.send("block", "latest")
    messages.confirm_earlier()
    assert [block for *_, (block,) in actor.calls] == ["earlier", "latest", "earlier"]
    messages.confirm()
    assert [block for *_, (block,) in actor.calls][3:] == ["latest"]


def test_no_more_messages_are_in_flight_than_the_pipeline_actor_remembers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = FakePipelineActor(away())
    messages = messages_to(monkeypatch, actor)
    for number in range(100):
        messages.send("block", number)
    again = [block for *_, (block,) in actor.calls].index(0, 1)
    assert again == tuning.MOST_UNANSWERED + 1
    arrived = Arrived()
    assert all(arrived.add(message) for _, message, *_ in actor.calls[:again])
    assert not arrived.add(actor.calls[again][1])


def test_a_pipeline_actor_that_has_died_needs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = FakePipelineActor(away(), ActorDiedError())
    messages = messages_to(monkeypatch, actor)
    messages.send("block", "a")
    messages.confirm()
    assert len(actor.calls) == 2


def test_a_pipeline_actor_that_stays_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = messages_to(monkeypatch, FakePipelineActor(*(away() for _ in range(1000))))
    times = iter(range(1000))
    monkeypatch.setattr(actor_calls.time, "monotonic", lambda: float(next(times)))
    messages.send("block", "a")
    with pytest.raises(ActorUnavailableError, match="connection reset"):
        messages.confirm()
    assert next(times) == tuning.ACTOR_AWAY_S + 2


def test_a_call_that_has_waited_has_its_patience_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PAUSE_S", 0.0)
    now = 0.0
    monkeypatch.setattr(actor_calls.time, "monotonic", lambda: now)
    patience = Patience()
    for _ in range(10):
        patience.wait(away())
        now += tuning.ACTOR_AWAY_S + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_has_a_name_of_its_own() -> None:
    ours = actor_calls._sender()
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.write(writable, actor_calls._sender().encode())
        os._exit(0)
    os.close(writable)
    assert os.read(readable, 64).decode() != ours
    os.close(readable)


class TestLossOf:
    full = ray.exceptions.OutOfDiskError("full")

    def test_the_object_store_itself_is_full(self) -> None:
        loss = loss_of(self.full)
        assert loss.cause is LossCause.STORE_FULL
        assert loss.text.startswith("OutOfDiskError: ")

    @pytest.mark.parametrize("dual", [False, True])
    def test_a_task_found_it_full(self, dual: bool) -> None:
        error = ray.exceptions.RayTaskError("make_batches", "its traceback", self.full)
        assert loss_of(error.as_instanceof_cause() if dual else error).cause is LossCause.STORE_FULL

    def test_an_error_was_raised_from_it(self) -> None:
        error = ray.exceptions.RaySystemError("the execution failed")
        error.__cause__ = self.full
        assert loss_of(error).cause is LossCause.STORE_FULL

    def test_any_link_may_lead_to_it(self) -> None:
        error = ray.exceptions.RayTaskError("make_batches", "its traceback", self.full)
        error.__cause__ = RuntimeError("another")
        assert loss_of(error).cause is LossCause.STORE_FULL

    def test_links_may_be_circular_or_no_errors(self) -> None:
        error: Any = RuntimeError("circular")
        error.__context__ = other = RuntimeError("other")
        other.__context__ = error
        error.cause = "no error"
        assert loss_of(error).cause is LossCause.TASK

    def test_anything_else_is_a_failed_task(self) -> None:
        for error in (RuntimeError("OutOfDiskError"), ray.exceptions.WorkerCrashedError()):
            assert loss_of(error).cause is LossCause.TASK
