"""The faults that a schedule may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpex import tuning
from dpex.protocol.scheduler import OtherJobs
from simulation.network import Link
from simulation.plan import Fault

if TYPE_CHECKING:
    from simulation.attempts import Attempt
    from simulation.machines import StoredBlock, WorkerProcess
    from simulation.schedule import World

__all__ = ["Faults"]

# How long a process runs after Ray has replaced it, until Ray kills it.
MOST_CUT_S = 8.0
MOST_SILENCE_S = 6.0
OTHERS_S = 8.0
# Share of the stored blocks that are lost together.
LOST_SHARE = 0.6


class Faults:
    """Lets faults happen in a world.

    Attributes:
        calm_at: The time after which no fault has an effect any more.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pipelines = 0
        self.calm_at = 0.0

    def happen(self, fault: Fault) -> None:
        """Cause a fault now, if the world has something that the fault can affect."""
        self._world.log("fault", fault.name)
        getattr(self, f"_{fault.name.lower()}")()

    def _lasts(self, most_s: float) -> float:
        """Draw how long a fault lasts, and return the time at its end."""
        draw = self._world.draw
        until = self._world.clock.now + most_s * draw() * draw()
        self.calm_at = max(self.calm_at, until)
        return until

    def _attempt(self) -> Attempt | None:
        attempts = [a for a in self._world.cluster.attempts.values() if not a.replaced]
        if not attempts:
            return None
        return attempts[int(self._world.draw() * len(attempts))]

    def _process(self) -> WorkerProcess | None:
        attempt = self._attempt()
        return None if attempt is None else attempt.process

    def _death(self) -> None:
        if (process := self._process()) is not None:
            self._world.cluster.die(process, loses=True)

    def _node(self) -> None:
        nodes = self._world.cluster.nodes
        self._world.cluster.lose_node(nodes[int(self._world.draw() * len(nodes))])

    def _silence(self) -> None:
        if (process := self._process()) is not None:
            process.silent_until = self._lasts(MOST_SILENCE_S)

    def _ghost(self) -> None:
        if (attempt := self._attempt()) is None:
            return
        world, process = self._world, attempt.process
        process.link = Link()
        process.link.cut_until = self._lasts(MOST_CUT_S)
        if world.draw() < 0.5:
            process.silent_until = self._lasts(MOST_CUT_S)
        # Ray takes no block of a replaced process for a later stage, so it gets no chunk either.
        if world.draw() < 0.7 or world.plan.later_stages:
            until = process.link.cut_until if world.plan.later_stages else self._lasts(MOST_CUT_S)
            world.clock.after(until - world.clock.now, world.cluster.die, process)
        world.cluster.replace(attempt)

    def _cut(self) -> None:
        nodes = self._world.cluster.nodes
        link = nodes[int(self._world.draw() * len(nodes))].link
        link.cut_until = max(link.cut_until, self._lasts(MOST_CUT_S))

    def _slow(self) -> None:
        nodes = self._world.cluster.nodes
        link = nodes[int(self._world.draw() * len(nodes))].link
        link.slow_until = max(link.slow_until, self._lasts(MOST_CUT_S))

    def _drop(self) -> None:
        self._world.network.drops += 1 + int(self._world.draw() * 3)

    def _repeat(self) -> None:
        self._world.network.repeats += 1 + int(self._world.draw() * 3)

    def _stored(self) -> list[StoredBlock]:
        return [block for node in self._world.cluster.nodes for block in node.stored]

    def _store(self) -> None:
        for block in self._stored():
            if self._world.draw() < LOST_SHARE:
                self._world.lose_block(block)

    def _full(self) -> None:
        nodes = self._world.cluster.nodes
        nodes[int(self._world.draw() * len(nodes))].full += 1 + int(self._world.draw() * 2)

    def _pipeline(self) -> None:
        world = self._world
        pipelines = [p for p in world.pipelines if not p.closed and not p.broken]
        # dpex gives up after three pipelines in a row.
        if pipelines and self._pipelines < 2:
            self._pipelines += 1
            pipeline = pipelines[int(world.draw() * len(pipelines))]
            pipeline.break_down()

    def _others(self) -> None:
        world = self._world
        if not world.plan.claims_cpus:
            return
        world.cluster.others += 1
        self._report_others(self._lasts(OTHERS_S))

    def _report_others(self, until: float) -> None:
        world = self._world
        over = world.clock.now >= until
        others = OtherJobs(world.draw() < 0.7, int(world.draw() * 3))
        if over:
            world.cluster.others -= 1
            world.cluster.start_tasks()
        for pipeline in world.pipelines:
            pipeline.note_others(None if over else others)
        if not over:
            world.clock.after(tuning.POLL_S, self._report_others, until)
