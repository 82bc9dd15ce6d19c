"""Ray options of a worker: their validation, and whether a node meets them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypedDict

__all__ = ["NODE_LABEL", "WorkerOptions", "check", "needs_ray", "unmet"]

NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives each node."""

_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "accelerator_type": (str, "a string"),
    "fallback_strategy": ((list, tuple), "a list of dicts"),
    "label_selector": (Mapping, "a dict of strings"),
    "memory": (Real, "a number of bytes"),
    "num_cpus": (Real, "a number"),
    "resources": (Mapping, "a dict of numbers"),
    "runtime_env": (Mapping, "a dict"),
}
_GPU_HINT = "For a transform that needs a GPU, use Stage(fn, num_gpus=1)"
_HINTS = {
    "num_gpus": f"{_GPU_HINT}. ",
    "scheduling_strategy": "Ray Data removes it: label the nodes, and pass a label_selector. ",
}
_OWN_OPTIONS = {"CPU": "num_cpus", "memory": "memory"}
# The value of a label selector in Ray: ``v``, ``!v``, ``in(a,b)`` or ``!in(a,b)``.
_SELECTED = re.compile(r"(?P<no>!?)(?:in\((?P<some>[^()]*)\)|(?P<one>[^()]*))")


class WorkerOptions(TypedDict, total=False):
    """Ray options of one worker, as ``Dataset.map_batches`` takes them.

    Attributes:
        num_cpus: CPUs of a worker; 1 by default.
        memory: Bytes of a node's memory that Ray reserves for a worker.
        resources: Other resources, named as in ``ray start --resources``.
        accelerator_type: Model of an accelerator that the node must have.
        label_selector: Labels that the node must have.
        fallback_strategy: Label selectors for the case that no node meets ``label_selector``, as
            ``[{"label_selector": {...}}, ...]``.
        runtime_env: The runtime environment of a worker process.
    """

    num_cpus: float
    memory: float
    resources: Mapping[str, float]
    accelerator_type: str
    label_selector: Mapping[str, str]
    fallback_strategy: Sequence[Mapping[str, Any]]
    runtime_env: Mapping[str, Any]


def check(options: Any) -> None:
    """Raise unless ``worker_options`` is None or a dict of known Ray options of the right types.

    Raises:
        TypeError: ``options`` or the value of an option has the wrong type.
        ValueError: An option is unknown, a number is negative, or ``resources`` has CPUs, GPUs or
            memory.
    """
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(f"worker_options must be a dict of Ray options or None, got {options!r}")
    unknown = sorted(set(options) - set(_TYPES), key=repr)
    if unknown:
        hint = "".join(hint for name, hint in _HINTS.items() if name in unknown)
        raise ValueError(
            f"worker_options does not accept {', '.join(map(repr, unknown))}. {hint}Accepted: "
            f"{', '.join(_TYPES)}"
        )
    for name, value in options.items():
        kind, text = _TYPES[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise TypeError(f"worker_options[{name!r}] must be {text}, got {value!r}")
    for name, amount in (options.get("resources") or {}).items():
        if name in {*_OWN_OPTIONS, "GPU"}:
            own = _OWN_OPTIONS.get(name)
            hint = f"Pass worker_options={{{own!r}: {amount!r}}}" if own else _GPU_HINT
            raise ValueError(f"worker_options['resources'] must not contain {name!r}. {hint}")
        if isinstance(amount, bool) or not isinstance(amount, Real):
            raise TypeError(
                f"worker_options['resources'][{name!r}] must be a number, got {amount!r}"
            )
    for name, amount in _amounts(options).items():
        if amount < 0:
            raise ValueError(f"worker_options asks for {amount} of {name!r}; it must be >= 0")


def needs_ray(options: Mapping[str, Any]) -> list[str]:
    """Return the options that a process without Ray cannot meet: all but its CPUs and memory."""
    return [name for name, value in options.items() if value and name not in _OWN_OPTIONS.values()]


def unmet(options: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a text that says which options of a worker no node meets.

    Args:
        options: Options that ``check`` has accepted, or those of a later stage.
        nodes: The result of ``ray.nodes()``. A node that is not alive does not count.

    Returns:
        The options and what the nodes have, as text; None if a node meets all options.

    Source:
        Ray's label selectors: ``"value"``, ``"!value"``, ``"in(a,b)"`` and ``"!in(a,b)"``.
    """
    amounts = _amounts(options)
    having = _having(amounts, nodes)
    if not having:
        return _lacking(amounts, nodes)
    selectors = [options.get("label_selector") or {}]
    selectors += [way.get("label_selector") or {} for way in options.get("fallback_strategy") or ()]
    for node in having:
        labels = node.get("Labels", {})
        if any(all(_selects(s[name], labels.get(name)) for name in s) for s in selectors):
            return None
    labels = [_users(node.get("Labels", {})) for node in having]
    return f"label_selector={selectors[0]}, but nodes have the labels {labels}"


def _lacking(amounts: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that says which Ray resources no node has."""
    asked = {name: amount for name, amount in amounts.items() if amount}
    found = [node["Resources"] for node in nodes if node["Alive"]]
    most = {name: max((has.get(name, 0) for has in found), default=0) for name in asked}
    return f"{asked}, but no node has all of it. The most on any node: {most}"


def _having(
    amounts: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the live nodes that have these amounts of Ray resources."""
    return [
        node
        for node in nodes
        if node["Alive"]
        and all(node["Resources"].get(name, 0) >= amounts[name] for name in amounts)
    ]


def _amounts(options: Mapping[str, Any]) -> dict[str, float]:
    """Return how much of each Ray resource a worker requests."""
    amounts = dict(options.get("resources") or {})
    num_cpus = options.get("num_cpus")
    amounts["CPU"] = 1 if num_cpus is None else num_cpus
    if options.get("num_gpus"):
        amounts["GPU"] = options["num_gpus"]
    if options.get("memory"):
        amounts["memory"] = options["memory"]
    if options.get("accelerator_type"):
        amounts[f"accelerator_type:{options['accelerator_type']}"] = 0.001
    return amounts


def _users(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if not name.startswith("ray.io/")}


def _selects(wanted: str, label: str | None) -> bool:
    match = _SELECTED.fullmatch(wanted)
    if match is None:  # a form of a later Ray counts as met
        return True
    some = match["some"]
    values = [match["one"]] if some is None else [value.strip() for value in some.split(",")]
    return (label in values) != bool(match["no"])
