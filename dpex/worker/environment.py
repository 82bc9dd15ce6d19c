"""Environment variables, the umask and the CPU affinity of the training process.

The first two may change after worker processes have started. The last one differs between ranks
that share a local Ray, if their launcher binds each rank to other cores.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

__all__ = [
    "Changes",
    "changes",
    "differences",
    "forget",
    "remember",
    "take_over",
    "while_ray_starts",
]

Changes = tuple[tuple[tuple[str, str | None], ...], int | None, frozenset[int]]
"""Names and values of variables, with None for a deleted variable; the umask, if known; and the
cores, or none if worker processes keep theirs."""

# Prefixes of the variables that Ray and dpex set for each process. dpex does not transfer them.
_OURS = ("RAY_", "DPEX_")
_SET_FOR_RAY = frozenset({"PYTHONBREAKPOINT", "PYTHONHASHSEED"})
_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)

# In the training process: the environments that the processes of its local Ray have inherited.
_inherited: list[dict[str, str]] = []
# Whether Ray's processes will start later than the first workers, and inherit another environment.
_ray_follows = False
# Whether this process has set variables for the start of Ray, and will delete them.
_ray_starts = False
# In the training process: its cores at that time. OpenMP may later bind its main thread to a core.
_cores: frozenset[int] = frozenset()
# In a worker process: the cores that it has taken over. The user's code may change them afterwards.
_taken_over: frozenset[int] = frozenset()
# In a worker process: the original values of all variables that an iteration has changed.
_original: dict[str, str | None] = {}


def remember(*, ray_follows: bool = False) -> None:
    """Record the environment of this process, which the processes that start now inherit.

    Args:
        ray_follows: Whether only first workers start now. The next call is then for Ray.
    """
    global _cores, _inherited, _ray_follows
    before = _inherited if _ray_follows else []
    _inherited, _ray_follows = [*before, _copied()], ray_follows
    with contextlib.suppress(AttributeError):  # macOS
        _cores = frozenset(os.sched_getaffinity(0))


def forget() -> None:
    """Forget the record, because no process has inherited the environment."""
    global _inherited, _ray_follows
    _inherited, _ray_follows = [], False


def changes() -> Changes:
    """Return the changes since ``remember`` was called, or no changes without a record."""
    if not _inherited:
        return (), None, frozenset()
    if _ray_starts:
        _note_environment()
    # What Ray's processes will inherit is still unknown, so they get all variables.
    bases = [{}, *_inherited] if _ray_follows else _inherited
    found = set(chain.from_iterable(map(differences, bases)))
    if _ray_starts:
        found = {change for change in found if change[0] not in _SET_FOR_RAY}
    return tuple(sorted(found)), _umask(), _cores


@contextlib.contextmanager
def while_ray_starts() -> Iterator[None]:
    """Record changes of the environment in the context, which Ray's processes may inherit.

    Variables that are set only for the start of Ray are no changes.
    """
    global _ray_starts
    _ray_starts = True
    try:
        yield
    finally:
        _ray_starts = False
        _note_environment()


def _note_environment() -> None:
    """Record that Ray's processes may inherit the present environment."""
    before = _inherited[-1]
    own = {name: value for name, value in _copied().items() if name not in _SET_FOR_RAY}
    own |= {name: before[name] for name in _SET_FOR_RAY & before.keys()}
    if own != before:
        _inherited.append(own)


def differences(other: Mapping[str, str]) -> tuple[tuple[str, str | None], ...]:
    """Return the user's variables in which this process differs from another environment."""
    names = {name for name in {*other, *os.environ} if other.get(name) != os.environ.get(name)}
    users = sorted(name for name in names if not name.startswith(_OURS))
    return tuple((name, os.environ.get(name)) for name in users)


def take_over(changes: Changes) -> None:
    """Apply the training process's changes to this process, and undo an earlier iteration's."""
    global _taken_over
    variables, umask, cores = dict(changes[0]), *changes[1:]
    if umask is not None:
        os.umask(umask)
    if cores and cores != _taken_over:
        _taken_over = cores
        with contextlib.suppress(OSError):  # this process may use none of them
            os.sched_setaffinity(0, cores)
    for name in {*variables, *_original}:
        _original.setdefault(name, os.environ.get(name))
        _set(name, variables[name] if name in variables else _original[name])


def _copied() -> dict[str, str]:
    """Return the present environment, although other threads may change it."""
    found = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in found if value is not None}


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _umask() -> int | None:
    with contextlib.suppress(OSError):  # os.umask() cannot read the umask without setting it
        found = _UMASK.search(Path("/proc/self/status").read_text())
        return int(found[1], 8) if found else None
    return None
