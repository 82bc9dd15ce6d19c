"""Tests of the choice between tasks and actors of Ray Data."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray.data
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace

from dpex import tuning
from dpex.carriers.ray.tasks_or_actors import (
    IN_ACTORS,
    StartWatch,
    TaskPools,
    has_room,
    wants_actors,
)

PUBLIC_PROGRAM = PROGRAMS / "public_ray_program.py"


@pytest.fixture
def pools() -> TaskPools:
    return TaskPools()


def test_pipelines_run_in_tasks_by_default(
    pools: TaskPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(IN_ACTORS, raising=False)
    assert pools.check()
    assert not wants_actors()
    monkeypatch.setenv(IN_ACTORS, "1")
    assert wants_actors()


def test_a_ray_without_tasks_is_one_warning(
    pools: TaskPools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(ray.data, "TaskPoolStrategy")
    with caplog.at_level(logging.WARNING, "dpex"):
        assert [pools.check(), pools.check()] == [False, False]
    [said] = caplog.messages
    assert "TaskPoolStrategy" in said
    assert ray.__version__ in said


def test_a_strategy_that_raises_is_one_that_ray_lacks(
    pools: TaskPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(size: int | None = None) -> Any:
        raise NotImplementedError("use actors")

    monkeypatch.setattr(ray.data, "TaskPoolStrategy", removed)
    assert not pools.check()


def test_tasks_are_tried_again_if_actors_fail_too(pools: TaskPools) -> None:
    pools.fail(ValueError("of the options"))
    assert not pools.check()
    pools.actors_failed()
    assert pools.check()


def found_stuck(*looks: tuple[float, int, bool]) -> list[bool]:
    watch = StartWatch(0.0)
    limit = tuning.TASKS_START_S
    return [watch.stuck(part * limit, pending, room=room) for part, pending, room in looks]


def test_tasks_that_do_not_start_although_there_is_room_are_found() -> None:
    assert found_stuck((0.1, 2, True), (1.0, 2, True), (1.11, 2, True)) == [False, True, True]
    assert found_stuck((0.1, 0, True), (1.0, 2, True), (1.2, 2, True)) == [False, False, True]


def test_tasks_that_wait_for_room_are_not_stuck() -> None:
    assert not any(found_stuck((0.5, 2, False), (1.1, 2, True), (1.4, 2, True)))
    assert not any(found_stuck((0.5, 2, True), (1.4, 2, False), (2.3, 2, True)))


def test_tasks_of_which_some_start_are_not_stuck() -> None:
    assert not any(found_stuck((0.5, 3, True), (1.1, 2, True), (1.9, 1, True)))
    assert not any(found_stuck((0.5, 1, True), (1.1, 0, True)))


@pytest.mark.parametrize(
    ("options", "free", "nodes", "room"),
    [
        ({}, {"CPU": 1.0}, 1, True),
        ({}, {"CPU": 1.0}, 2, False),  # half a CPU may be free on each
        ({}, {"CPU": 2.0}, 2, True),
        ({}, {}, 1, False),
        ({"num_cpus": 0}, {}, 3, True),
        ({"num_cpus": 0, "memory": 10}, {"memory": 19.0}, 2, False),
        ({"num_cpus": None, "runtime_env": {}}, {}, 1, True),
        ({"resources": {"tape": 1}}, {"CPU": 9.0, "tape": 9.0}, 1, False),
        ({"label_selector": {"kind": "cpu"}}, {"CPU": 9.0}, 1, False),
    ],
)
def test_room_counts_only_if_some_node_must_have_it(
    options: dict[str, Any], free: dict[str, float], nodes: int, room: bool
) -> None:
    assert has_room(options, free, nodes) is room


@pytest.mark.extended
@pytest.mark.multiprocess
def test_results_are_the_same_in_actors() -> None:
    with workplace() as place:
        done = run_program(PUBLIC_PROGRAM, place=place, seconds=PROGRAM_SECONDS, **{IN_ACTORS: "1"})
        assert "all as it should be" in done.stdout, done.stdout[-3000:] + done.stderr[-5000:]
