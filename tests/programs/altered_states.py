"""Resume states as a test, a user or a fault may have altered them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dpex.training.state_checksum import state_checksum

# Parts of a state that come from samplers, datasets and iterators. Only they know what fits.
OPAQUE = ("samplers", "dataset", "iterator")
NUMBERS = (-3, -1, 0, 1, 10**9, 2**63, 2**70, "6", 6.0, 2.5, None, True, [6], {}, math.nan)
OTHERS = (None, "", "AAAA", "!!", "é", 5, True, 2.5, [], [3], [3, -1], ["3"], {}, {"a": 1})


def altered(state: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return a state with other values, and with the checksum of these values."""
    own = {**copy.deepcopy(state), **change}
    own.pop("checksum", None)
    return {**own, "checksum": state_checksum(own)}


def of_version_1(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as version 1 had it, which had no checksum."""
    own = {key: value for key, value in state.items() if key not in ("checksum", "resized")}
    return {**own, "version": 1}


def alterations(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield states in which one field differs, is missing or is new, with what was altered."""
    own = {key: value for key, value in state.items() if key not in ("version", "checksum")}
    for name, changed in _each(own):
        yield name, {**changed, "version": state["version"]}


def _each(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield "+unknown", {**value, "unknown": 1}
        for key, each in value.items():
            yield f"-{key}", {name: value[name] for name in value if name != key}
            inner = _replacements(each) if key in OPAQUE else _each(each)
            for name, other in inner:
                yield f"{key}.{name}", {**value, key: other}
    elif isinstance(value, list):
        yield "[:-1]", value[:-1]
        yield "[+1]", [*value, *value[:1], 0]
        yield "[::-1]", value[::-1]
        for at, each in enumerate(value):
            for name, other in _each(each):
                yield f"[{at}].{name}", [*value[:at], other, *value[at + 1 :]]
    if isinstance(value, str):
        yield "cut", value[:20]
        yield "reversed", value[::-1]
        yield "one character", value[:4] + chr(ord(value[4]) ^ 1) + value[5:]
    yield from _replacements(value)


def _replacements(value: Any) -> Iterator[tuple[str, Any]]:
    for other in (*NUMBERS, *OTHERS, torch.tensor(6), np.int64(6)):
        yield f"={other!r}", other
    if type(value) is int:
        for other in (value + 1, value - 1, float(value), np.int64(value), torch.tensor(value)):
            yield f"={other!r}", other
    if type(value) is bool:
        yield f"={not value}", not value
