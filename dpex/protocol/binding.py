"""The binding of logical workers to worker processes.

torch makes all batches of a logical worker in one process, on one copy of the dataset. In dpex, a
logical worker has one process at a time, whatever its binding. It may move to another process
between two chunks, unless its copy changes: a counter, a generator, an open file. An unchanged copy
serves any logical worker as well as a new copy does.

A loader with a ``worker_init_fn`` or an ``IterableDataset`` has bound logical workers. Any other
loader starts with watched logical workers: dpex pickles the dataset and the ``collate_fn`` after
each batch. dpex releases the logical workers if the first batch of each leaves the pickled bytes
unchanged. dpex binds them as soon as a batch changes the bytes. So the binding depends neither on
the number of processors nor on timing.
"""

from __future__ import annotations

import enum

__all__ = ["Binding"]


class Binding(enum.Enum):
    """Which worker process may make a logical worker's next batch."""

    ALWAYS = "always"
    """Only the process that made its first batch."""

    WATCHED = "watched"
    """The process of the previous batch, or any process if that batch left its copy unchanged."""

    RELEASED = "released"
    """Any process, one at a time, on a copy that all logical workers share in that process."""

    @property
    def bound(self) -> bool:
        """Whether each logical worker has its own process and copy."""
        return self is not Binding.RELEASED
