"""Tests of the checksum of resume states: what changes it, and what must not."""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpex.training.state_checksum import state_checksum


@dataclass
class Own:
    """An object that a user's sampler puts into its state."""

    value: Any


TEXTS: dict[str, Any] = {
    "numbers": [0, -1, 2**70, 1.5, -0.0, float("inf"), float("nan")],
    "texts": ["", "é", "\ud800"],
    "constants": [None, True, False],
    "nested": {"a": {"b": [[], {}]}, "c": (1, (2, 3))},
    "keys": {7: "seven", None: "none", True: "true", 2.5: "half"},
}
DATA: dict[str, Any] = {
    **TEXTS,
    "bytes": [b"\x00\xff", bytearray(b"x")],
    "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16)],
    "views": [torch.arange(12).reshape(3, 4).T[::2], torch.zeros(0, 3)],
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
OBJECTS: dict[str, Any] = {
    **DATA,
    "arrays": [np.arange(6.0).reshape(2, 3), np.array(["a", None], dtype=object)],
    "scalars": [np.float32(0.5), np.int64(3), np.bool_(True)],
    "sets": [{3, 1, 2}, frozenset("ab")],
    "objects": [Own(1), OrderedDict(b=1, a=2), int, torch.arange(3).to_sparse(), 2 + 3j],
}


def saved(value: Any, path: Path, *, weights_only: bool) -> Any:
    torch.save(value, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=weights_only)


def test_copies_have_the_same_checksum(tmp_path: Path) -> None:
    for content in (TEXTS, DATA, OBJECTS):
        known = state_checksum(content)
        assert state_checksum(copy.deepcopy(content)) == known
        assert state_checksum(dict(reversed(content.items()))) == known
        for protocol in (2, 5):
            assert state_checksum(pickle.loads(pickle.dumps(content, protocol))) == known
        assert state_checksum(saved(content, tmp_path, weights_only=False)) == known
    assert state_checksum(saved(DATA, tmp_path, weights_only=True)) == state_checksum(DATA)
    assert state_checksum(json.loads(json.dumps(TEXTS))) == state_checksum(TEXTS)


def test_the_checksum_does_not_change_from_release_to_release() -> None:
    content = {**DATA, "b": [1, 2.5, None, True, "x"], "array": np.arange(3, dtype="<i4")}
    assert state_checksum(content) == KNOWN


KNOWN = "c80619cc65a41f0af7210bb5921de0f00507689089fa1b5157fbb2fb2f3877c9"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0, None),
        (0.0, -0.0),
        ("1", 1),
        ("a", b"a"),
        (["ab", "c"], ["a", "bc"]),
        ([[1], 2], [[1, 2]]),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 1, "b": None}),
        ({"a": 1}, {"b": 1}),
        ([], {}),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), np.zeros(2, np.float32)),
        (torch.zeros(2), torch.tensor([0.0, 1.0])),
        (np.zeros(2), np.array([0, 5e-324])),
        (np.array([None, 1], object), np.array([None, 2], object)),
        (Own(1), OrderedDict()),
    ],
    ids=str,
)
def test_other_content_has_another_checksum(one: Any, other: Any) -> None:
    assert state_checksum({"state": one}) != state_checksum({"state": other})


def test_objects_that_contain_themselves_have_a_checksum() -> None:
    one: list[Any] = [1]
    one.append({"one": one})
    other = copy.deepcopy(one)
    assert state_checksum(one) == state_checksum(other)
    other[0] = 2
    assert state_checksum(one) != state_checksum(other)


def test_the_same_object_may_come_twice() -> None:
    each = [1]
    assert state_checksum([each, each]) == state_checksum([[1], [1]])
