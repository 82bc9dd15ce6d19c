"""Random ids of Ray in worker processes that are forks of a process with Ray loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray

from dpex.compat.shortcut import PrivateName, Shortcut, replaced

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
    """Allow imports of Ray modules that do not start Ray's generator of random ids.

    If the generator has started in a process, all forks of the process draw the same ids. The
    generator starts when a module declares an actor class, because the class gets an id.
    """
    found = FORKED_IDS.find()
    if found is None:
        yield
        return
    original = found["actor_class_id"]

    class FromTheSystem:
        """A replacement of ``ActorClassID`` that does not start the generator."""

        @staticmethod
        def from_random() -> Any:
            """Return an id from the operating system's random bytes."""
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
