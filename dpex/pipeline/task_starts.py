"""The number of tasks that a pipeline has started, and of the CPUs that its tasks gave back."""

from __future__ import annotations

import time
from collections import deque

__all__ = ["TaskStarts"]

# The time until the cluster knows that a node's CPU is free again: Ray's nodes exchange this ten
# times a second. A task that starts earlier would not get the node that it prefers.
_FREED_S = 0.25
# A task that has not begun after this time requests resources that no node has.
_HOPELESS_S = 60.0


class TaskStarts:
    """A count of tasks. A task that has started begins when it first asks for a chunk.

    Args:
        first_tasks: Number of tasks that start with the pipeline.

    Attributes:
        started: Number of tasks started so far.
    """

    def __init__(self, first_tasks: int) -> None:
        self.started = first_tasks
        self._begun = 0
        self._started_at = time.monotonic()
        # For each task that has ended lately, the time until which its CPU counts as in use.
        self._freed: deque[float] = deque()

    def start(self, tasks: int) -> None:
        """Record the start of tasks."""
        self.started += tasks
        self._started_at = time.monotonic()

    def note_begun(self) -> None:
        """Record that a task has asked for its first chunk."""
        self._begun += 1

    def note_ended(self) -> None:
        """Record that a task's lease has ended."""
        self._freed.append(time.monotonic() + _FREED_S)

    @property
    def not_begun(self) -> int:
        """Number of tasks that have not begun."""
        return max(0, self.started - self._begun)

    @property
    def about_to_begin(self) -> bool:
        """Whether a task has not begun, and may still get its resources."""
        return bool(self.not_begun) and time.monotonic() - self._started_at < _HOPELESS_S

    def not_known_free(self) -> int:
        """Return how many tasks ended so recently that their CPUs count as in use."""
        now = time.monotonic()
        while self._freed and self._freed[0] <= now:
            self._freed.popleft()
        return len(self._freed)
