"""The number of tasks that a pipeline has started, and of the CPUs that its tasks gave back."""

from __future__ import annotations

from collections import deque

from dpex import tuning

__all__ = ["TaskStarts"]


class TaskStarts:
    """A count of tasks. A started task is pending until it first asks for a chunk.

    Args:
        now: When they start.
        first_tasks: Number of tasks that start with the pipeline.
        freed_s: How long the CPU of a task that has ended counts as in use.

    Attributes:
        started: Number of tasks started so far.
    """

    def __init__(self, now: float, first_tasks: int, freed_s: float) -> None:
        self._freed_s = freed_s
        self.started = first_tasks
        self._running = 0
        self._started_at = now
        # For each task that has ended lately, the time until which its CPU counts as in use.
        self._freed: deque[float] = deque()

    def start(self, now: float, tasks: int) -> None:
        """Record the start of tasks."""
        self.started += tasks
        self._started_at = now

    def note_running(self) -> None:
        """Record that a task has asked for its first chunk."""
        self._running += 1

    def note_ended(self, now: float) -> None:
        """Record that a task's lease has ended."""
        self._freed.append(now + self._freed_s)
        self.not_known_free(now)  # keeps the record short, also if nothing else asks

    @property
    def pending(self) -> int:
        """Number of pending tasks."""
        return max(0, self.started - self._running)

    def may_run_soon(self, now: float) -> bool:
        """Return whether a task is pending, and may still get its resources."""
        return bool(self.pending) and now - self._started_at < tuning.HOPELESS_S

    def not_known_free(self, now: float) -> int:
        """Return how many tasks ended so recently that their CPUs count as in use."""
        while self._freed and self._freed[0] <= now:
            self._freed.popleft()
        return len(self._freed)
