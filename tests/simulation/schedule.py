"""One schedule: a world whose events and faults a seed draws, and its history."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from dpex import tuning
from dpex.protocol.chunks import Entry
from dpex.protocol.delivery import Pause
from simulation import model
from simulation.budgets import Budgets
from simulation.clock import Clock
from simulation.cluster import Cluster
from simulation.faults import Faults
from simulation.invariants import Invariants
from simulation.loader import Loader, TrainingLoop
from simulation.machines import StoredBlock
from simulation.network import Network
from simulation.pipelines import Pipeline
from simulation.plan import Fault, Plan, add_faults_that_meet, draw_plan
from simulation.states import States

__all__ = ["Failure", "World", "play", "readable"]

# Without a fault, a batch is delivered within this virtual time, or the epoch has ended.
STALL_S = 120.0
# All tasks end within this time after the loader is closed.
CLOSED_S = 60.0
MOST_EVENTS = 30_000


class Failure(AssertionError):
    """A schedule that broke an invariant."""


class World:
    """Everything in one schedule, whose worker processes run tasks on a cluster.

    Args:
        seed: Draws all that happens.
        plan: The inputs; None to draw them.

    Attributes:
        history: The events so far.
        failure: The failure, if there was one. ``Delivery`` may have caught it.
        replaced: The latest processes that Ray has replaced, as all pipelines know them.
        carrier: What runs the worker processes, for messages.
    """

    carrier = "cluster"

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        draws = Random(seed)
        self.seed = seed
        self.draw = draws.random
        self.plan = plan or draw_plan(draws)
        if plan is None:
            add_faults_that_meet(self.plan, seed)
        self.clock = Clock(self.draw)
        self.history: list[tuple[Any, ...]] = []
        self.failure: Failure | None = None
        self.pipelines: list[Pipeline] = []
        self.replaced: deque[str] = deque(maxlen=tuning.MAX_REPLACED)
        self.network = Network(self.clock, self.draw)
        self.cluster = Cluster(self)
        self.invariants = Invariants(self)
        self.states = States(self)
        self.budgets = Budgets(self)
        self.faults = Faults(self)
        self.training = TrainingLoop(self)
        self._iterations: dict[str, int] = {}

    def play(self) -> None:
        """Run events until the training loop is over and all tasks have ended.

        Raises:
            Failure: An invariant does not hold.
        """
        try:
            self._play()
        except Failure:
            raise
        except Exception as error:
            raise Failure(self._placed(f"{type(error).__name__}: {error}")) from error

    def _play(self) -> None:
        clock, faults, training, step = self.clock, self.plan.faults, self.training, self.clock.step
        training.start()
        while not training.over:
            if faults and clock.events >= faults[-1][0]:
                self.happen(faults.pop()[1])
            step()
            if clock.now > STALL_S and self._stalls():
                self.fail(f"no batch for {STALL_S} s")
            if clock.events > MOST_EVENTS:
                self.fail(f"more than {MOST_EVENTS} events")
        end = max(clock.now, self.faults.calm_at) + CLOSED_S
        cluster = self.cluster
        while cluster.attempts or any(not pipeline.closed for pipeline in self.pipelines):
            if clock.now > end or not step():
                self.fail("tasks run after the loader was closed")
        if wrong := model.check(self.history, self.plan):
            self.fail(wrong)

    def make_loader(self, loop: TrainingLoop) -> Loader:
        """Return a new loader."""
        return Loader(loop)

    def happen(self, fault: Fault) -> None:
        """Cause a fault now."""
        self.faults.happen(fault)

    def _stalls(self) -> bool:
        return self.clock.now > STALL_S + max(self.training.delivered_at, self.faults.calm_at)

    def fail(self, text: str) -> None:
        """Raise the failure of the schedule."""
        self.failure = Failure(self._placed(text))
        raise self.failure

    def _placed(self, text: str) -> str:
        return f"seed {self.seed} ({self.carrier}), at {self.clock.now:.3f} s: {text}"

    def log(self, kind: str, *values: Any) -> None:
        """Add an event to the history."""
        self.history.append((self.clock.now, kind, *values))

    def batch_seconds(self) -> float:
        """Draw the time to make a batch."""
        draw = self.draw()
        seconds = self.plan.batch_s * (0.2 + draw)
        return 10 * seconds if draw > 0.95 else seconds

    def pause(self, seconds: float) -> Pause:
        """Draw the time of a training step."""
        return Pause(2 * seconds * self.draw())

    def has_idle_core(self) -> bool:
        """Return whether the machine has an idle processor."""
        return self.draw() < 0.5

    def deliver(self, epoch: int, version: int, entry: Entry, batch: int) -> None:
        """Note that the training loop has got a batch."""
        self.history.append((self.clock.now, "delivers", epoch, batch, entry.value, entry.outcome))
        self.invariants.deliver()
        self.budgets.deliver(entry)

    def note_idle(self, pipeline: Pipeline) -> None:
        """Note that a task has ended, for which chunks of another pipeline may wait."""
        if pipeline.closed:
            pipeline.note_ends()
            for other in self.pipelines:
                other.feed_held()

    def iteration_of(self, run: str) -> int:
        """Return the number of the iteration that a run belongs to."""
        return self._iterations[run]

    def note_run(self, run: str, iteration: int) -> None:
        """Note the iteration that a run belongs to."""
        self._iterations[run] = iteration

    def lose_block(self, block: StoredBlock) -> None:
        """Lose a block that a node stores."""
        if self.invariants.may_lose(block.block, "block", tuning.MOST_LOSSES - 1):
            block.lost = True
            self.log("loses block", block.block)
        if block.node is not None:
            block.node.stored.pop(block, None)


def play(seed: int) -> World:
    """Play the schedule of a seed, and return its world.

    Raises:
        Failure: An invariant does not hold.
    """
    world = World(seed)
    world.play()
    return world


def readable(history: list[tuple[Any, ...]]) -> str:
    """Return a history as text, one line for each event."""
    return "\n".join(
        f"{now:10.4f}  {kind:12} {', '.join(map(str, values))}" for now, kind, *values in history
    )
