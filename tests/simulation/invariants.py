"""Checks at every event of a schedule; the first that fails ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpex.protocol.chunks import Chunk, Part

if TYPE_CHECKING:
    from dpex.protocol.batch_order import BatchOrder
    from dpex.protocol.chunk_sizes import ChunkPlanner
    from simulation.attempts import Attempt
    from simulation.schedule import World

__all__ = ["Invariants"]


class Invariants:
    """What must hold at every moment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._running: dict[tuple[int, int], Attempt] = {}
        # The last attempt that has made each batch.
        self._made: dict[tuple[str, int], Attempt] = {}
        self._lost: set[tuple[str, int]] = set()
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
            # Nothing can end a process on a node that cannot be reached. On one node, a process
            # waits for the end of a process that Ray takes for dead.
            here = attempt.process.node is other.process.node
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

    def make(self, attempt: Attempt, chunk: Chunk, batch: int) -> None:
        """Check that a batch is made for the first time, or is lost."""
        key = chunk.run.key, batch
        earlier = self._made.get(key)
        self._made[key] = attempt
        if earlier is None or key in self._lost or attempt.replaced or earlier.replaced:
            return
        if earlier.process.alive:
            self._world.fail(f"batch {batch} was made twice, although it was not lost")

    # --- losses -----------------------------------------------------------------------------------

    def may_lose(self, part: Part, kind: str, most: float) -> bool:
        """Return whether a block may be lost: dpex gives up a batch that is lost too often."""
        keys = [(part.run, batch, kind) for batch in part.batches]
        if any(self._losses.get(key, 0) >= most for key in keys):
            return False
        for key in keys:
            self._losses[key] = self._losses.get(key, 0) + 1
            self._lost.add(key[:2])
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
