"""Tests of the environment that a worker process takes over from its training process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dpex.worker import environment

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.fixture
def affinity() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, CORES)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores that this process may use")
def test_cores_are_taken_over_once(monkeypatch: pytest.MonkeyPatch, affinity: None) -> None:
    monkeypatch.setattr(environment, "_taken_over", frozenset())
    first, second = CORES[:2]
    environment.take_over(((), None, frozenset({first})))
    assert os.sched_getaffinity(0) == {first}
    os.sched_setaffinity(0, {second})  # as worker_init_fn may do
    environment.take_over(((), None, frozenset({first})))
    assert os.sched_getaffinity(0) == {second}
    environment.take_over(((), None, frozenset({first, second})))
    assert os.sched_getaffinity(0) == {first, second}


def test_the_differences_are_those_of_the_user_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dict(os.environ)
    monkeypatch.setenv("OWN", "a=b")
    monkeypatch.setenv("RAY_OWN", "1")
    monkeypatch.delenv("PATH")
    assert environment.differences(other) == (("OWN", "a=b"), ("PATH", None))


def test_what_ray_s_processes_may_have_inherited_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_inherited", [])
    environment.remember()
    with environment.while_ray_starts():
        monkeypatch.setenv("SET_AT_ITER", "1")
        monkeypatch.setenv("PYTHONHASHSEED", "0")  # by dpex, for Ray
        assert environment.changes()[0] == (("SET_AT_ITER", "1"),)
        monkeypatch.delenv("SET_AT_ITER")
        monkeypatch.setenv("SET_AT_END", "2")
        monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.delenv("SET_AT_END")
    assert environment.changes()[0] == (("SET_AT_END", None), ("SET_AT_ITER", None))
