"""Settings that are values in modules, and change while worker processes live.

Examples are ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES`` and the numbers in a user's ``config.py``.
torch forks its workers at ``iter()``, so they have the values of that moment.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Changes", "changes", "inherited", "remember", "take_over"]

Changes = tuple[tuple[str, str, Any], ...]
"""Tuples of module, name in the module, and value; the value of a deleted name is ``_GONE``."""

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

# In the training process: for each module, the names and the settings that its forks inherit.
_inherited: dict[str, tuple[set[str], dict[str, Any]]] = {}
# In a worker process: original values of the settings that an iteration has changed.
_original: dict[tuple[str, str], Any] = {}


def remember() -> None:
    """Record the settings that worker processes inherit when this process is forked now."""
    global _inherited
    _inherited = {
        name: (set(vars(module)), _settings(vars(module)))
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _OF_PROCESSES and hasattr(module, "__dict__")
    }


def inherited() -> frozenset[str]:
    """Return the names of the modules that this process's forks inherit; empty without forks."""
    return frozenset(_inherited)


def _settings(names: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in list(names.items()) if type(v) in _TYPES and not n.startswith("__")}


def changes() -> Changes:
    """Return the changes since ``remember`` was called; no changes if it never was."""
    found = []
    for module, (names, then) in _inherited.items():
        # This runs at every iter(), nearly always without a change: identity is compared first.
        now = getattr(sys.modules.get(module), "__dict__", {})
        for name, value in then.items():
            new = now.get(name, _GONE)
            if new is not value and new != value and (new is _GONE or type(new) in _TYPES):
                found.append((module, name, new))
        if len(now) > len(names):
            found += [(module, n, v) for n, v in _settings(now).items() if n not in names]
    return tuple(found)


def take_over(changes: Changes) -> None:
    """Apply the training process's changes here, and undo the changes of another iteration."""
    if not changes and not _original:
        return
    values = {(module, name): value for module, name, value in changes}
    for place in {*values, *_original}:
        module, name = place
        names = getattr(sys.modules.get(module), "__dict__", {})
        _original.setdefault(place, names.get(name, _GONE))
        value = values.get(place, _original[place])
        if value == _GONE:
            names.pop(name, None)
        else:
            names[name] = value
