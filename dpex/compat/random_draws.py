"""Ray's draws from Python's global generator in the training process."""

from __future__ import annotations

import random
from typing import Any

from dpex.compat.shortcut import PrivateName, Shortcut

__all__ = ["OWN_DRAWS", "draw_elsewhere"]

_CHECK = "it is the module random"
OWN_DRAWS = Shortcut(
    "start Ray without draws from the program's generator",
    "the start of Ray changes the state of Python's global generator, which a seeded program uses",
    "ray",
    storage=PrivateName(
        "ray._private.external_storage:random", "chooses a directory for spilled objects", _CHECK
    ),
    subscriber=PrivateName("ray._raylet:random", "draws the ids of readers of messages", _CHECK),
    node=PrivateName("ray._private.node:random", "draws a port", _CHECK),
)


def draw_elsewhere() -> None:
    """Give Ray a generator of its own; torch's loader draws nothing from Python's generator."""

    def known(value: Any) -> bool:
        return value is random or isinstance(value, random.Random)

    if OWN_DRAWS.find_checked(storage=known, subscriber=known, node=known):
        own = random.Random()
        for name in OWN_DRAWS.names.values():
            name.set(own)
