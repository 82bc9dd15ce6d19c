"""What a seed draws before a schedule begins: the loader, its dataset, the machines, the faults."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random

from dpex.protocol.binding import Binding

__all__ = ["EndOfEpoch", "Epoch", "Fault", "Plan", "draw_plan"]

# So few that most schedules have little more than 200 events.
LEAST_BATCHES = 14
MOST_BATCHES = 30


class EndOfEpoch(enum.Enum):
    """How the training loop leaves an epoch."""

    READ = "read to its end"
    BREAK = "left by break"
    RESUME = "left, and resumed from its state by another loader on another carrier"
    CLOSE = "the loader is closed, and another one is made"


class Fault(enum.Enum):
    """A fault that a schedule may have."""

    DEATH = "a worker process dies"
    NODE = "a node dies"
    SILENCE = "a worker process does nothing for a while"
    GHOST = "Ray takes a worker process for dead, and it continues"
    CUT = "a node cannot be reached for a while"
    DROP = "a message is lost, and its sender repeats it"
    REPEAT = "a message arrives twice"
    STORE = "nodes lose blocks that nobody has read"
    FULL = "a node cannot store a block"
    PIPELINE = "the pipeline's execution fails"
    OTHERS = "another job takes CPUs"
    SLOW = "a link is slow for a while"


@dataclass(slots=True)
class Epoch:
    """One iteration over the loader.

    Attributes:
        end: How the training loop leaves it.
        reads: After how many batches, unless it reads to the end.
    """

    end: EndOfEpoch
    reads: int


@dataclass(slots=True)
class Plan:
    """The inputs of one schedule.

    Attributes:
        workers: Number of logical workers.
        length: Number of batches in an epoch of a map-style dataset.
        streams: Number of batches of each stream; None for a map-style dataset.
        binding: Initial binding of logical workers.
        changes_from: How many batches a dataset copy serves before each further batch changes it;
            None for a dataset that no batch changes.
        in_order: Whether batches are delivered in order.
        persistent: Whether logical workers outlive an epoch.
        prefetch_factor: The loader's argument.
        prefetch_batches: Number of batches that ``prefetch_bytes`` allows in flight.
        knows_length: Whether the sampler has a length.
        holds_resources: Whether waiting tasks hold what keeps other tasks from starting.
        claims_cpus: Whether Ray counts CPUs.
        later_stages: Whether blocks pass through a later stage.
        prefers_nodes: Whether tasks prefer some nodes.
        cpus: Number of tasks that may work at once on all nodes.
        nodes: Number of nodes.
        free_cores: Number of tasks that the loader starts with.
        batch_s: Mean time to make a batch.
        step_s: Mean time of a training step.
        small_share: Share of the blocks that a message carries; nodes store the others.
        fetch_s: Maximum time to fetch the stored blocks of one message.
        deadly: Batches that end every process that makes them.
        epochs: The iterations.
        faults: The faults, each with the number of the event before which it happens.
    """

    workers: int
    length: int
    streams: list[int] | None
    binding: Binding
    changes_from: int | None
    in_order: bool
    persistent: bool
    prefetch_factor: int
    prefetch_batches: int
    knows_length: bool
    holds_resources: bool
    claims_cpus: bool
    later_stages: bool
    prefers_nodes: bool
    cpus: int
    nodes: int
    free_cores: int
    batch_s: float
    step_s: float
    small_share: float
    fetch_s: float
    deadly: frozenset[int]
    epochs: list[Epoch]
    faults: list[tuple[int, Fault]]


_FAULTS = [*Fault, Fault.DEATH, Fault.DEATH, Fault.GHOST, Fault.STORE]


def draw_plan(draws: Random) -> Plan:
    """Draw the inputs of one schedule."""
    draw = draws.random
    workers = 2 + int(draw() * 7)
    length = LEAST_BATCHES + int(draw() * (MOST_BATCHES - LEAST_BATCHES))
    streams = None
    if draw() < 0.4:
        mean = length / workers
        streams = [int(2 * draw() * mean) for _ in range(workers)]
        streams[0] += max(0, LEAST_BATCHES - sum(streams))
    kind = draw()
    if streams is not None or kind < 0.3:
        binding = Binding.ALWAYS
    else:
        binding = Binding.WATCHED if kind < 0.85 else Binding.RELEASED
    changes_from = None
    if binding is Binding.ALWAYS:
        changes_from = 0 if draw() < 0.7 else None
    elif binding is Binding.WATCHED:
        changes_from = (0, 1, 4, None)[int(draw() * 4)]
    resources = draw()
    total = sum(streams) if streams is not None else length
    epochs = []
    share = draw()
    ends = [EndOfEpoch.BREAK, EndOfEpoch.RESUME, EndOfEpoch.RESUME, EndOfEpoch.CLOSE]
    if share < 0.35:
        end = ends[int(draw() * 4)]
        epochs.append(Epoch(end, int(draw() * (total + 1))))
    elif share < 0.5:
        epochs.append(Epoch(EndOfEpoch.READ, 0))
    epochs.append(Epoch(EndOfEpoch.READ, 0))
    number = int(draw() * 6)
    faults = [
        (int(draw() * draw() * 150), _FAULTS[int(draw() * len(_FAULTS))]) for _ in range(number)
    ]
    faults.sort(key=lambda fault: -fault[0])
    deadly = frozenset({int(draw() * length)} if draw() < 0.05 else ())
    if deadly and streams is not None:
        # A state does not say that an error has ended a stream, so the stream would continue.
        epochs = epochs[-1:]
    return Plan(
        workers=workers,
        length=length,
        streams=streams,
        binding=binding,
        changes_from=changes_from,
        in_order=draw() < 0.6,
        persistent=draw() < 0.3,
        prefetch_factor=1 + int(draw() * 3),
        prefetch_batches=4 + int(draw() * 60),
        knows_length=draw() < 0.8,
        holds_resources=resources < 0.2,
        claims_cpus=resources < 0.5,
        later_stages=draw() < 0.2,
        prefers_nodes=draw() < 0.2,
        cpus=1 + int(draw() * workers),
        nodes=1 + int(draw() * 3),
        free_cores=1 + int(draw() * workers),
        batch_s=(0.002, 0.01, 0.05)[int(draw() * 3)],
        step_s=(0.0, 0.002, 0.02)[int(draw() * 3)],
        small_share=(0.0, 0.5, 1.0)[int(draw() * 3)],
        fetch_s=(0.003, 0.003, 0.1)[int(draw() * 3)],
        deadly=deadly,
        epochs=epochs,
        faults=faults,
    )
