"""The task leases of a pipeline, and an index of what they hold.

An event changes few leases, and there may be thousands. So the index follows each change of a
lease, and no event has to look at all leases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dpex.protocol.task_lease import TaskLease

__all__ = ["Leases"]


class Leases(OrderedDict[str, TaskLease]):
    """The leases by name. The lease whose task asked last is the last one.

    Invariant: the index agrees with the leases, because a lease calls ``note_change`` after each
    change of its state or of the logical workers that it holds.

    Attributes:
        running: Number of tasks that have asked for a chunk and have not ended.
        holders: The lease that holds each logical worker; None if several leases hold it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.holders: dict[int, TaskLease | None] = {}
        self._holding: dict[int, list[TaskLease]] = {}
        # What the index says of each lease: whether its task runs, and the workers that it holds.
        self._noted: dict[str, tuple[bool, set[int]]] = {}
        # The names of the leases that have ended and hold nothing, in the order of their ends.
        self._over: dict[str, None] = {}

    def add(self, name: str, attempt: str, now: float) -> TaskLease:
        """Add the lease of a task that asks for its first chunk, and return it."""
        lease = self[name] = TaskLease(name, attempt, now, changed=self.note_change)
        return lease

    def note_change(self, lease: TaskLease) -> None:
        """Record that a lease has changed."""
        runs, held = lease.busy or not lease.ended, lease.held
        did_run, had = self._noted.get(lease.name, (False, set()))
        self._noted[lease.name] = runs, held
        self.running += runs - did_run
        for worker in had - held:
            self._holding[worker].remove(lease)
            self._index(worker)
        for worker in held - had:
            self._holding.setdefault(worker, []).append(lease)
            self._index(worker)
        if runs or held:
            self._over.pop(lease.name, None)
        else:
            self._over[lease.name] = None

    def _index(self, worker: int) -> None:
        leases = self._holding[worker]
        if leases:
            self.holders[worker] = leases[0] if len(leases) == 1 else None
        else:
            del self._holding[worker], self.holders[worker]

    def holding(self, worker: int | None) -> Sequence[TaskLease]:
        """Return the leases that hold a logical worker."""
        return () if worker is None else self._holding.get(worker, ())

    def forget_ended(self, most: int) -> None:
        """Drop the leases that ended first, but for some.

        Args:
            most: How many leases to keep that have ended and hold nothing.
        """
        while len(self._over) > most:
            name = next(iter(self._over))
            del self._over[name], self._noted[name], self[name]
