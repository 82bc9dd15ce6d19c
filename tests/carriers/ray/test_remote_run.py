"""Tests of one run with a fake receiver: when it waits in vain, and what can replace it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError

from dpex import tuning
from dpex.carriers.ray import remote_run
from dpex.carriers.ray.remote_run import RemoteRun
from dpex.errors import ClusterError

BATCH_S = 5.0


class FakeReceiver:
    """A receiver that receives nothing."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.replaceable = False
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


class FakeNodes:
    """Nodes of which one died at ``died_at``, or this process's own one did."""

    died_at = 0.0
    error: ClusterError | None = None

    def look(self) -> None:
        if self.error is not None:
            raise self.error


class Made:
    """A run that began at 100 s, with all that it uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(remote_run, "time", clock)
        self.receiver = FakeReceiver()
        self.nodes = FakeNodes()
        self.actor = SimpleNamespace(lost=False)
        self.cancelled = 0
        self.lost_with_node = False
        monkeypatch.setattr("dpex.wire.receiver.Receiver", lambda *_, **__: self.receiver)
        given: Any = self
        self.run = RemoteRun(
            given.actor,
            "pipeline",
            "run",
            given.nodes,
            given,
            pin_device=None,
            through_client=False,
            persistent=True,
        )

    def cancel(self) -> None:
        self.cancelled += 1

    def abandon_pipeline(self) -> None:
        self.lost_with_node = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def test_a_run_is_given_up_if_nothing_comes_after_a_node_s_death(made: Made) -> None:
    made.nodes.died_at = 110.0
    made.now = 110.0 + tuning.NODE_REPLACED_S + BATCH_S - 1
    assert not made.run.lost_with_node(BATCH_S)
    made.now += 2
    assert not made.lost_with_node
    assert made.run.lost_with_node(BATCH_S)
    assert isinstance(made.run.failure(), NodeDiedError)
    assert made.run.lost
    assert made.lost_with_node, "the pipeline serves no further run"


def test_a_block_after_a_node_s_death_shows_that_the_run_continues(made: Made) -> None:
    made.nodes.died_at = 110.0
    made.run.arrivals.arrived_at = made.now = 110.0 + tuning.NODE_REPLACED_S
    made.now += tuning.NODE_REPLACED_S
    assert not made.run.lost_with_node(BATCH_S)
    assert made.run.failure() is None


def test_a_death_before_the_run_does_not_matter(made: Made) -> None:
    made.nodes.died_at = 99.0
    made.now = 1000.0
    assert not made.run.lost_with_node(BATCH_S)


def test_no_pipeline_replaces_this_process_s_node(made: Made) -> None:
    made.nodes.error = ClusterError("the node has died")
    assert made.run.lost_with_node(BATCH_S)
    assert made.run.failure() is made.nodes.error
    assert not made.run.lost


@pytest.mark.parametrize(
    ("failure", "lost", "actor_lost"),
    [
        (ActorDiedError(), True, True),
        (ray.exceptions.ActorUnavailableError("connection reset", None), True, True),
        (ObjectLostError("00", "", ""), True, False),
        (NodeDiedError("died"), True, False),
        (ValueError("a bug"), False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_new_pipeline_replaces_a_lost_one(
    failure: Exception, lost: bool, actor_lost: bool, made: Made
) -> None:
    made.run.receiver.failure = failure
    assert made.run.failure() is failure
    assert made.run.lost == lost
    assert made.actor.lost == actor_lost


def test_the_public_way_replaces_a_private_name_that_failed(made: Made) -> None:
    assert not made.run.lost
    made.receiver.replaceable = True
    assert made.run.lost


def test_a_run_ends_once_and_its_claim_is_dropped(made: Made) -> None:
    _ = made.run.receiver
    for _ in range(2):
        made.run.end()
    assert (made.cancelled, made.receiver.stopped) == (1, 1)
    assert made.run not in remote_run._open_runs


def test_a_run_that_nobody_has_any_more_stops_its_receiver(made: Made) -> None:
    assert made.run.receiver is made.receiver
    assert made.receiver.stopped == 0
    del made.run
    assert made.receiver.stopped == 1
