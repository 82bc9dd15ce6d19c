"""Calls from worker processes to the pipeline actor that survive a broken connection.

If the connection breaks during a call, Ray raises ``ActorUnavailableError``, whether or not the
actor has received the call. dpex then repeats the call, so the actor may receive it twice.
Invariant: either a call is harmless when repeated, or it has a number by which the pipeline actor
recognizes the repetition.
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

from dpex import tuning
from dpex.protocol.chunks import Part
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.recent import Recent
from dpex.wire.packed_calls import pack

__all__ = [
    "ACTOR_DIED",
    "Arrived",
    "Messages",
    "NAMESPACE",
    "Patience",
    "ask_actor",
    "get_soon",
    "loss_of",
    "pipeline_actor",
]

NAMESPACE = "dpex"
"""Ray namespace of the pipeline actors."""

ACTOR_DIED = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError)
"""Errors that Ray raises for calls to a dead actor.

``OutOfMemoryError`` means that Ray killed the actor because the node ran out of memory.
"""


@functools.lru_cache(maxsize=4)
def pipeline_actor(name: str) -> Any:
    """Return the handle of a pipeline actor.

    Args:
        name: Name of the actor.

    Raises:
        ValueError: No actor has this name.
    """
    return ray.get_actor(name, namespace=NAMESPACE)


def loss_of(error: BaseException, part: Part | None = None) -> Loss:
    """Return the loss that an error of Ray means; ``part`` as in ``Loss``."""
    found: list[BaseException] = []
    links: list[Any] = [error]
    while links:
        link = links.pop()
        if isinstance(link, BaseException) and link not in found:
            found.append(link)
            # An error of a task has the error in the worker process as its ``cause``.
            links += [link.__cause__, link.__context__, getattr(link, "cause", None)]
    full = any(isinstance(link, ray.exceptions.OutOfDiskError) for link in found)
    cause = LossCause.STORE_FULL if full else LossCause.TASK
    return Loss(cause, f"{type(error).__name__}: {error}", part)


def get_soon(answer: ray.ObjectRef) -> Any:
    """Return an answer that is expected soon; keep the CPU for at most ``tuning.KEEP_CPU_S``."""
    with contextlib.suppress(TimeoutError):
        return answer.future().result(tuning.KEEP_CPU_S)
    return ray.get(answer)


class Patience:
    """A time limit for repeating a call to a pipeline actor that cannot be reached."""

    def __init__(self) -> None:
        self._first = self._last = -math.inf

    def wait(self, error: ray.exceptions.ActorUnavailableError) -> None:
        """Wait before the call is repeated.

        Args:
            error: The error of the last call.

        Raises:
            ActorUnavailableError: ``error``, if the actor has been unreachable for
                ``tuning.ACTOR_AWAY_S``.
        """
        now = time.monotonic()
        if now - self._last > tuning.ACTOR_AWAY_S:
            # The actor was reachable in between: the last call waited there for its answer.
            self._first = now
        self._last = now
        if now - self._first > tuning.ACTOR_AWAY_S:
            raise error
        time.sleep(tuning.PAUSE_S)


def ask_actor(name: str, method: str, *arguments: Any) -> Any:
    """Call a method of the pipeline actor that may safely run twice, and return its answer.

    Args:
        name: Name of the pipeline actor.
        method: Name of the method.
        *arguments: Arguments of the call.

    Raises:
        ActorUnavailableError: The pipeline actor cannot be reached.
        ActorDiedError, OutOfMemoryError, ValueError: The pipeline actor no longer exists.
    """
    patience = Patience()
    while True:
        try:
            return ray.get(getattr(pipeline_actor(name), method).remote(*arguments))
        except ray.exceptions.ActorUnavailableError as error:
            patience.wait(error)


@dataclass
class _Message:
    """A message to the pipeline actor; ``answer`` is None if the actor no longer exists."""

    arguments: tuple[Any, ...]
    answer: ray.ObjectRef | None


class Messages:
    """Messages of a task that must arrive.

    Invariant: a message is repeated until the pipeline actor has answered it or has died.

    Args:
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline that all messages concern.
    """

    def __init__(self, actor_name: str, pipeline_key: str) -> None:
        self._actor_name = actor_name
        self._pipeline_key = pipeline_key
        self._sent: deque[_Message] = deque()
        self._earlier = 0

    def send(self, subject: str, *content: Any, stored: ray.ObjectRef | None = None) -> None:
        """Send a message.

        Args:
            subject: What the message is about.
            *content: Its content, without object references; see ``_Pipeline.accept``.
            stored: Reference to the block that the message is about.

        Raises:
            ActorUnavailableError: An earlier message cannot be sent.
        """
        number = (_sender(), next(_numbers))
        message = pack(self._pipeline_key, number, subject, content)
        arguments = (message,) if stored is None else (message, [stored])
        self._sent.append(_Message(arguments, self._call(arguments)))
        self._confirm(tuning.MOST_UNANSWERED)

    def _call(self, arguments: tuple[Any, ...]) -> ray.ObjectRef | None:
        """Send a message; return None if the pipeline actor no longer exists."""
        with contextlib.suppress(ValueError, *ACTOR_DIED):
            return pipeline_actor(self._actor_name).accept.remote(*arguments)
        return None

    def begin_chunk(self) -> None:
        """Mark the start of a chunk: ``confirm_earlier`` covers the messages sent before it."""
        self._earlier = len(self._sent)

    def confirm_earlier(self) -> None:
        """Wait until all messages that were sent before ``begin_chunk`` have arrived.

        Raises:
            ActorUnavailableError: A message cannot be sent.
        """
        self._confirm(len(self._sent) - self._earlier)

    def confirm(self) -> None:
        """Wait until all messages have arrived.

        Raises:
            ActorUnavailableError: A message cannot be sent.
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
                message.answer = self._call(message.arguments)
            except ACTOR_DIED:
                return
            else:
                return


class Arrived:
    """The messages that a pipeline actor has received recently, to recognize repetitions.

    A sender has only a few messages in flight, so the last numbers of each sender are enough.
    """

    def __init__(self) -> None:
        self._numbers: Recent[str, deque[int]] = Recent(tuning.MOST_REMEMBERED)

    def add(self, message: tuple[str, int]) -> bool:
        """Record a message, and return whether it is new.

        Args:
            message: The sender and number of the message.
        """
        sender, number = message
        numbers = self._numbers.get(sender) or deque(maxlen=4 * tuning.MOST_UNANSWERED)
        self._numbers[sender] = numbers
        if number in numbers:
            return False
        numbers.append(number)
        return True


_numbers = itertools.count()


@functools.cache
def _sender() -> str:
    """Return a unique name for this process."""
    return uuid.uuid4().hex


os.register_at_fork(after_in_child=_sender.cache_clear)
