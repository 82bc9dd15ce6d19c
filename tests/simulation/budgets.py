"""The retries of batches that are lost again and again, against their budgets.

Invariant: dpex tries a lost batch exactly as often as its budget allows. Then an error that names
the batch takes its place. If the budget is one of the epoch, the epoch ends with an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpex import tuning
from dpex.errors import BatchLostError
from dpex.protocol.chunks import Chunk, Entry
from dpex.protocol.deferred_errors import KeptError
from dpex.protocol.delivery import Delivery
from dpex.protocol.loss_causes import Loss, LossCause
from simulation.machines import StoredBlock

if TYPE_CHECKING:
    from simulation.schedule import World

__all__ = ["Budgets"]


class Budgets:
    """The losses of the present iteration, as the training process learns of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        streams = world.plan.streams is not None
        # How often a batch may be lost: first with its chunk, then alone.
        self._most = {
            LossCause.TASK: 1 + (tuning.STREAM_TRIES if streams else 1),
            LossCause.STORE_FULL: 1 + tuning.STORE_FULL_TRIES,
            LossCause.BLOCK: tuning.MOST_LOSSES,
        }
        # For each cause and batch, the chunks that were lost with the batch.
        self._losses: dict[tuple[LossCause, int], set[tuple[str, int]]] = {}
        self._numbers: dict[tuple[str, int], range] = {}
        self._deaths: dict[tuple[str, int], int] = {}
        self._runs = 0

    def begin(self) -> None:
        """Begin an iteration."""
        self._losses.clear()
        self._runs = 0

    def send(self, chunk: Chunk) -> None:
        """Note a chunk that is sent."""
        self._numbers[chunk.run.key, chunk.number] = chunk.numbers

    def die(self, chunk: Chunk) -> None:
        """Check how many processes a chunk has killed."""
        key = chunk.run.key, chunk.number
        self._deaths[key] = deaths = self._deaths.get(key, 0) + 1
        if deaths > tuning.MAX_DEATHS:
            self._world.fail(f"chunk {key} has killed {deaths} processes")

    def lose(self, loss: Loss) -> None:
        """Check how often the batches of a loss have been lost."""
        part = loss.part
        if part is None:
            return
        key = part.run, part.chunk
        for batch in part.batches or self._numbers[key]:
            lost = self._losses.setdefault((loss.cause, batch), set())
            lost.add(key)
            # The loss of a whole chunk includes batches that have arrived.
            if part.batches and len(lost) > self._most[loss.cause]:
                self._world.fail(
                    f"batch {batch} has been lost {len(lost)} times: {loss.cause.name}"
                )

    def _times(self, cause: LossCause, batch: int) -> int:
        return len(self._losses.get((cause, batch), ()))

    def new_run(self, *, counts: bool) -> None:
        """Check how many runs have been lost in a row."""
        self._runs += counts
        if self._runs >= tuning.MOST_LOSSES:
            self._world.fail(f"{self._runs} runs have been lost in a row")

    def arrive(self) -> None:
        """Note a block."""
        self._runs = 0

    def deliver(self, entry: Entry) -> None:
        """Check that an error in place of a batch comes after the last try, and names the batch."""
        if self._is_spent:
            self._world.fail("a batch is delivered although the losses of blocks are too many")
        if entry.outcome != "error":
            return
        task = self._times(LossCause.TASK, entry.batch)
        full = self._times(LossCause.STORE_FULL, entry.batch)
        # Both kinds of tries count together for a stream, whose batches stay together.
        cause = LossCause.STORE_FULL if full > task else LossCause.TASK
        if not task <= self._most[LossCause.TASK] or task + full < self._most[cause]:
            self._world.fail(f"batch {entry.batch} is given up after {task} and {full} losses")
        assert isinstance(entry.value, KeptError)
        try:
            entry.value.reraise()
        except BatchLostError as error:
            if f"batch {entry.batch} (" not in str(error):
                self._world.fail(f"the error of batch {entry.batch} does not name it: {error}")

    @property
    def _is_spent(self) -> bool:
        """Whether the blocks of a batch have been lost too often."""
        most = self._most[LossCause.BLOCK]
        return any(
            c is LossCause.BLOCK and len(lost) >= most for (c, _), lost in self._losses.items()
        )

    def fail(self, delivery: Delivery[StoredBlock]) -> None:
        """Check that an epoch fails because its losses are too many, and that it stays failed."""
        if not self._is_spent and self._runs < tuning.MOST_LOSSES - 1:
            self._world.fail("the epoch fails although its losses are few")
        try:
            delivery.raise_failure()
        except BatchLostError:
            return
        self._world.fail("an epoch that has failed continues")
