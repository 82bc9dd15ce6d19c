"""The requests of a pipeline's tasks: calls of the pipeline actor that wait for an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from dpex.protocol.chunks import AssignedChunk, Replaced
from dpex.protocol.loss_causes import Loss
from dpex.protocol.scheduler import Answer, Scheduler

__all__ = ["TaskAnswer", "TaskRequests"]

P = ParamSpec("P")
Decisions = list[Answer | Loss]
TaskAnswer = AssignedChunk | Replaced | None


class TaskRequests:
    """Gives a scheduler its events, and performs what it decides.

    Args:
        scheduler: The scheduler.
        on_loss: Called with each loss of a chunk.

    Attributes:
        handed_out: How many tasks the callers of ``more_tasks`` know of.
    """

    def __init__(self, scheduler: Scheduler, on_loss: Callable[[Loss], None]) -> None:
        self._scheduler = scheduler
        self._on_loss = on_loss
        # The calls that wait, by lease and process. A process may repeat a call.
        self._calls: dict[tuple[str, str], list[asyncio.Future[TaskAnswer]]] = {}
        # Set when the number of tasks may have changed that a call waits for.
        self._counted = asyncio.Event()
        self._counts = 0, 0
        self.handed_out = scheduler.started
        self._timer: asyncio.TimerHandle | None = None

    def note(
        self, event: Callable[Concatenate[float, P], Decisions], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Give the scheduler an event, which is one of its methods, with the present time."""
        for decision in event(time.monotonic(), *args, **kwargs):
            if isinstance(decision, Loss):
                self._on_loss(decision)
                continue
            for call in self._calls.pop((decision.name, decision.attempt), ()):
                if not call.done():
                    call.set_result(decision.chunk)
        counts = self._scheduler.started, self._scheduler.prepared
        changed = counts != self._counts or self._scheduler.prepared or self._scheduler.idle
        if changed or self._scheduler.closed:
            self._counts = counts
            self._counted.set()
        self._wait_for_tick()

    def _wait_for_tick(self) -> None:
        tick_s = self._scheduler.tick_s
        if tick_s is None:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + tick_s
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.note(self._scheduler.tick)

    async def next_chunk(
        self,
        name: str,
        place: int,
        made: int,
        attempt: str = "",
        *,
        early: bool = False,
        unchanged: bool | None = None,
    ) -> TaskAnswer:
        """Wait for a task's next chunk, and return it; see ``Scheduler.request``."""
        call: asyncio.Future[TaskAnswer] = asyncio.get_running_loop().create_future()
        self._calls.setdefault((name, attempt), []).append(call)
        request = self._scheduler.request
        self.note(request, name, place, made, attempt, early=early, unchanged=unchanged)
        return await call

    async def more_tasks(self, started: int, *, until_idle: bool = False) -> int | None:
        """Wait until tasks are needed, and return their number.

        Args:
            started: How many tasks the caller knows of. A restarted caller counts again from
                the number that it began with.
            until_idle: Whether the call also ends once all tasks have ended.

        Returns:
            How many tasks to start now; None if the caller has to start no more tasks.
        """
        while not self._scheduler.closed:
            if started < self._scheduler.started:
                self.handed_out = self._scheduler.started
                return self._scheduler.started - started
            if until_idle and self._scheduler.idle:
                return None
            self._counted.clear()
            await self._counted.wait()
        return None

    async def start_task(self) -> None:
        """Start a task before there are chunks, and wait until a task has asked for a chunk.

        The call also returns after the first chunk, at the end of the iteration, and if the
        pipeline is broken.
        """
        self.note(self._scheduler.prepare)
        while self._scheduler.prepared and not self._scheduler.running:
            self._counted.clear()
            await self._counted.wait()
