"""The retries of batches that are lost again and again, against their budgets.

Invariant: dpex tries a lost batch exactly as often as its budget allows. Then an error that names
the batch takes its place. If the budget is one of the epoch, the epoch ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
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
        # For each batch and each chunk that was lost with it, the causes of its losses. Two can
        # arrive together: the process that could not store a block may also have died.
        self._losses: dict[int, dict[tuple[str, int], set[LossCause]]] = {}
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
            lost = self._losses.setdefault(batch, {})
            known = key in lost  # then the batch may be on its way in another chunk
            lost.setdefault(key, set()).add(loss.cause)
            # The loss of a whole chunk includes batches that have arrived.
            times = self._least(loss.cause, batch)
            if part.batches and not known and times > self._most[loss.cause]:
                self._world.fail(f"batch {batch} has been lost {times} times: {loss.cause.name}")

    def _least(self, cause: LossCause, batch: int) -> int:
        """Return how often a batch has been lost for this cause alone."""
        return sum(causes == {cause} for causes in self._losses.get(batch, {}).values())

    def _most_times(self, cause: LossCause, batch: int) -> int:
        """Return how often a batch may have been lost for this cause."""
        return sum(cause in causes for causes in self._losses.get(batch, {}).values())

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
        if any(not self._is_past_end(batch) for batch in self._spent(self._least)):
            self._world.fail("a batch is delivered although the losses of blocks are too many")
        if entry.outcome != "error":
            return
        task = self._most_times(LossCause.TASK, entry.batch)
        full = self._most_times(LossCause.STORE_FULL, entry.batch)
        # Both kinds of tries count together for a stream, whose batches stay together.
        cause = LossCause.STORE_FULL if full > task else LossCause.TASK
        least = self._least(LossCause.TASK, entry.batch)
        if least > self._most[LossCause.TASK] or task + full < self._most[cause]:
            self._world.fail(f"batch {entry.batch} is given up after {task} and {full} losses")
        assert isinstance(entry.value, KeptError)
        try:
            entry.value.reraise()
        except BatchLostError as error:
            if f"batch {entry.batch} (" not in str(error):
                self._world.fail(f"the error of batch {entry.batch} does not name it: {error}")

    def _spent(self, times: Callable[[LossCause, int], int]) -> list[int]:
        """Return the batches whose blocks have been lost too often."""
        block = LossCause.BLOCK
        return [batch for batch in self._losses if times(block, batch) >= self._most[block]]

    def _is_past_end(self, batch: int) -> bool:
        """Return whether a batch lies past the end of its stream, which dpex may know or not."""
        streams, workers = self._world.plan.streams, self._world.plan.workers
        return streams is not None and batch // workers >= streams[batch % workers]

    def fail(self, delivery: Delivery[StoredBlock]) -> None:
        """Check that an epoch fails because its losses are too many, and that it stays failed."""
        if any(self._world.states.kills(batch) for batch in self._spent(self._least)):
            self._world.fail("a batch that kills its processes fails the epoch")
        if not self._spent(self._most_times) and self._runs < tuning.MOST_LOSSES - 1:
            self._world.fail("the epoch fails although its losses are few")
        try:
            delivery.raise_failure()
        except BatchLostError:
            return
        self._world.fail("an epoch that has failed continues")
