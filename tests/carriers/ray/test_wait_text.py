"""Tests of the text that explains why a batch is late."""

from __future__ import annotations

from typing import Any

import pytest

from dpex.carriers.ray.wait_text import likely_cause, wait_text

KNOWN: dict[str, Any] = {"tasks": 0, "cpus": 8, "free_cpus": 4, "lacking": None, "users": ""}


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        ({"cpus": 0, "free_cpus": 0}, "The cluster has no CPU yet"),
        ({"lacking": "{'disk': 1}, but no node has it"}, "worker_options asks for {'disk': 1}"),
        ({"tasks": 2, "free_cpus": 0}, "The samples may be slow"),
        ({"tasks": None}, "does not answer"),
        ({"free_cpus": 0.5, "users": "3 x train"}, "others use the CPUs (3 x train)"),
        ({"free_cpus": 0}, "others use the CPUs (no task or actor on this node)"),
        ({}, "worker processes are starting"),
        ({"free_cpus": None}, "worker processes are starting"),
    ],
)
def test_the_likely_cause(known: dict[str, Any], cause: str) -> None:
    assert cause in likely_cause(**{**KNOWN, **known})


def test_the_text_counts_tasks_and_batches() -> None:
    text = wait_text("local Ray on 2 cores", tasks=1, in_flight=1_200, cause="Why")
    assert text == "Local Ray on 2 cores, 1 task running, 1,200 batches in flight. Why"
    text = wait_text("Ray at 10.0.0.5:6379: 3 nodes, 96 CPUs", tasks=None, in_flight=1, cause="Why")
    assert text == "Ray at 10.0.0.5:6379: 3 nodes, 96 CPUs, 1 batch in flight. Why"
