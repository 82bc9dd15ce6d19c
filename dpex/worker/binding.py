"""When a logical worker needs a worker process of its own.

torch makes all batches of a logical worker in one process, on one copy of the dataset. That matters
only if the copy changes: a counter, a generator, an open file. An unchanged copy serves any logical
worker as well as a new one does.

The rule: a loader with a ``worker_init_fn`` is bound. Any other is watched: dataset and
``collate_fn`` are pickled after each batch. It is released if the first batch of each logical
worker has left the bytes as they were, and bound as soon as one has not. So no number of
processors, and no time, decides which.
"""

from __future__ import annotations

import enum

__all__ = ["Binding"]


class Binding(enum.Enum):
    """Which worker processes may make a logical worker's batches."""

    ALWAYS = "always"
    """The one that made its first batch."""

    WATCHED = "watched"
    """The one that made the batch before; any process, if that has left its copy unchanged."""

    RELEASED = "released"
    """Any process, on a copy that all logical workers share there."""

    @property
    def bound(self) -> bool:
        """Whether each logical worker has a process and a copy of its own."""
        return self is not Binding.RELEASED
