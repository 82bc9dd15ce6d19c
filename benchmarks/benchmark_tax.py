"""The benchmark ``tax``: the overhead of a loader on the training loop beside it.

A training step here is 50 ms of Python and of small torch operations in the main thread, and then
one ``next(loader)``. Workers only sleep, so they take no core from the step. They could deliver a
quarter more batches than the loop needs, so ``next()`` has no reason to block. The time in
``next()`` counts, and its blocked part is also reported separately. So the overhead comes from the
loader itself: threads that hold the GIL, helper processes, and the decoding of batches.

The same loop is some per cent faster in one process than in another, depending on the place of its
memory. So the benchmark compares loops of one process. Some loops run before the loader exists. The
others run in turns while the loader works and while it is idle. Each round has a new process.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.goals import Goal
from benchmarks.harness import (
    SETTLE_S,
    arguments,
    close,
    describe_machine,
    make_loader,
    say,
    summarise,
    table,
    touch,
    write,
)
from benchmarks.plots import bars
from benchmarks.workloads import SleepingSamples

STEP_S = 0.05
BATCH_SIZE = 10
SUPPLY_OVER_DEMAND = 1.25
WARM_STEPS = 10
TIMED_STEPS = 30
# Several short loops: the speed of a shared machine drifts by more than the overhead.
TURNS = 3
# Batches that workers may have ahead at the end, so that they deliver until the clock stops.
SPARE_BATCHES = 20
BLOCKED_TOO_MUCH = 0.01
# dpex's loader slows the loop down no more than torch's.
GOAL_PERCENT = 0.0


@dataclass(frozen=True)
class Work:
    """One training step: iterations of a Python loop, then iterations of a torch loop."""

    python_turns: int
    torch_turns: int

    def do(self) -> None:
        """Run the step."""
        self.do_python()
        self.do_torch()

    def do_python(self) -> None:
        """Hold the GIL, as losses, metrics and logging do."""
        counts: dict[int, int] = {}
        for turn in range(self.python_turns):
            counts[turn & 63] = counts.get(turn & 31, 0) + turn

    def do_torch(self) -> None:
        """Release and take the GIL at every operation, as a model's forward pass does."""
        state = weight = torch.eye(48)
        for _ in range(self.torch_turns):
            state = torch.relu(state @ weight)


@dataclass(frozen=True)
class Loop:
    """The times of one loop.

    Attributes:
        seconds: Time of the whole loop.
        work_s: Time in the steps.
        next_s: Time in ``next()`` and in touching the batch.
        blocked_s: Part of ``next_s`` in which this thread did not run.
    """

    seconds: float
    work_s: float
    next_s: float
    blocked_s: float


@dataclass(frozen=True)
class FairShare:
    """The loops of one process.

    Attributes:
        before: Loops before the loader existed.
        at_work: Loops that the loader fed.
        at_rest: Loops beside the idle loader, between its epochs. They alternate with ``at_work``.
    """

    before: list[Loop]
    at_work: list[Loop]
    at_rest: list[Loop]


def calibrate() -> Work:
    """Return a step that takes ``STEP_S`` on this machine, half in Python and half in torch."""

    def turns(kind: str, tried: int = 2_000) -> int:
        work = Work(tried, tried)
        seconds = []
        for _ in range(15):
            started = time.perf_counter()
            getattr(work, f"do_{kind}")()
            seconds.append(time.perf_counter() - started)
        return int(tried * STEP_S / 2 / min(seconds))

    return Work(turns("python"), turns("torch"))


def train(peer: str, work: Work, num_workers: int, control: Connection) -> None:
    """Run all loops of one round in this process.

    Args:
        peer: ``"torch"``, ``"dpex"``, or another peer of ``make_loader``.
        work: One step.
        num_workers: Number of workers of the loader.
        control: Receives a :class:`FairShare`.
    """
    torch.set_num_threads(1)
    batches = WARM_STEPS + TIMED_STEPS + SPARE_BATCHES
    sleep_s = STEP_S / SUPPLY_OVER_DEMAND * num_workers / BATCH_SIZE
    dataset = SleepingSamples(batches * BATCH_SIZE, sleep_s)
    before = [loop(work, None) for _ in range(TURNS)]
    loader = make_loader(peer, dataset, batch_size=BATCH_SIZE, num_workers=num_workers)
    loop(work, loader)  # start-up
    at_work: list[Loop] = []
    at_rest: list[Loop] = []
    for turn in range(TURNS):
        # The order alternates, so that a steady drift favours neither kind of loop.
        loops = [(at_work, loader), (at_rest, None)]
        for kind, fed_by in loops if turn % 2 == 0 else reversed(loops):
            time.sleep(SETTLE_S)
            kind.append(loop(work, fed_by))
    close(loader)
    control.send(FairShare(before, at_work, at_rest))


def loop(work: Work, loader: Iterable[Any] | None) -> Loop:
    """Time one loop, and then read the rest of the epoch."""
    iterator: Iterator[Any] = iter(loader if loader is not None else [])
    for _ in range(WARM_STEPS):
        work.do()
        next(iterator, None)
    work_s = next_s = on_cpu_s = 0.0
    started = mark = time.perf_counter()
    for _ in range(TIMED_STEPS):
        work.do()
        asked = time.perf_counter()
        work_s += asked - mark
        if loader is not None:
            cpu_before = time.thread_time()
            touch(next(iterator))
            on_cpu_s += time.thread_time() - cpu_before
        mark = time.perf_counter()
        next_s += mark - asked
    seconds = mark - started
    for _ in iterator:
        pass
    return Loop(seconds, work_s, next_s, max(0.0, next_s - on_cpu_s))


def run_round(peer: str, work: Work, num_workers: int) -> FairShare:
    """Run one round in a new process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=train, args=(peer, work, num_workers, theirs))
    process.start()
    theirs.close()
    try:
        result: FairShare = ours.recv()
        return result
    finally:
        process.join(30)


def neighbours(rounds: Sequence[FairShare]) -> list[tuple[Loop, Loop]]:
    """Pair each loop that a loader feeds with the adjacent loop beside the idle loader."""
    return [pair for one in rounds for pair in zip(one.at_work, one.at_rest, strict=True)]


def active(rounds: Sequence[FairShare]) -> list[float]:
    """Return the time of each loop that a loader feeds, divided by that of its neighbour."""
    return [fed.seconds / rest.seconds for fed, rest in neighbours(rounds)]


def present(rounds: Sequence[FairShare]) -> list[float]:
    """Return the time of loops beside an idle loader, divided by the time before it existed."""
    return [
        statistics.median(loop.seconds for loop in one.at_rest)
        / statistics.median(loop.seconds for loop in one.before)
        for one in rounds
    ]


def slowdowns(rounds: Sequence[FairShare]) -> list[float]:
    """Return by which share each fed loop is slower than one without a loader."""
    presence = statistics.median(present(rounds))
    return [ratio * presence - 1 for ratio in active(rounds)]


def main() -> None:
    options = arguments(__doc__, "tax")
    record = describe_machine("tax")
    torch.set_num_threads(1)
    work = calibrate()
    record["settings"] = {
        "step_s": STEP_S,
        "work": asdict(work),
        "num_workers": options.workers,
        "batch_size": BATCH_SIZE,
        "timed_steps": TIMED_STEPS,
        "batches_per_s": 1 / STEP_S,
    }
    rounds: dict[str, list[FairShare]] = {peer: [] for peer in options.peers}
    for number in range(options.rounds):
        for peer, its_rounds in rounds.items():
            its_rounds.append(run_round(peer, work, options.workers))
            ratio = statistics.median(slowdowns(its_rounds[-1:]))
            say(f"tax round {number + 1}/{options.rounds}, {peer}: {ratio:+.1%}")

    record["rounds"] = {peer: [asdict(r) for r in rounds[peer]] for peer in rounds}
    for figure in (
        "slowdown",
        "at_work_over_at_rest",
        "at_rest_over_before",
        "next_share",
        "waiting_share",
    ):
        record[figure] = {}
    for peer, its_rounds in rounds.items():
        record["slowdown"][peer] = summarise(slowdowns(its_rounds))
        record["at_work_over_at_rest"][peer] = summarise(active(its_rounds))
        record["at_rest_over_before"][peer] = summarise(present(its_rounds))
        pairs = neighbours(its_rounds)
        record["next_share"][peer] = summarise([a.next_s / b.seconds for a, b in pairs])
        record["waiting_share"][peer] = summarise([a.blocked_s / b.seconds for a, b in pairs])
        if record["waiting_share"][peer]["median"] > BLOCKED_TOO_MUCH:
            say(f"{peer}: next() waited, for data or for a core; the figure is no pure tax")
    percents = {
        peer: [100 * share for share in slowdown["all"]]
        for peer, slowdown in record["slowdown"].items()
    }
    record["goals"] = []
    if {"torch", "dpex"} <= percents.keys():
        goal = Goal.of(
            "training process",
            "tax: training loop slower beside dpex than beside torch's loader",
            [a - b for a, b in zip(percents["dpex"], percents["torch"], strict=True)],
            "<=",
            GOAL_PERCENT,
            "percent",
            ", ".join(
                f"{peer} {statistics.median(values):.1f} %" for peer, values in percents.items()
            ),
        )
        record["goals"] = [asdict(goal)]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        "How much slower the training loop runs beside a loader",
        percents,
        "%",
    )
    print(table([record]))


if __name__ == "__main__":
    main()
