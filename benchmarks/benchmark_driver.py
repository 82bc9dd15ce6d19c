"""The benchmark ``driver``: processor time and memory of the training process.

A loader's work for a batch must not depend on the number of batches. So the benchmark runs epochs
of 10^2 to 10^5 tiny batches. It measures the processor time of the training process for each batch,
including Ray's threads.

A loader must not do work for every index ahead of time. So the benchmark compares a dataset of 10^8
samples with one of 10^4. It measures the time from ``iter()`` to the first batch, and the memory of
the training process 50 batches later. The order is sequential, or that of a user's sampler, which
is a generator. The benchmark does not use ``shuffle=True``: torch's own sampler would first make a
tensor and a list of 10^8 numbers.

Each measurement has a fresh process, and no other measurement beside it. The workers are warm.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
import torch

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal, worst
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

PEERS = ("torch", "dpex", "local")
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
    """A typical sampler of a user: a generator of indices, in order.

    Args:
        length: Number of indices; may change between epochs.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def measure(peer: str, workers: int) -> dict[str, Any]:
    """Measure one peer once.

    Args:
        peer: A peer of ``make_loader``.
        workers: Number of workers.

    Returns:
        ``starts``: the results of :func:`begin` for few and for many indices, by order. ``epochs``:
        the result of :func:`run_epochs`.
    """
    torch.set_num_threads(1)
    begin(peer, workers, FEW, "sequential")  # dpex may still start its second worker
    # Measure memory first: later, free memory of the process could hide the growth.
    starts = {
        order: [begin(peer, workers, length, order) for length in (FEW, MANY)] for order in ORDERS
    }
    return {"starts": starts, "epochs": run_epochs(peer, workers)}


def begin(peer: str, workers: int, length: int, order: str) -> dict[str, float]:
    """Start two epochs, and measure the second one, which has warm workers.

    Returns:
        ``first_batch_s``, measured from ``iter()``, and ``pss_mb`` of the training process some
        batches later.
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
        For each epoch: ``seconds``, ``process_s`` and ``thread_s``. The last two are the processor
        time of all threads of this process, and of the training loop's thread.
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
    """Return the processor time of a batch beyond the length of the next shorter epoch."""
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
    goals = [time_goal(runs), worst({order: memory_goal(runs, order) for order in ORDERS})]
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    lines(
        options.out.with_suffix(".svg"),
        "Processor time of the training process for a tiny batch",
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


def time_goal(runs: Mapping[str, Sequence[dict[str, Any]]]) -> Goal:
    """Return the goal for the processor time of a batch in a long epoch over that in a short one.

    Args:
        runs: The runs of each peer.
    """

    def us_per_batch(peer: str, epoch: int) -> list[float]:
        return [run["epochs"][epoch]["process_s"] / EPOCHS[epoch] * 1e6 for run in runs[peer]]

    over = {
        peer: [
            long / short
            for long, short in zip(us_per_batch(peer, -1), us_per_batch(peer, 1), strict=True)
        ]
        for peer in PEERS
    }

    def of_peers(figure: Callable[[str], float]) -> str:
        return ", ".join(f"{peer} {figure(peer):.0f} µs" for peer in PEERS)

    def beyond(epoch: int) -> str:
        figures = of_peers(
            lambda peer: statistics.median(marginal_us(run["epochs"], epoch) for run in runs[peer])
        )
        return f"beyond the {EPOCHS[epoch - 1]:,}th: {figures}"

    longest = of_peers(lambda peer: statistics.median(us_per_batch(peer, -1)))
    return Goal.of(
        "training process",
        f"training process's processor time a batch, epoch of {EPOCHS[-1]:,} / of {EPOCHS[1]:,}",
        over["dpex"],
        "<=",
        GOAL_LONG_OVER_SHORT,
        "ratio",
        f"torch {spread(summarise(over['torch']))}; a batch of the longest epoch takes {longest}; "
        f"{beyond(-2)}; {beyond(-1)}",
    )


def memory_goal(runs: Mapping[str, Sequence[dict[str, Any]]], order: str) -> Goal:
    """Return the goal for the memory of the training process with many indices.

    Args:
        runs: The runs of each peer.
        order: One of ``ORDERS``.
    """
    first = ", ".join(
        f"{peer} {spread(summarise(first_batch_ratios(runs[peer], order)))}" for peer in PEERS
    )
    return Goal.of(
        "memory",
        "memory of the training process, 10^8 indices less 10^4",
        growths_mb(runs["dpex"], order),
        "<=",
        GOAL_GROWTH_MB,
        "MB",
        f"torch {spread(summarise(growths_mb(runs['torch'], order)), 'z.0f')} MB; iter() and first "
        f"batch, 10^8 / 10^4: {first}; with shuffle=True torch's own sampler takes gigabytes first",
    )


def growths_mb(runs: Sequence[dict[str, Any]], order: str) -> list[float]:
    """Return how much more memory the training process has with many indices than with few."""
    pairs = (run["starts"][order] for run in runs)
    return [many["pss_mb"] - few["pss_mb"] for few, many in pairs]


def first_batch_ratios(runs: Sequence[dict[str, Any]], order: str) -> list[float]:
    """Return the time to the first batch with many indices, divided by that with few."""
    pairs = (run["starts"][order] for run in runs)
    return [many["first_batch_s"] / few["first_batch_s"] for few, many in pairs]


if __name__ == "__main__":
    main()
