"""Fork workers from a process that has Ray's library loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray

from dpex.compat.names import PrivateName, Shortcut, replaced

__all__ = ["FORKED_IDS", "random_ids_untouched", "untouched_random_ids"]

_ACTOR_CLASS_ID = PrivateName(
    "ray.actor:ActorClassID",
    "declares actors without starting the generator of random ids",
    check="two forks draw ids, which must differ",
)
FORKED_IDS = Shortcut(
    "fork workers that draw ids of their own",
    "Ray starts the workers, and each imports torch itself",
    "ray",
    actor_class_id=_ACTOR_CLASS_ID,
)


@contextlib.contextmanager
def untouched_random_ids() -> Iterator[None]:
    """Let modules of Ray load without starting the library's generator of random ids.

    Forks of a process where it has started would all draw the same ids. It starts when a class of
    actors is declared, because that gets an id.
    """
    found = FORKED_IDS.find()
    if found is None:
        yield
        return
    original = found["actor_class_id"]

    class FromTheSystem:
        """Stands in for the class of ids."""

        @staticmethod
        def from_random() -> Any:
            """Draw an id from the operating system."""
            return original(os.urandom(len(original.nil().binary())))

    with replaced({_ACTOR_CLASS_ID: FromTheSystem}):
        yield


def random_ids_untouched() -> bool:
    """Return whether two forks of this process would draw different random ids."""
    drawn = set()
    for _ in range(2):
        readable, writable = os.pipe()
        if os.fork() == 0:
            os.write(writable, ray.ObjectID.from_random().binary())
            os._exit(0)
        os.close(writable)
        drawn.add(os.read(readable, 64))
        os.close(readable)
    return len(drawn) == 2
