"""A scheduler with the calls of the pipeline actor, for tests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpex.carriers.ray.task_requests import TaskAnswer, TaskRequests
from dpex.protocol.chunks import AssignedChunk, PickledChunk
from dpex.protocol.loss_causes import Loss
from dpex.protocol.scheduler import OtherJobs, Scheduler

__all__ = ["PlayedScheduler"]


class PlayedScheduler(TaskRequests):
    """A scheduler and the calls of its tasks.

    Args:
        on_loss: Called with each loss.
        **options: Options of the scheduler.

    Attributes:
        scheduler: The scheduler.
    """

    def __init__(self, on_loss: Callable[[Loss], None], **options: Any) -> None:
        self.scheduler = Scheduler(time.monotonic(), **options)
        super().__init__(self.scheduler, on_loss)
        self._known = self.scheduler.started
        self._attempts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def limit(self, *, parallel: int, starting: int) -> None:
        self.scheduler.parallel, self.scheduler.starting = parallel, starting

    async def next_chunk(
        self, name: str, place: int, made: int, attempt: str = "", **flags: bool | None
    ) -> TaskAnswer:
        """Wait for a task's next chunk. Without an attempt, a new process asks at place 0."""
        if attempt:
            return await super().next_chunk(name, place, made, attempt, **flags)
        self._attempts[name] += place == 0
        answer = await super().next_chunk(name, place, made, self._attempt(name), **flags)
        return replace(answer, replaced=()) if isinstance(answer, AssignedChunk) else answer

    def _attempt(self, name: str) -> str:
        return f"process {self._attempts[name]} of {name}"

    def new_tasks(self) -> int:
        """Return how many tasks have started since the last call."""
        self.note(self.scheduler.tick)
        known, self._known = self._known, self.scheduler.started
        return self._known - known

    def close(self) -> None:
        self.note(self.scheduler.close)

    def begin(self, *, in_run: bool) -> None:
        self.note(self.scheduler.begin, in_run=in_run)

    def stop_preparing(self) -> None:
        self.note(self.scheduler.stop_preparing)

    def feed(self, chunk: PickledChunk) -> None:
        self.note(self.scheduler.feed, chunk)

    def finish(self, name: str, attempt: str, place: int) -> None:
        self.note(self.scheduler.finish, name, attempt or self._attempt(name), place)

    def note_change(self, name: str, worker: int) -> None:
        self.note(self.scheduler.note_change, name, worker)

    def note_others(self, others: OtherJobs | None) -> None:
        self.note(self.scheduler.note_others, others)

    @property
    def waits(self) -> bool:
        return self.scheduler.waits(time.monotonic())
