"""A pipeline actor without Ray, for tests of the code that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class FakePipelineActor:
    """A pipeline actor that records its calls, and gives the answers that a test sets.

    Attributes:
        name: Its name.
        lost: As in ``PipelineActor``.
        connected: As in ``PipelineActor``.
        ray_job: As in ``PipelineActor``.
        answers: Answer of each method. The wait for an answer raises it if it is an exception's
            type. An exception itself would keep its traceback, and so its frames, alive.
        failure: Type of the exception that every call raises; None if the actor can be reached.
        calls: Method and arguments of each call, without ``cancel``. This call comes only if this
            process is connected to a Ray.
    """

    def __init__(self, name: str = "actor", **answers: Any) -> None:
        self.name = name
        self.lost = False
        self.connected = True
        self.ray_job = ("10.0.0.5:6379", "01000000")
        self.answers: dict[str, Any] = {"begin": (True, False), **answers}
        self.failure: type[BaseException] | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.handle = _Handle(self)

    @property
    def alive(self) -> bool:
        return self.connected and not self.lost

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Record a call, and return what ``FakeNodes.answered`` waits for."""
        if self.failure is not None:
            raise self.failure
        if method != "cancel":
            self.calls.append((method, *arguments))
        return functools.partial(self._answer, method)

    def _answer(self, method: str) -> Any:
        answer = self.answers[method]
        if isinstance(answer, type):
            raise answer
        return answer


class _Handle:
    def __init__(self, actor: FakePipelineActor) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=functools.partial(self._actor.call, method))


class FakeNodes:
    """Nodes that pass on the pipeline actor's answers.

    Attributes:
        waits: Number of answers that were waited for.
        error: Exception that ``look`` raises, if any.
    """

    def __init__(self) -> None:
        self.waits = 0
        self.error: Exception | None = None

    def wait_for_answer(self, ref: Callable[[], Any], reason: str) -> Any:
        self.waits += 1
        return ref()

    def look(self) -> None:
        if self.error is not None:
            raise self.error
