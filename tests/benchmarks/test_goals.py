"""Tests of the goals of benchmarks: the worst of several points, and void points."""

from __future__ import annotations

import pytest

from benchmarks.goals import VOID, Goal, Relation, worst


def point(value: float, relation: Relation = "<=", note: str | None = None) -> Goal:
    return Goal.of("nodes", "a ratio", [value], relation, 1.0, "ratio", note)


@pytest.mark.parametrize(("relation", "value"), [("<=", 1.2), (">=", 0.8)])
def test_the_worst_point_counts(relation: Relation, value: float) -> None:
    points = {f"at {each}": point(each, relation, "a note") for each in (0.8, 1.0, 1.2)}
    found = worst(points)
    assert (found.value, found.verdict, found.what) == (value, "missed", "a ratio")
    others = ", ".join(f"at {each} {each:.2f}" for each in (0.8, 1.0, 1.2) if each != value)
    assert found.note == f"worst: at {value}; {others}; a note"


def test_void_points_count_only_if_all_points_are_void() -> None:
    void = point(2.0, note=VOID)
    found = worst({"1 node": point(0.9), "2 nodes": void})
    assert (found.value, found.verdict) == (0.9, "met")
    assert found.note == "worst: 1 node; 2 nodes void"
    assert worst({"1 node": void, "2 nodes": void}).verdict == "void"
