"""What a seed draws before a schedule begins: the loader, its dataset, the machines, the faults."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random

from dpex.protocol.binding import Binding

__all__ = ["EndOfEpoch", "Epoch", "Fault", "Plan", "add_faults_that_meet", "draw_plan"]

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
        changes_from: For each logical worker, how many of its batches come before those that change
            its dataset copy; None if no batch does.
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
        unstorable: Batches that no node can store.
        vanishing: Batches whose stored blocks are lost.
        hopeless: Whether every pipeline breaks as soon as it is made.
        epochs: The iterations.
        faults: The faults, each with the number of the event before which it happens.
    """

    workers: int
    length: int
    streams: list[int] | None
    binding: Binding
    changes_from: list[int | None]
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
    unstorable: frozenset[int]
    vanishing: frozenset[int]
    hopeless: bool
    epochs: list[Epoch]
    faults: list[tuple[int, Fault]]

    def keeps_state(self, worker: int, index: int) -> bool:
        """Return whether a batch changes the dataset copy of its logical worker.

        Args:
            worker: The logical worker.
            index: Number of the batch among those of the logical worker.
        """
        changes_from = self.changes_from[worker]
        return changes_from is not None and index >= changes_from


# Share of the schedules in which a pipeline fails soon after Ray has taken a process for dead.
# Faults that are drawn one by one rarely meet in this way.
_MET_SHARE = 0.01
_MOST_OTHERS = 3


def add_faults_that_meet(plan: Plan, seed: int) -> None:
    """Add faults to the schedules of some seeds, and leave the draws of all others as they are."""
    draw = Random(~seed).random
    if draw() >= _MET_SHARE:
        return
    at = int(draw() * 100)
    met = [(at, Fault.GHOST), (at + 1 + int(draw() * 20), Fault.PIPELINE)]
    plan.faults = sorted([*plan.faults[:_MOST_OTHERS], *met], key=lambda fault: -fault[0])


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
    changes_from: list[int | None] = [None] * workers
    if binding is Binding.ALWAYS:
        changes_from = [0] * workers  # worker_init_fn, or the iterator of a stream, makes a state
    elif binding is Binding.WATCHED:
        changes_from = [(0, 1, 4, None)[int(draw() * 4)]] * workers
        if draw() < 0.4:
            changes_from = [(0, 1, 4, None)[int(draw() * 4)] for _ in range(workers)]
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
    trouble, batch = draw(), frozenset({int(draw() * length)})
    none: frozenset[int] = frozenset()
    deadly = batch if trouble < 0.05 else none
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
        # The batches of a stream stay together, so the error would name the first one of a block.
        unstorable=batch if 0.05 <= trouble < 0.07 and streams is None else none,
        vanishing=batch if 0.07 <= trouble < 0.09 else none,
        hopeless=0.09 <= trouble < 0.095,
        epochs=epochs,
        faults=faults,
    )
