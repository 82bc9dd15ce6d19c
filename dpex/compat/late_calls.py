"""Calls of Ray that must have no effect: those of forks, and those after Ray's shutdown."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from dpex.background_thread import BackgroundThread
from dpex.compat.private_names import PrivateName, Shortcut
from dpex.errors import ClusterError

__all__ = [
    "FORKS_DISCONNECTED",
    "LEFT_TO_PARENT",
    "NO_SECOND_RAY",
    "disconnect_fork",
    "prepare",
    "start_no_ray",
]

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
    check=PrivateName(
        "ray._private.worker:Worker.check_connected",
        "raises an error that says what to do when a fork calls Ray",
        check="it is a function",
    ),
)

LEFT_TO_PARENT = (
    "this process was forked from one connected to Ray, and cannot use that connection. If a "
    "dataset needs Ray's objects, call ray.get() before iter(loader), or let Ray's processes make "
    "the batches: distribute_mode=True, head_address='auto'"
)
"""Message of the error for a call of Ray in a fork of a process that is connected to Ray."""

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
    found = NO_SECOND_RAY.find_checked(starts_itself=lambda v: isinstance(v, (bool, _NotForDpex)))
    if found is not None and isinstance(found["starts_itself"], bool):
        with NO_SECOND_RAY.attempt():
            _STARTS_ITSELF.set(_NotForDpex(found["starts_itself"]))
    _find_worker()


def start_no_ray() -> None:
    """Keep calls of Ray in this process from starting a Ray, or connecting to one.

    Ray reads the variable when it is imported.
    """
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if "ray" in sys.modules and NO_SECOND_RAY.find() is not None:
        with NO_SECOND_RAY.attempt():
            _STARTS_ITSELF.set(False)


def _find_worker() -> Any:
    """Return Ray's object with this process's connection; None if dpex does not find it."""
    found = FORKS_DISCONNECTED.find_checked(
        worker=lambda value: hasattr(value, "__dict__"), check=callable
    )
    return found and found["worker"]


def disconnect_fork() -> None:
    """Take the parent's connection to Ray from this fork, in which calls of Ray raise an error.

    The connection's threads do not exist in a fork, but its sockets do. A call would wait forever
    for a lock or an answer, or write into the parent's stream of messages. When Python frees a
    reference, it tells Ray, and so the fork could end the parent's actors.
    """
    worker = _find_worker()
    if worker is not None and (core_worker := vars(worker).pop("core_worker", None)) is not None:
        _parents_connection.append(core_worker)
        # Almost all public functions of Ray call it first. Calls of actors miss the attribute.
        worker.check_connected = _refuse
        type(worker).__getattr__ = _lack


def _refuse() -> None:
    raise ClusterError(LEFT_TO_PARENT)


def _lack(_: Any, name: str) -> None:
    raise AttributeError(f"{name}: {LEFT_TO_PARENT}")
