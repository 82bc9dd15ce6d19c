"""The tax on the trainer: how much slower the training loop runs because a loader works beside it.

A training step here is a fixed amount of Python and of small torch operations in the main thread,
50 ms of it, then one ``next(loader)``. Workers only sleep, so they take no core from the step, and
they could deliver a quarter more than is asked for, so ``next()`` has no reason to block; what
``next()`` takes is not subtracted, and the part of it that was blocked is reported apart. What
makes the loop slower is then the loader itself: its threads that hold the GIL, its helper
processes, its decoding of a batch.

Each loop lives in a process of its own, so that the loop without a loader shares its interpreter
with nobody. The processes take turns.
"""

import multiprocessing
import time
from collections.abc import Iterator
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
WARM_STEPS = 15
TIMED_STEPS = 40
# Short loops, and more of them: a shared machine drifts by more than is to be measured.
TURNS_PER_ROUND = 3
# What the workers may be ahead by at the end, so that they deliver as long as the clock runs.
SPARE_BATCHES = 40
BLOCKED_TOO_MUCH = 0.01
GOAL_PERCENT = 3.0


@dataclass(frozen=True)
class Work:
    """One training step: so many turns of a Python loop, then so many of a torch loop."""

    python_turns: int
    torch_turns: int

    def do(self) -> None:
        """Take the step."""
        self.do_python()
        self.do_torch()

    def do_python(self) -> None:
        """Keep the GIL busy, as losses, metrics and logging do."""
        counts: dict[int, int] = {}
        for turn in range(self.python_turns):
            counts[turn & 63] = counts.get(turn & 31, 0) + turn

    def do_torch(self) -> None:
        """Release and take the GIL at every operation, as a model's forward does."""
        state = weight = torch.eye(48)
        for _ in range(self.torch_turns):
            state = torch.relu(state @ weight)


@dataclass(frozen=True)
class Loop:
    """One timed loop.

    Attributes:
        seconds: All of it.
        work_s: The part in the steps.
        next_s: The part in ``next()`` and in touching the batch.
        blocked_s: The part of ``next_s`` in which this thread did not run.
    """

    seconds: float
    work_s: float
    next_s: float
    blocked_s: float


def calibrate() -> Work:
    """Find the amount of work that takes ``STEP_S`` here, half in Python and half in torch."""

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
    """Run one timed loop for every message, in a process of its own.

    Args:
        peer: ``"torch"``, ``"dpex"``, or ``"none"`` for the loop without a loader.
        work: One step.
        num_workers: Of the loader.
        control: Gets one :class:`Loop` for every True; a False ends the process.
    """
    torch.set_num_threads(1)
    batches = WARM_STEPS + TIMED_STEPS + SPARE_BATCHES
    sleep_s = STEP_S / SUPPLY_OVER_DEMAND * num_workers / BATCH_SIZE
    dataset = SleepingSamples(batches * BATCH_SIZE, sleep_s)
    loader = (
        None
        if peer == "none"
        else make_loader(peer, dataset, batch_size=BATCH_SIZE, num_workers=num_workers)
    )
    while control.recv():
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
        control.send(Loop(seconds, work_s, next_s, max(0.0, next_s - on_cpu_s)))
    if loader is not None:
        close(loader)


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
    spawn = multiprocessing.get_context("spawn")
    trainers: dict[str, tuple[Any, Connection]] = {}
    for peer in ("none", *options.peers):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=train, args=(peer, work, options.workers, theirs))
        process.start()
        theirs.close()
        trainers[peer] = (process, ours)

    def run(peer: str) -> Loop:
        time.sleep(SETTLE_S)
        control = trainers[peer][1]
        control.send(True)
        loop: Loop = control.recv()
        return loop

    try:
        for peer in trainers:
            say(f"tax start-up {peer}: {run(peer).seconds:.2f} s")
        runs: dict[str, list[Loop]] = {peer: [] for peer in trainers}
        for turn in range(options.rounds * TURNS_PER_ROUND):
            # There and back, so that a steady drift favours nobody.
            for peer in runs if turn % 2 == 0 else reversed(runs):
                runs[peer].append(run(peer))
            times = ", ".join(f"{peer} {loops[-1].seconds:.3f}" for peer, loops in runs.items())
            say(f"tax round {turn // TURNS_PER_ROUND + 1}/{options.rounds}, s: {times}")
    finally:
        for process, control in trainers.values():
            if process.is_alive():
                control.send(False)
            process.join(30)

    record["runs"] = {peer: [asdict(loop) for loop in loops] for peer, loops in runs.items()}
    for figure in ("slowdown", "slowdown_of_best", "next_share", "waiting_share"):
        record[figure] = {}
    for peer in options.peers:
        pairs = list(zip(runs[peer], runs["none"], strict=True))
        record["slowdown"][peer] = summarise([a.seconds / b.seconds - 1 for a, b in pairs])
        # On a noisy machine the best loops of each are the ones that nobody else slowed.
        best, best_alone = (min(loop.seconds for loop in runs[name]) for name in (peer, "none"))
        record["slowdown_of_best"][peer] = best / best_alone - 1
        record["next_share"][peer] = summarise([a.next_s / b.seconds for a, b in pairs])
        record["waiting_share"][peer] = summarise([a.blocked_s / b.seconds for a, b in pairs])
        if record["waiting_share"][peer]["median"] > BLOCKED_TOO_MUCH:
            say(f"{peer}: next() waited, for data or for a core; the figure is no pure tax")
    percents = {
        peer: [100 * share for share in slowdown["all"]]
        for peer, slowdown in record["slowdown"].items()
    }
    record["goals"] = [
        asdict(
            Goal.of(
                "tax: training loop slower beside dpex",
                percents[peer],
                "<=",
                GOAL_PERCENT,
                "percent",
            )
        )
        for peer in percents
        if peer == "dpex"
    ]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        "How much slower the training loop runs beside a loader",
        percents,
        "%",
        GOAL_PERCENT,
    )
    print(table([record]))


if __name__ == "__main__":
    main()
