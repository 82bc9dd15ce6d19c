"""Which task lease may get the next chunk of each logical worker.

Invariant: the chunks of a logical worker never run in two processes at once, whatever its binding.
So a chunk fits a lease only if no other lease holds its logical worker (``TaskLease.held``).

A bound logical worker lives in one worker process (``binding.py``). The task lease that got
its first chunk gets only chunks of logical workers that are bound to this lease. The lease waits
for these chunks while the iterator lives. Streams are always bound. A watched logical worker may
move to another process after each chunk that left its dataset copy unchanged, and a released
logical worker after each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import PickledChunk
from dpex.protocol.leases import Leases
from dpex.protocol.task_lease import TaskLease

__all__ = ["WorkerBindings"]


class WorkerBindings:
    """Which task lease each logical worker is bound to.

    Args:
        leases: The pipeline's leases. The caller adds and drops leases.
        num_workers: Number of logical workers.
        binding: Their initial binding.
        persistent: Whether logical workers outlive an iteration.

    Attributes:
        binding: The current binding of logical workers.
        persistent: Whether logical workers outlive an iteration.
    """

    def __init__(
        self, leases: Leases, num_workers: int, binding: Binding, persistent: bool
    ) -> None:
        self._leases = leases
        self._num_workers = num_workers
        self.binding = binding
        self.persistent = persistent
        # Logical workers that have had a process, in this iteration or, if persistent, in any.
        self._placed: set[int] = set()
        # Leases that have not reported yet whether their chunk changes its dataset copy.
        self._unreported: set[str] = set()
        # Logical workers whose first batches left the dataset copy unchanged.
        self._unchanged: set[int] = set()

    @property
    def bound(self) -> bool:
        """Whether each logical worker has its own process and copy."""
        return self.binding.bound

    @property
    def keeps_state(self) -> bool:
        """Whether logical workers keep state from one iteration to the next."""
        return self.persistent and self.bound

    def holds_state(self, lease: TaskLease, *, in_run: bool) -> bool:
        """Return whether state of logical workers would end with a lease."""
        return bool(lease.workers) and (in_run or self.persistent)

    def of(self, lease: TaskLease) -> Binding:
        """Return the binding of a lease's chunk: a watched chunk stays watched until it reports."""
        released = self.binding is Binding.RELEASED
        return Binding.WATCHED if released and lease.name in self._unreported else self.binding

    def taken(self) -> set[int]:
        """Return the logical workers that are bound to the process of a current lease."""
        workers: set[int] = set()
        return workers.union(*(t.workers for t in self._leases.values() if not t.ended))

    def runs_elsewhere(self, lease: TaskLease, worker: int | None) -> bool:
        """Return whether the process of another lease may make samples of a logical worker."""
        holding = self._leases.holding(worker)
        return any(worker in t.running for t in holding if t is not lease)

    def without_process(self, chunks: Iterable[PickledChunk]) -> list[int]:
        """Return the logical workers of these chunks that no lease holds, in order."""
        holders = self._leases.holders
        return [w for w in dict.fromkeys(chunk.worker for chunk in chunks) if w not in holders]

    def chunk_index_for(self, lease: TaskLease, chunks: Iterable[PickledChunk]) -> int | None:
        """Return the index of the first chunk that a lease may get, or None.

        Args:
            lease: The lease.
            chunks: The chunks that wait.
        """
        holders = self._leases.holders
        for place, chunk in enumerate(chunks):
            alone = holders.get(chunk.worker, lease) is lease
            if alone and (chunk.worker in lease.workers or not lease.workers):
                return place
        return None

    def bind(self, lease: TaskLease, worker: int) -> None:
        """Bind a logical worker to a lease."""
        lease.workers.add(worker)
        lease.changed(lease)
        (lease.restarted if worker in self._placed else lease.fresh).add(worker)
        self._placed.add(worker)

    def note_ended(self, lease: TaskLease) -> None:
        """Record the end of a lease: logical workers that it made no batch of have no state."""
        self._placed -= lease.fresh
        lease.fresh.clear()

    def note_given(self, lease: TaskLease, worker: int) -> None:
        """Record that a lease got a chunk of a logical worker."""
        if self.bound and worker not in lease.workers:
            self.bind(lease, worker)
        if self.binding is Binding.WATCHED:
            self._unreported.add(lease.name)

    def note_repeated(self, lease: TaskLease) -> None:
        """Record that a restarted task repeats a chunk, of a logical worker that may be bound now.

        When it got the chunk before, the logical worker may have had no process of its own.
        """
        worker = lease.repeats
        if worker is None or self.binding is not Binding.ALWAYS:
            return
        self._unreported.discard(lease.name)  # the chunk is not watched any more
        if not lease.ended and worker not in self._placed and worker not in self.taken():
            self.bind(lease, worker)

    def note_asked(self, lease: TaskLease) -> None:
        """Record that a lease's task has requested its next chunk."""
        self._drop_unreported(lease)
        if not self.bound:
            lease.unbind()

    def _drop_unreported(self, lease: TaskLease) -> None:
        """Unbind a logical worker whose watched chunk was cancelled, because it has no state."""
        if lease.name not in self._unreported:
            return
        self._unreported.discard(lease.name)
        if self.binding is not Binding.ALWAYS:
            self._placed.discard(lease.last_worker)
            lease.unbind(lease.last_worker)

    def note_state(self, lease: TaskLease, unchanged: bool) -> None:
        """Record whether the last batch of a chunk left its dataset copy unchanged.

        Until a batch changes its copy, a logical worker is bound only while a task makes one of its
        batches. All logical workers are released once the first batch of each left its copy
        unchanged.

        Args:
            lease: The lease whose task has made the chunk. The chunk is not the lease's last one
                if a restarted task repeats it.
            unchanged: Whether the copy is unchanged.
        """
        self._unreported.discard(lease.name)
        worker = lease.runs
        if worker is None:
            return
        if not unchanged:
            self.note_change(lease, worker)
        elif self.binding is not Binding.ALWAYS:
            lease.unbind(worker)
            self._placed.discard(worker)
            self._unchanged.add(worker)
            if len(self._unchanged) == self._num_workers:
                self.binding = Binding.RELEASED

    def note_change(self, lease: TaskLease | None, worker: int) -> None:
        """Record that a batch has changed its dataset copy: from now on, logical workers are bound.

        Args:
            lease: The lease whose task made the batch, if it is known.
            worker: The logical worker of the batch.
        """
        self.binding = Binding.ALWAYS
        if lease and not lease.workers and worker not in self.taken():
            self.bind(lease, worker)  # the process has its state now
            lease.fresh.discard(worker)

    def begin(self, *, in_run: bool) -> None:
        """Start an iteration, or a pause between iterations.

        Unless logical workers are persistent, each restarts on a new dataset copy.
        """
        for lease in [self._leases[name] for name in self._unreported if name in self._leases]:
            self._drop_unreported(lease)
        self._unreported.clear()
        self._unchanged.clear()
        if in_run and not self.persistent:
            self._placed.clear()
            for lease in self._leases.values():
                lease.unbind()
