"""The trainer's own cost of a batch, as epochs get longer and indices more.

Nothing that a loader does for a batch may grow with the number of batches: so epochs of 10^2 to
10^5 tiny batches, and the processor time that the trainer's process takes for each of them, Ray's
threads in it included. And nothing may be done for every index ahead of time: so a dataset of 10^8
samples beside one of 10^4, the time from ``iter()`` to the first batch, and what the trainer's
memory has grown by fifty batches later. The order there is sequential, or that of a user's own
sampler, a generator; ``shuffle=True`` is torch's own sampler, which makes a tensor and a list of
10^8 numbers before any loader is asked.

Every turn of a peer is a process of its own, none beside another; workers are warm.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import psutil
import torch

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import (
    arguments,
    close,
    describe_machine,
    make_loader,
    say,
    spread,
    summarise,
    write,
)
from benchmarks.plots import lines
from benchmarks.workloads import SameTensor

PEERS = ("torch", "dpex")
BATCH_SIZE = 1
SAMPLE_SHAPE = (8,)
EPOCHS = (100, 1_000, 10_000, 100_000)
WARM_BATCHES = 1_000
FEW, MANY = 10**4, 10**8
ORDERS = ("sequential", "generator")
BATCHES_BEFORE_WEIGHING = 50
MB = 1e6
GOAL_LONG_OVER_SHORT = 1.2
GOAL_GROWTH_MB = 200.0


class FirstIndices:
    """A sampler as users write them: a generator of indices, in order.

    Args:
        length: How many; another may be set from epoch to epoch.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def measure(peer: str, workers: int) -> dict[str, Any]:
    """Take one turn of a peer.

    Args:
        peer: As ``make_loader`` takes it.
        workers: Number of workers.

    Returns:
        ``starts``, by order: what :func:`begin` gave for few and for many indices. ``epochs``:
        what :func:`run_epochs` gave.
    """
    torch.set_num_threads(1)
    begin(peer, workers, FEW, "sequential")  # dpex's second worker may be on its way all the time
    # The memory comes first, while little that is free already can hide what it grows by.
    starts = {
        order: [begin(peer, workers, length, order) for length in (FEW, MANY)] for order in ORDERS
    }
    return {"starts": starts, "epochs": run_epochs(peer, workers)}


def begin(peer: str, workers: int, length: int, order: str) -> dict[str, float]:
    """Begin two epochs, of which the second finds warm workers, and measure that one.

    Returns:
        ``first_batch_s``, from ``iter()`` on, and the trainer's ``pss_mb`` some batches later.
    """
    loader = make_loader(
        peer,
        SameTensor(length, SAMPLE_SHAPE),
        batch_size=BATCH_SIZE,
        num_workers=workers,
        sampler=FirstIndices(length) if order == "generator" else None,
    )
    for _ in itertools.islice(loader, BATCHES_BEFORE_WEIGHING):
        pass
    started = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_batch_s = time.perf_counter() - started
    for _ in itertools.islice(batches, BATCHES_BEFORE_WEIGHING - 1):
        pass
    pss_mb = psutil.Process().memory_full_info().pss / MB
    close(loader)
    return {"first_batch_s": first_batch_s, "pss_mb": pss_mb}


def run_epochs(peer: str, workers: int) -> list[dict[str, float]]:
    """Run an epoch of every length.

    Returns:
        For each: ``seconds``, ``process_s`` (of the processor, in all threads of this process) and
        ``thread_s`` (of the processor, in the thread of the training loop).
    """
    sampler = FirstIndices(WARM_BATCHES)
    dataset = SameTensor(max(EPOCHS), SAMPLE_SHAPE)
    loader = make_loader(peer, dataset, batch_size=BATCH_SIZE, num_workers=workers, sampler=sampler)
    costs = []
    for batches in (WARM_BATCHES, *EPOCHS):
        sampler.length = batches * BATCH_SIZE
        before = time.perf_counter(), time.process_time(), time.thread_time()
        taken = sum(1 for _ in loader)
        after = time.perf_counter(), time.process_time(), time.thread_time()
        assert taken == batches
        names = ("seconds", "process_s", "thread_s")
        costs.append({name: b - a for name, a, b in zip(names, before, after, strict=True)})
    close(loader)
    return costs[1:]


def marginal_us(costs: Sequence[dict[str, float]], epoch: int) -> float:
    """Return what each batch costs by which an epoch is longer than the next shorter one."""
    more_s = costs[epoch]["process_s"] - costs[epoch - 1]["process_s"]
    return more_s / (EPOCHS[epoch] - EPOCHS[epoch - 1]) * 1e6


def main() -> None:
    options = arguments(__doc__, "driver", ["--rounds", "2", *sys.argv[1:]])
    record = describe_machine("driver")
    record["settings"] = {
        "num_workers": options.workers,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "indices": (FEW, MANY),
        "batches_before_weighing": BATCHES_BEFORE_WEIGHING,
    }
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS}
    for round_number in range(options.rounds):
        for peer in PEERS:
            run = run_fresh(measure, peer=peer, workers=options.workers)
            runs[peer].append(run)
            costs = (
                f"{cost['process_s'] / batches * 1e6:.0f}"
                for cost, batches in zip(run["epochs"], EPOCHS, strict=True)
            )
            say(
                f"driver round {round_number + 1}/{options.rounds} {peer}: "
                f"{', '.join(costs)} µs a batch; {run['starts']}"
            )
    record["runs"] = runs
    for figure in ("process", "thread"):
        record[f"{figure}_us_per_batch"] = {
            peer: {
                batches: summarise(
                    [run["epochs"][n][f"{figure}_s"] / batches * 1e6 for run in peer_runs]
                )
                for n, batches in enumerate(EPOCHS)
            }
            for peer, peer_runs in runs.items()
        }
    record["growth_mb"], record["many_over_few_first_batch"] = (
        {
            peer: {order: summarise(compare(peer_runs, order)) for order in ORDERS}
            for peer, peer_runs in runs.items()
        }
        for compare in (growths_mb, first_batch_ratios)
    )

    process_us = record["process_us_per_batch"]
    flat = {
        peer: [
            long / short
            for long, short in zip(
                process_us[peer][EPOCHS[-1]]["all"], process_us[peer][EPOCHS[1]]["all"], strict=True
            )
        ]
        for peer in PEERS
    }
    marginal = {
        peer: [
            summarise([marginal_us(run["epochs"], n) for run in runs[peer]])["median"]
            for n in (-2, -1)
        ]
        for peer in PEERS
    }
    goals = [
        Goal.of(
            f"trainer's processor time a batch, epoch of {EPOCHS[-1]:,} / of {EPOCHS[1]:,}",
            flat["dpex"],
            "<=",
            GOAL_LONG_OVER_SHORT,
            "ratio",
            f"torch {spread(summarise(flat['torch']))}; a batch of the longest costs "
            + ", ".join(f"{p} {process_us[p][EPOCHS[-1]]['median']:.0f} µs" for p in PEERS)
            + f"; each beyond the {EPOCHS[1]:,}th, then beyond the {EPOCHS[2]:,}th: "
            + ", ".join(f"{p} {near:.0f}, {far:.0f} µs" for p, (near, far) in marginal.items()),
        )
    ]
    for order in ORDERS:
        ratio, growth = (
            {peer: record[name][peer][order] for peer in PEERS}
            for name in ("many_over_few_first_batch", "growth_mb")
        )
        goals.append(
            Goal.of(
                f"trainer's memory, 10^8 indices less 10^4, {order}",
                growth["dpex"]["all"],
                "<=",
                GOAL_GROWTH_MB,
                "MB",
                f"torch {spread(growth['torch'], '.0f')}; iter() and first batch, 10^8 / 10^4: "
                + ", ".join(f"{peer} {spread(ratio[peer])}" for peer in PEERS)
                + "; with shuffle=True torch's own sampler takes gigabytes first",
            )
        )
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    lines(
        options.out.with_suffix(".svg"),
        "Processor time of the trainer's process for a tiny batch",
        [len(str(batches)) - 1 for batches in EPOCHS],
        {peer: [process_us[peer][batches]["median"] for batches in EPOCHS] for peer in PEERS},
        "batches in the epoch, power of ten",
        "µs",
    )
    for peer in PEERS:
        figures = (f"{batches:,}: {process_us[peer][batches]['median']:.0f}" for batches in EPOCHS)
        print(f"{peer}, µs a batch in an epoch of {', '.join(figures)}")
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


def growths_mb(runs: Sequence[dict[str, Any]], order: str) -> list[float]:
    """Return how much more memory the trainer has with many indices than with few."""
    pairs = (run["starts"][order] for run in runs)
    return [many["pss_mb"] - few["pss_mb"] for few, many in pairs]


def first_batch_ratios(runs: Sequence[dict[str, Any]], order: str) -> list[float]:
    """Return how many times later the first of many indices comes than the first of few."""
    pairs = (run["starts"][order] for run in runs)
    return [many["first_batch_s"] / few["first_batch_s"] for few, many in pairs]


if __name__ == "__main__":
    main()
