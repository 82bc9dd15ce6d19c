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
DRAWS = ("before_iter", "before_first", "generators")
VALUES = (
    *(None, True, -3, -1, 0, 1, 10**9, 2**63, 6.0, math.nan, "", "6", "AAAA", "é"),
    *([], [3], [6], [3, -1], ["3"], {}, {"a": 1}, np.int64(6), torch.tensor(6)),
)


def altered(state: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return a state with other values, and with the checksum of these values."""
    own = {**copy.deepcopy(state), **change}
    own.pop("checksum", None)
    return {**own, "checksum": state_checksum(own)}


def of_version_1(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as version 1 had it, which had no checksum."""
    own = {key: value for key, value in state.items() if key not in ("checksum", "resized")}
    return {**own, "version": 1}


def alterations(state: dict[str, Any], *, draws: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield states in which one field differs, is missing or is new, with what was altered.

    Args:
        state: The state.
        draws: Whether to alter parts of the generators' states too.
    """
    own = {key: value for key, value in state.items() if key not in ("version", "checksum")}
    whole = OPAQUE if draws else (*OPAQUE, *DRAWS)
    for name, changed in _each(own, whole):
        if isinstance(changed, dict) and changed:
            yield name, {**changed, "version": state["version"]}


def _each(value: Any, whole: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield "+unknown", {**value, "unknown": 1}
        for key, each in value.items():
            yield f"-{key}", {name: value[name] for name in value if name != key}
            for name, other in _replacements(each) if key in whole else _each(each, whole):
                yield f"{key}.{name}", {**value, key: other}
    elif isinstance(value, list):
        yield "[:-1]", value[:-1]
        yield "[+1]", [*value, *value[:1], 0]
        yield "[::-1]", value[::-1]
        for at, each in enumerate(value):
            for name, other in _each(each, whole):
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
