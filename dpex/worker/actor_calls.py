"""Calls from workers to the pipeline actor, which get there although a connection breaks.

Ray ends a call whose connection breaks with ``ActorUnavailableError``, whether or not the actor has
had it. So every call can be made twice: it asks for the same again, or the pipeline actor
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
    "ACTOR_DIED",
    "Arrived",
    "AssignedChunk",
    "Messages",
    "NAMESPACE",
    "Patience",
    "ask_actor",
    "get_soon",
    "pipeline_actor",
]

NAMESPACE = "dpex"
"""Ray namespace of the pipeline actors."""

ACTOR_DIED = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError)
"""What Ray says of a actor that is no more; the latter where it was killed for want of memory."""

_PAUSE_S = 0.02
_ACTOR_AWAY_S = 30.0
# A task that waits in ``ray.get`` gives its CPU back, and Ray may start another process in its
# place: not while it is to have an answer soon.
_KEEP_CPU_S = 1.0
# How many messages of a sender may have no answer yet. The actor remembers four times as many.
_MOST_UNDER_WAY = 16


@dataclass(frozen=True)
class AssignedChunk:
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
def pipeline_actor(name: str) -> Any:
    """Return the handle of a pipeline actor.

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
    """How long a worker goes on to call a pipeline actor that it cannot reach."""

    def __init__(self) -> None:
        self._first = self._last = -math.inf

    def wait(self, error: ray.exceptions.ActorUnavailableError) -> None:
        """Wait before the call is made again.

        Raises:
            ActorUnavailableError: The one that is given; the actor has been away for too long.
        """
        now = time.monotonic()
        if now - self._last > _ACTOR_AWAY_S:  # it could be reached meanwhile, and the call waited
            self._first = now
        self._last = now
        if now - self._first > _ACTOR_AWAY_S:
            raise error
        time.sleep(_PAUSE_S)


def ask_actor(name: str, method: str, *arguments: Any) -> Any:
    """Call a method that can be called twice, and return its answer.

    Args:
        name: Name of the pipeline actor.
        method: Its method.
        *arguments: What to call it with.

    Raises:
        ActorUnavailableError: The pipeline actor cannot be reached.
        ActorDiedError, OutOfMemoryError, ValueError: There is no host any more.
    """
    patience = Patience()
    while True:
        try:
            return ray.get(getattr(pipeline_actor(name), method).remote(*arguments))
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

    Invariant: a call is made again until the pipeline actor has answered it, or is no more.

    Args:
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that all of them are about.
    """

    def __init__(self, actor_name: str, pipeline_key: str) -> None:
        self._actor_name = actor_name
        self._pipeline_key = pipeline_key
        self._sent: deque[_Message] = deque()
        self._earlier = 0

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the actor, with the pipeline and a number of this message.

        Raises:
            ActorUnavailableError: An earlier message cannot be sent.
        """
        arguments = (self._pipeline_key, (_sender(), next(_numbers)), *arguments)
        self._sent.append(_Message(method, arguments, self._call(method, arguments)))
        self._confirm(_MOST_UNDER_WAY)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> ray.ObjectRef | None:
        """Call a method; returns None if there is no host any more."""
        with contextlib.suppress(ValueError, *ACTOR_DIED):
            return getattr(pipeline_actor(self._actor_name), method).remote(*arguments)
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
            except ACTOR_DIED:
                return
            else:
                return


class Arrived:
    """The messages that a pipeline actor has had lately, one of which may come again.

    A sender has no more than a few in flight, so as many of each sender are enough.
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
