"""Resume states as a test, a user or a fault may have altered them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dpex.training.state_checksum import state_checksum

VALUES = (
    *(None, True, -3, -1, 0, 1, 10**9, 2**63, 6.0, math.nan, "", "6", "AAAA", "é"),
    *([], [3], [6], [3, -1], ["3"], {}, {"a": 1}, np.int64(6), torch.tensor(6)),
)


def altered(state: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return a state with other values, and with the checksum of these values."""
    own = {**copy.deepcopy(state), **change}
    own.pop("checksum", None)
    return {**own, "checksum": state_checksum(own)}


def alterations(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Change, remove or add one part of a state; yield the name and the result of each change."""
    for name, changed in _each(state):
        if isinstance(changed, dict) and changed:
            yield name, changed


def _each(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield "+unknown", {**value, "unknown": 1}
        for key, each in value.items():
            yield f"-{key}", {name: value[name] for name in value if name != key}
            for name, other in _each(each):
                yield f"{key}.{name}", {**value, key: other}
    elif isinstance(value, list):
        yield "[:-1]", value[:-1]
        yield "[+1]", [*value, *value[:1], 0]
        yield "[::-1]", value[::-1]
        for at, each in enumerate(value):
            for name, other in _each(each):
                yield f"[{at}].{name}", [*value[:at], other, *value[at + 1 :]]
    elif isinstance(value, str):
        yield "cut", value[:20]
        yield "reversed", value[::-1]
    yield from _replacements(value)


def _replacements(value: Any) -> Iterator[tuple[str, Any]]:
    others = list(VALUES)
    if type(value) is int:
        others += [value + 1, value - 1, float(value), np.int64(value), torch.tensor(value)]
    elif type(value) is bool:
        others.append(not value)
    for other in others:
        yield f"={other!r}", other
