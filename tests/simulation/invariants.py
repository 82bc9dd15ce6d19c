"""Checks at every event of a schedule; the first that fails ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Chunk, Part
from simulation.machines import WorkerProcess

if TYPE_CHECKING:
    from dpex.protocol.batch_order import BatchOrder
    from dpex.protocol.chunk_sizes import ChunkPlanner
    from simulation.attempts import Attempt
    from simulation.schedule import World

__all__ = ["Invariants"]


class Invariants:
    """What must hold at every moment.

    Attributes:
        disturbed: Whether anything has happened after which batches may be made twice.
        excused: The logical workers that have lost their state, by dataset version.
        late: The dataset versions that a released logical worker has changed.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.disturbed = bool(world.plan.deadly)
        self.excused: set[tuple[int, int]] = set()
        self.late: set[int] = set()
        self._running: dict[tuple[int, int], Attempt] = {}
        self._replaced: list[Attempt] = []
        self._made: set[tuple[str, int]] = set()
        self._owners: dict[tuple[int, int], WorkerProcess] = {}
        self._losses: dict[tuple[str, int, str], int] = {}
        self._order: BatchOrder
        self._planner: ChunkPlanner
        self._most = 0

    # --- logical workers --------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """Check that no other process makes samples of the attempt's logical worker."""
        chunk = attempt.chunk
        key = chunk.run.dataset_version, chunk.worker
        other = self._running.get(key)
        if other is not None and other is not attempt:
            # A pipeline knows only of its own processes that Ray has replaced.
            known = attempt.pipeline is other.pipeline
            here = known and attempt.process.node is other.process.node
            if here or not (other.replaced or attempt.replaced):
                self._world.fail(
                    f"{attempt.id} and {other.id} both make batches of logical worker {key[1]}"
                )
            if attempt.replaced:
                return
        self._running[key] = attempt

    def end(self, attempt: Attempt) -> None:
        """Note that a process makes no more samples of its logical worker."""
        chunk = attempt.chunk
        key = chunk.run.dataset_version, chunk.worker
        if self._running.get(key) is attempt:
            del self._running[key]

    def make(self, attempt: Attempt, chunk: Chunk, batch: int, binding: Binding) -> None:
        """Check a batch that has been made."""
        made = chunk.run.key, batch
        if made in self._made:
            if not self.disturbed:
                self._world.fail(f"batch {batch} was made twice, without a fault")
        else:
            self._made.add(made)
        if binding is Binding.ALWAYS and not (attempt.replaced or attempt.again):
            key = chunk.run.dataset_version, chunk.worker
            process = attempt.process
            owner = self._owners.setdefault(key, process)
            if owner is not process:
                if not self._excuses(key, owner):
                    self._world.fail(
                        f"logical worker {chunk.worker} moved from {owner.name} to {process.name}"
                    )
                self._owners[key] = process

    def restart(self, attempt: Attempt, chunk: Chunk) -> None:
        """Note that a logical worker begins again, because its state is lost."""
        key = chunk.run.dataset_version, chunk.worker
        owner = self._owners.get(key)
        if owner is not None and not self._excuses(key, owner):
            self._world.fail(f"logical worker {chunk.worker} began again without a loss")
        self.excused.add(key)

    def _excuses(self, key: tuple[int, int], owner: WorkerProcess) -> bool:
        """Return whether a logical worker may begin again in another process than its last one."""
        plan = self._world.plan
        # The lease of a restarted task before a later stage ends with the iteration.
        gives_up = plan.holds_resources or (plan.later_stages and plan.persistent)
        if not owner.alive or owner.replaced or gives_up:
            return True
        return key in self.excused or key[0] in self.late

    def excuse(self, process: WorkerProcess) -> None:
        """Note that the state in a process is lost, or may be."""
        self.disturbed = True
        self.excused.update(process.copies)
        attempt = process.attempt
        if attempt is not None:
            # The task's last chunks, which the restarted task repeats, may be of other workers.
            self.excused.update(attempt.had)

    def excuse_all(self, version: int) -> None:
        """Note that a version's logical workers have all lost their state."""
        self.disturbed = True
        self.excused.update((version, w) for w in range(self._world.plan.workers))

    # --- losses -----------------------------------------------------------------------------------

    def may_lose(self, part: Part, kind: str, most: int) -> bool:
        """Return whether a block may be lost: dpex gives up a batch that is lost too often."""
        keys = [(part.run, batch, kind) for batch in part.batches]
        if any(self._losses.get(key, 0) >= most for key in keys):
            return False
        for key in keys:
            self._losses[key] = self._losses.get(key, 0) + 1
        self.disturbed = True
        version = self._world.version_of(part.run)
        if kind == "full":  # from now on one task works at a time, and the others end
            self.excuse_all(version)
        for batch in part.batches:
            self.excused.add((version, batch % self._world.plan.workers))
        return True

    # --- delivery ---------------------------------------------------------------------------------

    def begin_epoch(self, order: BatchOrder, planner: ChunkPlanner) -> None:
        """Begin an epoch."""
        self._order, self._planner = order, planner
        self._most = 0

    def deliver(self) -> None:
        """Check the bound on batches in flight."""
        self._most = max(self._most, self._planner.window, self._world.plan.workers)
        if self._order.in_flight > self._most:
            self._world.fail(f"{self._order.in_flight} batches in flight, more than {self._most}")
