"""Tests of the dict that keeps its latest entries only."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from dpex.recent import Recent


def test_entries_that_were_set_last_stay() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    recent["c"] = 4
    assert dict(recent) == {"a": 3, "c": 4}


@pytest.mark.parametrize("duplicate", [lambda r: pickle.loads(pickle.dumps(r)), copy.deepcopy])
def test_a_copy_has_the_same_entries_order_and_limit(
    duplicate: Callable[[Recent[str, int]], Recent[str, int]],
) -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    same = duplicate(recent)
    assert list(same.items()) == [("b", 2), ("a", 3)]
    same["c"] = 4
    assert list(same.items()) == [("a", 3), ("c", 4)]
    assert list(recent) == ["b", "a"]
