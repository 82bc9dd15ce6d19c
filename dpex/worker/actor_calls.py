"""Calls from workers to the host of the pipelines, which get there although a connection breaks.

Ray ends a call whose connection breaks with ``ActorUnavailableError``, whether or not the host has
had it. So every call can be made twice: it asks for the same again, or the host
knows it by its number.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from dpex.worker.binding import Binding

__all__ = [
    "Arrived",
    "Assignment",
    "HOST_DIED",
    "Messages",
    "NAMESPACE",
    "Patience",
    "ask_host",
    "get_soon",
    "host",
]

NAMESPACE = "dpex"
"""Ray namespace of the host actors."""

HOST_DIED = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError)
"""What Ray says of a host that is no more; the latter where it was killed for want of memory."""

_PAUSE_S = 0.02
_HOST_AWAY_S = 30.0
# A task that waits in ``ray.get`` gives its CPU back, and Ray may start another process in its
# place: not while it is to have an answer soon.
_KEEP_CPU_S = 1.0
# How many messages of a sender may have no answer yet. The host remembers four times as many.
_MOST_UNDER_WAY = 16


@dataclass(frozen=True)
class Assignment:
    """A chunk to make.

    Attributes:
        payload: The pickled chunk.
        place: How many chunks come before it in the turn.
        binding: Whether its logical worker lives in this process.
        again: Whether the task has been given it before, and died.
        skipped_blocks: How many blocks the chunks made that the task need not make again.
        restarted: Whether its logical worker begins again, because it had another task before.
    """

    payload: bytes
    place: int
    binding: Binding = Binding.RELEASED
    again: bool = False
    restarted: bool = False
    skipped_blocks: int = 0


@functools.lru_cache(maxsize=4)
def host(name: str) -> Any:
    """Return the handle of a host.

    Args:
        name: Name of the actor.

    Raises:
        ValueError: There is none.
    """
    return ray.get_actor(name, namespace=NAMESPACE)


def get_soon(answer: ray.ObjectRef) -> Any:
    """Return an answer that is expected soon: the task keeps its CPU for a second meanwhile."""
    with contextlib.suppress(TimeoutError):
        return answer.future().result(_KEEP_CPU_S)
    return ray.get(answer)


class Patience:
    """How long a worker goes on to call a host that it cannot reach."""

    def __init__(self) -> None:
        self._first = self._last = -math.inf

    def wait(self, error: ray.exceptions.ActorUnavailableError) -> None:
        """Wait before the call is made again.

        Raises:
            ActorUnavailableError: The one that is given; the host has been away for too long.
        """
        now = time.monotonic()
        if now - self._last > _HOST_AWAY_S:  # it could be reached meanwhile, and the call waited
            self._first = now
        self._last = now
        if now - self._first > _HOST_AWAY_S:
            raise error
        time.sleep(_PAUSE_S)


def ask_host(name: str, method: str, *arguments: Any) -> Any:
    """Call a method that can be called twice, and return its answer.

    Args:
        name: Name of the host.
        method: Its method.
        *arguments: What to call it with.

    Raises:
        ActorUnavailableError: The host cannot be reached.
        ActorDiedError, OutOfMemoryError, ValueError: There is no host any more.
    """
    patience = Patience()
    while True:
        try:
            return ray.get(getattr(host(name), method).remote(*arguments))
        except ray.exceptions.ActorUnavailableError as error:
            patience.wait(error)


@dataclass
class _Message:
    """A call; its answer is None if there is no host any more."""

    method: str
    arguments: tuple[Any, ...]
    answer: ray.ObjectRef | None


class Messages:
    """Calls of a task that must arrive, but whose answers say nothing.

    Invariant: a call is made again until the host has answered it, or is no more.

    Args:
        host_name: Name of the host.
        lane_key: The lane that all of them are about.
    """

    def __init__(self, host_name: str, lane_key: str) -> None:
        self._host_name = host_name
        self._lane_key = lane_key
        self._sent: deque[_Message] = deque()
        self._earlier = 0

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the host with the lane, this message's sender and number, and arguments.

        Raises:
            ActorUnavailableError: An earlier message cannot be sent.
        """
        arguments = (self._lane_key, (_sender(), next(_numbers)), *arguments)
        self._sent.append(_Message(method, arguments, self._call(method, arguments)))
        self._confirm(_MOST_UNDER_WAY)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> ray.ObjectRef | None:
        """Call a method; returns None if there is no host any more."""
        with contextlib.suppress(ValueError, *HOST_DIED):
            return getattr(host(self._host_name), method).remote(*arguments)
        return None

    def begin_chunk(self) -> None:
        """Tell the messages that were sent up to now from later ones."""
        self._earlier = len(self._sent)

    def confirm_earlier(self) -> None:
        """Wait until the messages have arrived that were sent before the chunk began.

        Raises:
            ActorUnavailableError: They cannot be sent.
        """
        self._confirm(len(self._sent) - self._earlier)

    def confirm(self) -> None:
        """Wait until all messages have arrived.

        Raises:
            ActorUnavailableError: They cannot be sent.
        """
        self._confirm(0)

    def _confirm(self, most: int) -> None:
        while len(self._sent) > most:
            self._resend_until_answered(self._sent[0])
            self._sent.popleft()
            self._earlier = max(0, self._earlier - 1)

    def _resend_until_answered(self, message: _Message) -> None:
        patience = Patience()
        while message.answer is not None:
            try:
                get_soon(message.answer)
            except ray.exceptions.ActorUnavailableError as error:
                patience.wait(error)
                message.answer = self._call(message.method, message.arguments)
            except HOST_DIED:
                return
            else:
                return


class Arrived:
    """The messages that a host has had lately, one of which may come again.

    A sender has no more than a few under way, so as many of each sender are enough.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, deque[int]] = {}

    def add(self, message: tuple[str, int]) -> bool:
        """Note a message; returns whether it has not come before.

        Args:
            message: Its sender and number.
        """
        sender, number = message
        if sender not in self._numbers:
            self._numbers[sender] = deque(maxlen=4 * _MOST_UNDER_WAY)
        if number in self._numbers[sender]:
            return False
        self._numbers[sender].append(number)
        return True


_numbers = itertools.count()


@functools.cache
def _sender() -> str:
    """Return the name of this process."""
    return uuid.uuid4().hex


os.register_at_fork(after_in_child=_sender.cache_clear)
