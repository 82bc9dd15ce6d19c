"""Variables of the environment, and the umask, that change while workers live."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

__all__ = ["Changes", "changes", "remember", "take_over"]

Changes = tuple[tuple[tuple[str, str | None], ...], int | None]
"""Names and values of variables, None of one that has gone; and the umask, if it is known."""

# Ray's own variables, and ours, are not the user's. Each process has its own.
_OURS = ("RAY_", "DPEX_")
_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)

# In the training process: the environment that the processes of its Ray have inherited.
_inherited: dict[str, str] | None = None
# In a worker process: what the variables were that an iteration has changed.
_original: dict[str, str | None] = {}


def remember() -> None:
    """Note that processes start now which inherit this process's environment."""
    global _inherited
    _inherited = dict(os.environ)


def changes() -> Changes:
    """Return what has changed since ``remember`` was called; nothing if it never was."""
    if _inherited is None:
        return (), None
    names = {n for n in {*_inherited, *os.environ} if _inherited.get(n) != os.environ.get(n)}
    users = sorted(name for name in names if not name.startswith(_OURS))
    return tuple((name, os.environ.get(name)) for name in users), _umask()


def take_over(changes: Changes) -> None:
    """Make changes of the training process in this worker, and undo those of another iteration."""
    variables, umask = dict(changes[0]), changes[1]
    if umask is not None:
        os.umask(umask)
    for name in {*variables, *_original}:
        _original.setdefault(name, os.environ.get(name))
        _set(name, variables[name] if name in variables else _original[name])


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _umask() -> int | None:
    with contextlib.suppress(OSError):  # os.umask() tells it only when it sets it
        found = _UMASK.search(Path("/proc/self/status").read_text())
        return int(found[1], 8) if found else None
    return None
