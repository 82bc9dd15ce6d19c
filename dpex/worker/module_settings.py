"""Settings that are values in modules or in their classes, and change while workers live.

Examples are ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES``, the numbers in a user's ``config.py``, and
those of a class ``Config`` in it. torch forks its workers at ``iter()``, so they have the values of
that moment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dpex.wire import local_modules

__all__ = ["Changes", "changes", "inherited", "remember", "take_over"]

Place = tuple[str, str]
"""A module, and a class of the user's in it; no class for the module itself."""
Changes = tuple[tuple[Place, str, Any], ...]
"""Tuples of place, name and value; the value of a deleted name is ``_GONE``."""

_GONE = ("dpex", "no such name")

_TYPES = (bool, int, float, complex, str, bytes, type(None))
# Values in these modules describe one process, such as whether a library has been initialised.
_OF_PROCESSES = {
    *sys.stdlib_module_names,
    "dpex",
    "ray",
    "torch",
    "numpy",
    "pyarrow",
    "__mp_main__",
}

# In the training process: for each place, the names and the settings that its forks inherit.
_inherited: dict[Place, tuple[set[str], dict[str, Any]]] = {}
# In a worker process: original values of the settings that an iteration has changed.
_original: dict[tuple[Place, str], Any] = {}


def remember() -> None:
    """Record the settings that worker processes inherit when this process is forked now."""
    global _inherited
    places = [
        (name, "") for name in list(sys.modules) if name.partition(".")[0] not in _OF_PROCESSES
    ]
    for module, content in local_modules.users_modules():
        places += [
            (module, name)
            for name, value in list(vars(content).items())
            if isinstance(value, type) and value.__module__ == module
        ]
    _inherited = {place: (set(_names(place)), _settings(_names(place))) for place in places}


def inherited() -> frozenset[str]:
    """Return the names of the modules that this process's forks inherit; empty without forks."""
    return frozenset(module for module, _ in _inherited)


def _holder(place: Place) -> Any:
    """Return the module or class of a place, or None if it does not exist."""
    module, name = place
    found = sys.modules.get(module)
    return getattr(found, "__dict__", {}).get(name) if name else found


def _names(place: Place) -> Mapping[str, Any]:
    names: Mapping[str, Any] = getattr(_holder(place), "__dict__", {})
    return names


def _settings(names: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in list(names.items()) if type(v) in _TYPES and not n.startswith("__")}


def changes() -> Changes:
    """Return the changes since ``remember`` was called; no changes if it never was."""
    found = []
    for place, (names, then) in _inherited.items():
        # This runs at every iter(), nearly always without a change: identity is compared first.
        now = _names(place)
        for name, value in then.items():
            new = now.get(name, _GONE)
            if new is not value and new != value and (new is _GONE or type(new) in _TYPES):
                found.append((place, name, new))
        if len(now) > len(names):
            found += [(place, n, v) for n, v in _settings(now).items() if n not in names]
    return tuple(found)


def take_over(changes: Changes) -> None:
    """Apply the training process's changes here, and undo the changes of another iteration."""
    if not changes and not _original:
        return
    values = {(place, name): value for place, name, value in changes}
    for setting in {*values, *_original}:
        place, name = setting
        holder = _holder(place)
        if holder is None:
            continue
        _original.setdefault(setting, _names(place).get(name, _GONE))
        value = values.get(setting, _original[setting])
        if value != _GONE:
            setattr(holder, name, value)
        elif name in _names(place):
            delattr(holder, name)
