"""The table of private names, generated from their declarations."""

from __future__ import annotations

import importlib
import pkgutil

import dpex.compat
from dpex.compat.private_names import Shortcut

__all__ = ["all_shortcuts", "table"]


def all_shortcuts() -> list[Shortcut]:
    """Return every shortcut, in the order of the modules of ``dpex.compat``.

    Raises:
        ImportError: Ray or torch is not installed.
    """
    modules = [
        importlib.import_module(f"dpex.compat.{module.name}")
        for module in pkgutil.iter_modules(dpex.compat.__path__)
        if module.name != "__main__"
    ]
    named = [value for module in modules for value in vars(module).values()]
    return [value for value in named if isinstance(value, Shortcut)]


def table() -> str:
    """Return Markdown: a table of names for each shortcut."""
    parts = []
    for shortcut in all_shortcuts():
        rows = [
            f"| `{name.path}` | {name.purpose} | {name.check} |" for name in shortcut.names.values()
        ]
        title = shortcut.title[0].upper() + shortcut.title[1:]
        parts.append(
            f"## {title}\n\nWithout these names: {shortcut.without}.\n\n"
            "| name | dpex uses it because it | checked by |\n|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"
