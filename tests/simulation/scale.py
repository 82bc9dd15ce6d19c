"""Simulate loaders of 64 and 256 nodes with measured times (`make simulate-scale`).

The real protocol runs on the simulated machines, without faults but for one node that dies. The
record of `make bench-service_times` has the times. The pipeline actor and the training process
are servers: each handles one message after another, and a message takes the processor time that
dpex and Ray need for one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Entry
from dpex.protocol.delivery import Pause
from simulation.attempts import Attempt
from simulation.clock import Clock
from simulation.cluster import Cluster
from simulation.loader import Run
from simulation.machines import Node
from simulation.model import check
from simulation.network import Link, Network
from simulation.pipelines import Pipeline
from simulation.plan import EndOfEpoch, Epoch, Plan
from simulation.schedule import World

__all__ = ["Setting", "Times", "play_loader", "play_ranks"]

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

# Assumptions, which no benchmark measures: the delay of a network between two machines, and the
# time after which Ray takes a node for dead that answers no more: five checks, three seconds apart.
NETWORK_S = 0.0002
NOTICE_S = 15.0
# This share of the batches take longer, by a time that has a Pareto distribution.
STRAGGLER_SHARE = 0.005
STRAGGLER_LEAST_S, STRAGGLER_EXPONENT, STRAGGLER_MOST_S = 1.0, 1.5, 30.0
# Neither the first part of an epoch counts, in which processes start, nor the end.
WARM_UP_SHARE = 0.25
PERCENTS = (50, 99, 99.9, 100)


@dataclass(frozen=True)
class Setting:
    """One loader, and the machines of its workers.

    Attributes:
        nodes: Number of nodes.
        cores: Number of cores of each node; each has one logical worker.
        work: Mean time of a batch, as a multiple of a measured batch of 64 photographs.
        stragglers: Whether some batches take much longer.
        prefetch_factor: The loader's argument.
        prefetch_batches: Number of batches that ``prefetch_bytes`` allows in flight.
        load: Share of the batches that the workers can make which the training loop takes; 1 or
            more for a training loop that computes nothing.
        rounds: Number of batches of each logical worker in the epoch.
    """

    nodes: int
    cores: int
    work: float = 4.0
    stragglers: bool = False
    prefetch_factor: int = 2
    prefetch_batches: int = 0
    load: float = 1.0
    rounds: int = 24

    @property
    def workers(self) -> int:
        """Number of logical workers."""
        return self.nodes * self.cores

    @property
    def window(self) -> int:
        """Maximum number of batches in flight."""
        return max(self.workers * self.prefetch_factor, self.prefetch_batches)


class Times:
    """The times that messages and batches take.

    Args:
        record: The record of the benchmark ``service_times``.
        task: The costs of a task, from the record of the benchmark ``scale``.

    Attributes:
        request_s: Time of the pipeline actor for a request and its answer.
        block_s: The same for a block.
        task_s: The same for the start of a task.
        place_s: Time for which a CPU is idle between two tasks.
        read_s: Time of the training process for a block.
    """

    def __init__(self, record: dict[str, Any], task: dict[str, Any]) -> None:
        self._percentiles = {
            name: ([float(percent) / 100 for percent in values], list(values.values()))
            for name, values in record["seconds"].items()
        }
        busy = record["epochs"]["busy"]["serial_ms"]
        self.request_s = self.block_s = busy["pipeline_actor"] / 2e3
        self.read_s = busy["training_process"] / 1e3
        self.task_s = task["pipeline_actor_ms"] / 1e3
        self.place_s = task["place_ms"] / 1e3

    @classmethod
    def measured(cls) -> Times:
        """Return the times of the stored records."""
        names = ("simulated/service_times", "scale")
        record, scale = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
        return cls(record, scale["task"])

    def at(self, name: str, share: float) -> float:
        """Return a quantile of a measured time."""
        shares, values = self._percentiles[name]
        right = min(max(1, bisect(shares, share)), len(shares) - 1)
        left = right - 1
        part = (share - shares[left]) / (shares[right] - shares[left])
        return values[left] + part * (values[right] - values[left])

    def mean_batch_s(self, setting: Setting) -> float:
        """Return the mean time of a batch."""
        parts = 2_000
        shares = [(n + 0.5) / parts for n in range(parts)]
        mean_s = setting.work * statistics.fmean(self.at("batch_s", share) for share in shares)
        if setting.stragglers:
            mean_s += STRAGGLER_SHARE * statistics.fmean(map(straggler_s, shares))
        return mean_s


def straggler_s(share: float) -> float:
    """Return a quantile of the time by which a straggler takes longer."""
    return min(STRAGGLER_LEAST_S * (1 - share) ** (-1 / STRAGGLER_EXPONENT), STRAGGLER_MOST_S)


# --- machines -------------------------------------------------------------------------------------


class Server:
    """A process that handles one message after another.

    Attributes:
        busy_s: How long it has handled messages.
        handled: Number of messages, by the name of their receiver.
        cpu_s: Real processor time that the simulation has needed for them, by the same name.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at = 0.0
        self.busy_s = 0.0
        self.handled: Counter[str] = Counter()
        self.cpu_s: Counter[str] = Counter()

    def take(self, service_s: float, receive: Callable[..., None], *message: Any) -> None:
        """Handle a message once all earlier messages are handled."""
        now = self._clock.now
        self._free_at = max(now, self._free_at) + service_s
        self.busy_s += service_s
        self._clock.after(self._free_at - now, self._handle, receive, *message)

    def _handle(self, receive: Callable[..., None], *message: Any) -> None:
        began = time.thread_time()
        receive(*message)
        name = receive.__name__.strip("_")
        self.cpu_s[name] += time.thread_time() - began
        self.handled[name] += 1


class MeasuredNetwork(Network):
    """Links with the measured delay of a call, between which the two servers handle messages."""

    def __init__(self, clock: Clock, draw: Callable[[], float], times: Times) -> None:
        super().__init__(clock, draw)
        self._times = times
        self._now = clock
        self._next = draw
        self.actor, self.training = Server(clock), Server(clock)

    def send(self, link: Link | None, receive: Callable[..., None], *message: Any) -> None:
        """Send a message, which its server handles after it has come."""
        delay_s = self._times.at("call_s", self._next()) / 2
        if link is not None:
            delay_s += NETWORK_S
        match receive.__self__, receive.__name__:  # type: ignore[attr-defined]
            case Pipeline(), "take_request":
                to, service_s = self.actor, self._times.request_s
            case Attempt(), "_arrive":
                to, service_s = self.actor, self._times.block_s
            case Pipeline(), _:
                to, service_s = self.actor, 0.0
            case Run(), "take_news":
                to, service_s = self.training, self._times.read_s * len(message[0])
            case _:
                self._now.after(delay_s, receive, *message)
                return
        self._now.after(delay_s, to.take, service_s, receive, *message)


class Nodes(Cluster):
    """Nodes with some cores each. A new task gets the node with the most free cores."""

    def __init__(self, world: ScaleWorld, setting: Setting) -> None:
        super().__init__(world)
        self._scale = world
        self._cores = setting.cores
        self._starting: Counter[Node] = Counter()

    def submit(self, pipeline: Pipeline, task: str) -> None:
        """Start a task once the pipeline actor has submitted it, and there is a CPU."""
        actor = self._scale.servers.actor
        actor.take(self._scale.times.task_s, super().submit, pipeline, task)

    def start_tasks(self) -> None:
        """Start the tasks that have a CPU."""
        world = self._scale
        while self._pending and self._used < self._cpus:
            pipeline, task = self._pending.pop(0)
            if pipeline.closed:
                continue
            self._used += 1
            node = min(self.nodes, key=self._taken)
            self._starting[node] += 1
            idle = sum(p.attempt is None for p in node.processes) >= self._starting[node]
            start = "task_start_s" if idle else "process_start_s"
            delay_s = world.times.place_s + world.times.at(start, world.draw())
            world.clock.after(delay_s, self._start, pipeline, task, node)

    def _taken(self, node: Node) -> int:
        return self._starting[node] + sum(p.attempt is not None for p in node.processes)

    def _start(self, pipeline: Pipeline, task: str, node: Node) -> None:
        self._starting[node] -= 1
        super()._start(pipeline, task, node)

    def lose_node(self, node: Node) -> None:
        """End a node, which no other one replaces."""
        self._cpus -= self._cores
        super().lose_node(node)

    def _restart(self, attempt: Attempt) -> None:
        """Restart a task once Ray has noticed the death of its node."""
        self._world.clock.after(NOTICE_S, super()._restart, attempt)


class ScaleWorld(World):
    """A loader on many nodes, whose training loop reads one epoch.

    Attributes:
        delivered: When each batch was delivered.
        asked: When the training loop asked for it.
    """

    def __init__(self, seed: int, setting: Setting, times: Times) -> None:
        super().__init__(seed, plan_of(setting))
        self.times = times
        self._setting = setting
        mean_s = times.mean_batch_s(setting)
        self._step_s = 0.0 if setting.load >= 1 else mean_s / (setting.workers * setting.load)
        self.network = self.servers = MeasuredNetwork(self.clock, self.draw, times)
        self.cluster = Nodes(self, setting)
        self.plan.step_s = self._step_s
        self.asked = [0.0]
        self.delivered: list[float] = []
        # Whether another world decides how long a step takes; see ``play_ranks``.
        self.in_step = False

    def batch_seconds(self) -> float:
        """Draw the time to make a batch."""
        seconds = self._setting.work * self.times.at("batch_s", self.draw())
        if self._setting.stragglers and self.draw() < STRAGGLER_SHARE:
            seconds += straggler_s(self.draw())
        return seconds

    def pause(self, seconds: float) -> Pause:
        """Return a training step, which takes the same time each time."""
        return Pause(math.inf if self.in_step else seconds)

    def begin_next(self, at: float) -> None:
        """End the step of a training loop that waits for other ranks."""
        self.asked[-1] = at
        training = self.training
        self.clock.after(at - self.clock.now, training._time_out, training._waits)

    def run_to(self, batches: int) -> None:
        """Play until the training loop has got some batches, or has read its epoch."""
        delivered, step, training = self.delivered, self.clock.step, self.training
        while len(delivered) < batches and not training.over:
            step()

    def run_to_end(self) -> None:
        """Play to the end of the epoch, and check what it has delivered."""
        self.run_to(sys.maxsize)
        if wrong := check(self.history, self.plan):
            self.fail(wrong)

    def deliver(self, epoch: int, version: int, entry: Entry, batch: int) -> None:
        """Note when the training loop has got a batch, and when it asks for the next one."""
        super().deliver(epoch, version, entry, batch)
        self.delivered.append(self.clock.now)
        self.asked.append(self.clock.now + self._step_s)

    def log(self, kind: str, *values: Any) -> None:
        """Keep only what the model checks."""
        if kind in ("leaves", "delivers"):
            super().log(kind, *values)

    def waits(self) -> list[float]:
        """Return how long the training loop waited for each batch."""
        return [got - asked for got, asked in zip(self.delivered, self.asked, strict=False)]


def plan_of(setting: Setting) -> Plan:
    """Return the plan of a loader as a user makes one: of a map-style dataset, on a cluster."""
    workers = setting.workers
    return Plan(
        workers=workers,
        length=workers * setting.rounds,
        streams=None,
        binding=Binding.WATCHED,
        changes_from=[None] * workers,
        in_order=True,
        persistent=False,
        prefetch_factor=setting.prefetch_factor,
        prefetch_batches=setting.prefetch_batches,
        knows_length=True,
        holds_resources=False,
        claims_cpus=True,
        later_stages=False,
        prefers_nodes=False,
        cpus=workers,
        nodes=setting.nodes,
        free_cores=workers,
        batch_s=1.0,
        unstorable=frozenset(),
        vanishing=frozenset(),
        hopeless=False,
        step_s=0.0,
        small_share=1.0,
        fetch_s=0.0,
        deadly=frozenset(),
        epochs=[Epoch(EndOfEpoch.READ, 0)],
        faults=[],
    )


# --- measurements ---------------------------------------------------------------------------------


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return some percentiles of values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {str(percent): ordered[math.ceil(percent / 100 * last)] for percent in PERCENTS}


def described(setting: Setting, times: Times) -> dict[str, Any]:
    """Return a setting with what follows from it."""
    return {
        **asdict(setting),
        "workers": setting.workers,
        "window": setting.window,
        "batch_s": times.mean_batch_s(setting),
    }


def play_loader(setting: Setting, times: Times, seed: int = 0) -> dict[str, Any]:
    """Play one epoch of a loader, and measure its middle.

    Returns:
        ``ideal_per_s``: batches that the logical workers can make in a second. ``batches_per_s``:
        batches delivered in a second. ``wait_s``: percentiles of the time of ``next()``, and
        ``mean_wait_s`` their mean.
        ``step_s``: the time of a training step. ``actor_busy``: the share of the time for which the
        pipeline actor handles messages. ``tasks``: tasks for each batch. ``cpu_us``: mean real
        processor time of an event, by kind.
    """
    world = ScaleWorld(seed, setting, times)
    actor, length = world.servers.actor, world.plan.length
    first = int(length * WARM_UP_SHARE)
    last = max(first + 2, length - setting.window)
    world.training.start()
    world.run_to(first)
    before = actor.busy_s
    world.run_to(last)
    busy_s = actor.busy_s - before
    world.run_to_end()
    seconds = world.delivered[last - 1] - world.delivered[first - 1]
    return {
        **described(setting, times),
        "ideal_per_s": setting.workers / times.mean_batch_s(setting),
        "batches_per_s": (last - first) / seconds,
        "step_s": world.plan.step_s,
        "wait_s": percentiles(world.waits()[first:last]),
        "mean_wait_s": statistics.fmean(world.waits()[first:last]),
        "actor_busy": busy_s / seconds,
        "tasks": actor.handled["submit"] / length,
        "cpu_us": {
            name: 1e6 * server.cpu_s[name] / server.handled[name]
            for server in (actor, world.servers.training)
            for name in server.cpu_s
        },
    }


def play_loss(setting: Setting, times: Times, seed: int = 0) -> dict[str, Any]:
    """Play one epoch in which a node dies, and measure the repair.

    Returns:
        ``lost``: number of batches that the node's processes had to make. ``repaired_s``: time from
        the death until the training loop has got the last of these. ``longest_wait_s``: the longest
        ``next()`` after the death.
    """
    world = ScaleWorld(seed, setting, times)
    world.training.start()
    at = world.plan.length // 3
    world.run_to(at)
    died_at, node = world.clock.now, world.cluster.nodes[0]
    attempts = [process.attempt for process in node.processes if process.attempt is not None]
    lost = {n for attempt in attempts if attempt._chunk for n in attempt.chunk.numbers}
    world.cluster.lose_node(node)
    world.run_to_end()
    return {
        **described(setting, times),
        "step_s": world.plan.step_s,
        "lost": len(lost),
        "repaired_s": max(world.delivered[number] for number in lost) - died_at,
        "longest_wait_s": max(world.waits()[at:]),
    }


def play_ranks(setting: Setting, times: Times, ranks: int) -> dict[str, Any]:
    """Play one epoch of many ranks, each with a loader of its own.

    A step begins when all ranks have their batch, so all ranks wait for the slowest one.

    Returns:
        ``rank_wait_s``: percentiles of ``next()`` on one rank. ``wait_s``: percentiles of the
        longest ``next()`` of all ranks in a step. ``mean_wait_s``: the mean of the latter.
    """
    worlds = [ScaleWorld(seed, setting, times) for seed in range(ranks)]
    step_s, length = worlds[0].plan.step_s, worlds[0].plan.length
    for world in worlds:
        world.in_step = True
        world.training.start()
    rank_waits, waits = [], []
    begins_at = 0.0
    for number in range(length):
        for world in worlds:
            world.run_to(number + 1)
        got = [world.delivered[number] for world in worlds]
        if WARM_UP_SHARE * length <= number < length - setting.window:
            rank_waits += [at - begins_at for at in got]
            waits.append(max(got) - begins_at)
        begins_at = max(got) + step_s
        for world in worlds:
            world.begin_next(begins_at)
    for world in worlds:
        world.run_to_end()
    return {
        **described(setting, times),
        "ranks": ranks,
        "step_s": step_s,
        "rank_wait_s": percentiles(rank_waits),
        "wait_s": percentiles(waits),
        "mean_wait_s": statistics.fmean(waits),
    }


# --- the record -----------------------------------------------------------------------------------

NODES = (64, 256)
CORES = 4
RANKS = 256
# Batches of 256 photographs, and batches that take six times as long.
USUAL, SLOW = 4.0, 24.0


def record(times: Times) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all results, each with the name of its table."""
    few, many = NODES
    for nodes in (4, *NODES):
        yield "events", play_loader(Setting(nodes, CORES, SLOW, rounds=8), times)
    for nodes, work, rounds in ((few, USUAL, 100), (few, SLOW, 20), (many, SLOW, 12)):
        yield "rate", play_loader(Setting(nodes, CORES, work, rounds=rounds), times)
        for factor in (1, 2, 4):
            late = Setting(nodes, CORES, work, True, factor, rounds=rounds)
            yield "rate", play_loader(late, times)
    ahead = Setting(few, CORES, USUAL, True, prefetch_batches=1_024, rounds=100)
    yield "rate", play_loader(ahead, times)
    yield "rate", play_loader(Setting(many, CORES, USUAL, rounds=24), times)
    for nodes, work, rounds in ((few, USUAL, 32), (many, SLOW, 12)):
        for factor in (2, 4):
            yield "next", play_loader(late_at(0.8, nodes, work, factor, rounds), times)
            yield "loss", play_loss(Setting(nodes, CORES, work, False, factor, load=0.8), times)
    yield "ranks", play_ranks(Setting(4, CORES, USUAL, load=0.8, rounds=12), times, RANKS)
    for factor, rounds in ((2, 16), (4, 16), (8, 32)):
        yield "ranks", play_ranks(late_at(0.8, 4, USUAL, factor, rounds), times, RANKS)


def late_at(load: float, nodes: int, work: float, factor: int, rounds: int) -> Setting:
    """Return a loader with stragglers whose training loop computes."""
    return Setting(nodes, CORES, work, True, factor, load=load, rounds=rounds)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="simulation.scale", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "simulated/scale.json")
    out = parser.parse_args().out
    gc.disable()  # a world is a reference cycle, so the collector would only cost time
    tables: dict[str, list[dict[str, Any]]] = {}
    for table, result in record(Times.measured()):
        tables.setdefault(table, []).append(result)
        print(table, result, file=sys.stderr, flush=True)
        gc.collect()
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        f' "{table}": [\n' + ",\n".join(f"  {json.dumps(result)}" for result in results) + "\n ]"
        for table, results in tables.items()
    )
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
