"""Calls of Ray that must have no effect: those of forks, and those after Ray's shutdown."""

from __future__ import annotations

import threading
from typing import Any

from dpex.background_thread import BackgroundThread
from dpex.compat.shortcut import PrivateName, Shortcut

__all__ = ["FORKS_DISCONNECTED", "NO_SECOND_RAY", "disconnect_fork", "prepare"]

_STARTS_ITSELF = PrivateName(
    "ray._private.auto_init_hook:enable_auto_connect",
    "keeps a call of its threads after `ray.shutdown()` from starting another Ray",
    check="it is True or False",
)
NO_SECOND_RAY = Shortcut(
    "keep late calls from starting another Ray",
    "a call of dpex in the moment of `ray.shutdown()` may start another Ray",
    "ray",
    starts_itself=_STARTS_ITSELF,
)
FORKS_DISCONNECTED = Shortcut(
    "take the training process's connection to Ray from its forks",
    "a fork that drops references to Ray's objects or actors may disturb the training process",
    "ray",
    worker=PrivateName(
        "ray._private.worker:global_worker",
        "takes Ray's connection from forks of the training process",
        check="it is an object with attributes",
    ),
    core_worker=PrivateName(
        "ray._private.worker:Worker.core_worker",
        "takes Ray's connection from forks of the training process",
        of_instances=True,
    ),
)

# Ray's object with the connection, once this process has been connected.
_worker: Any = None
# In a fork: the parent's connection. If it were freed, the parent's Ray would get messages.
_parents_connection: list[Any] = []


class _NotForDpex:
    """Ray's setting that a first call starts Ray, which is false for late calls.

    dpex connects before it calls Ray, so a call of its own threads never has to start a Ray. Once
    Python waits for its threads at exit, no thread but the main thread may start one.
    """

    def __init__(self, setting: bool) -> None:
        self._setting = setting

    def __bool__(self) -> bool:
        thread, main = threading.current_thread(), threading.main_thread()
        late = thread is not main and not main.is_alive()
        return self._setting and not (late or isinstance(thread, BackgroundThread))


def prepare() -> None:
    """Prepare this process, which is connected to Ray, for late calls and forks."""
    global _worker
    found = NO_SECOND_RAY.find_checked(starts_itself=lambda v: isinstance(v, (bool, _NotForDpex)))
    if found is not None and isinstance(found["starts_itself"], bool):
        with NO_SECOND_RAY.attempt():
            _STARTS_ITSELF.set(_NotForDpex(found["starts_itself"]))
    found = FORKS_DISCONNECTED.find_checked(worker=lambda value: hasattr(value, "__dict__"))
    _worker = found and found["worker"]


def disconnect_fork() -> None:
    """Take the parent's connection to Ray from this fork.

    The connection's threads do not exist in a fork, but its sockets do. A call would wait forever
    for a lock or an answer, or write into the parent's stream of messages. When Python frees a
    reference, it tells Ray, and so the fork could end the parent's actors.
    """
    if _worker is not None and (core_worker := vars(_worker).pop("core_worker", None)) is not None:
        _parents_connection.append(core_worker)
