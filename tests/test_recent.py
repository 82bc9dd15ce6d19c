"""Tests of the dict that keeps its latest entries only."""

from __future__ import annotations

from dpex.recent import Recent


def test_entries_that_were_set_last_stay() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    recent["c"] = 4
    assert dict(recent) == {"a": 3, "c": 4}
