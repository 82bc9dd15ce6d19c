"""The number of tasks that a pipeline has started, and of the CPUs that its tasks gave back."""

from __future__ import annotations

import time
from collections import deque

from dpex import tuning

__all__ = ["TaskStarts"]


class TaskStarts:
    """A count of tasks. A started task is pending until it first asks for a chunk.

    Args:
        first_tasks: Number of tasks that start with the pipeline.

    Attributes:
        started: Number of tasks started so far.
    """

    def __init__(self, first_tasks: int) -> None:
        self.started = first_tasks
        self._running = 0
        self._started_at = time.monotonic()
        # For each task that has ended lately, the time until which its CPU counts as in use.
        self._freed: deque[float] = deque()

    def start(self, tasks: int) -> None:
        """Record the start of tasks."""
        self.started += tasks
        self._started_at = time.monotonic()

    def note_running(self) -> None:
        """Record that a task has asked for its first chunk."""
        self._running += 1

    def note_ended(self) -> None:
        """Record that a task's lease has ended."""
        self._freed.append(time.monotonic() + tuning.FREED_S)
        self.not_known_free()  # keeps the record short, also if nothing else asks

    @property
    def pending(self) -> int:
        """Number of pending tasks."""
        return max(0, self.started - self._running)

    @property
    def may_run_soon(self) -> bool:
        """Whether a task is pending, and may still get its resources."""
        return bool(self.pending) and time.monotonic() - self._started_at < tuning.HOPELESS_S

    def not_known_free(self) -> int:
        """Return how many tasks ended so recently that their CPUs count as in use."""
        now = time.monotonic()
        while self._freed and self._freed[0] <= now:
            self._freed.popleft()
        return len(self._freed)
