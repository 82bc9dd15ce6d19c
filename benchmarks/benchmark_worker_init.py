"""The benchmark ``worker_init``: rate and memory with and without a ``worker_init_fn``.

The dataset is a list of a million strings, which eight workers read. The ``worker_init_fn`` seeds
the generator of the dataset.

The four loaders (torch's and dpex's, with and without the function) take turns in one process tree.
Memory is measured in other runs, each in a fresh process, as in ``benchmark_memory.py``. It is
measured when all workers have delivered, and again two epochs later, because processes get further
copies. torch's memory is a lower bound. Its workers read only 8,192 of the strings, and a page is
copied when a worker reads an object in it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.benchmark_memory import MB
from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal, worst
from benchmarks.harness import (
    Case,
    Epoch,
    arguments,
    describe_machine,
    say,
    spread,
    summarise,
    table,
    write,
)
from benchmarks.in_memory import SeededTexts, measure, seed_dataset
from benchmarks.plots import bars
from benchmarks.throughput import Field, ratios, summary

ROWS = 1_000_000
SAMPLES = 40_960
BATCH_SIZE = 64
PEERS = ("torch", "dpex")
PARTS = {"without": False, "with": True}  # whether there is a worker_init_fn
MEMORY_ROUNDS = 3
GOAL_OVER_TORCH = 0.98


def case(*, worker_init: bool = True, dataset: SeededTexts | None = None) -> Case:
    """Return the workload.

    Args:
        worker_init: Whether the loaders have a ``worker_init_fn``.
        dataset: Dataset that several cases share; None makes a new one.
    """
    word = "with" if worker_init else "without"
    return Case(
        f"worker_init, {word}",
        f"strings of a list of 1,000,000, {word} worker_init_fn, batch {BATCH_SIZE}, 8 workers",
        dataset or SeededTexts(ROWS, SAMPLES, sleep_s=0.0),
        batch_size=BATCH_SIZE,
        worker_init_fn=seed_dataset if worker_init else None,
        peers=PEERS,
    )


def main() -> None:
    options = arguments(__doc__, "worker_init", ["--workers", "8", *sys.argv[1:]])
    record = describe_machine("worker_init")
    # Memory comes first: the workers of the other part would compete for the cores.
    memory = measure_memory(options)
    record["parts"] = measure_rates(options)
    record["memory"] = memory

    runs = {part: record["parts"][part]["runs"] for part in PARTS}
    record["rate_with_over_without"] = {
        peer: summarise(
            [
                with_it["samples_per_s"] / without["samples_per_s"]
                for with_it, without in zip(runs["with"][peer], runs["without"][peer], strict=True)
            ]
        )
        for peer in PEERS
    }
    for part in record["parts"].values():
        del part["goals"]  # the record has them
    record["goals"] = [asdict(rate_goal(record))]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Strings of a list, {options.workers} workers: warm epochs",
        {
            f"{peer}, {name} worker_init_fn": rate["all"]
            for name, part in record["parts"].items()
            for peer, rate in part["samples_per_s"].items()
        },
        "samples/s",
    )
    print(table([record]))


def measure_rates(options: Any) -> dict[str, dict[str, Any]]:
    """Run the four loaders in turn.

    Args:
        options: ``workers`` and ``rounds``.

    Returns:
        The record of each part.
    """
    torch.set_num_threads(1)
    dataset = SeededTexts(ROWS, SAMPLES, sleep_s=0.0)
    cases = {name: case(worker_init=init, dataset=dataset) for name, init in PARTS.items()}
    with (
        Field(cases["without"], options.workers) as without,
        Field(cases["with"], options.workers) as with_it,
    ):
        fields = {"without": without, "with": with_it}
        for peer in PEERS:
            for field in fields.values():
                field.start([peer])
        runs: dict[str, dict[str, list[Epoch]]] = {
            name: {peer: [] for peer in PEERS} for name in PARTS
        }
        for _ in range(options.rounds):
            for name, field in fields.items():
                for peer, epochs in field.take_turns(PEERS, 1).items():
                    runs[name][peer] += epochs
        return {
            name: summary(field, runs[name], ratios(runs[name])) for name, field in fields.items()
        }


def measure_memory(options: Any) -> dict[str, Any]:
    """Measure the memory of all processes of each loader.

    Args:
        options: ``workers`` and ``rounds``. At most ``MEMORY_ROUNDS`` rounds are measured.

    Returns:
        For each peer and part, the PSS of all processes in MB. ``first`` is the PSS when all
        workers have delivered, and ``later`` that of two epochs later. Both have the values of all
        rounds.
    """
    rounds = min(options.rounds, MEMORY_ROUNDS)
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        peer: {name: {"first": [], "later": []} for name in PARTS} for peer in PEERS
    }
    for round_number in range(rounds):
        for peer, parts in found.items():
            for name, moments in parts.items():
                run = run_fresh(
                    measure,
                    kind="texts",
                    rows=ROWS,
                    peer=peer,
                    workers=options.workers,
                    worker_init=PARTS[name],
                )
                moments["first"].append(total_mb(run["processes"]))
                moments["later"].append(total_mb(run["processes_later"]))
                say(
                    f"worker_init memory round {round_number + 1}/{rounds} {peer} {name}: "
                    f"{moments['first'][-1]:,.0f} MB, later {moments['later'][-1]:,.0f} MB"
                )
    return {
        peer: {
            name: {moment: summarise(values) for moment, values in moments.items()}
            for name, moments in parts.items()
        }
        for peer, parts in found.items()
    }


def total_mb(processes: Sequence[Mapping[str, Any]]) -> float:
    """Return the PSS of some processes together, in MB."""
    return float(sum(process["pss_bytes"] for process in processes)) / MB


def rate_goal(record: Mapping[str, Any]) -> Goal:
    """Return the goal for dpex's rate over torch's.

    Args:
        record: Record with the rates of all parts.
    """
    note = "rate with / without: " + ", ".join(
        f"{peer} {spread(record['rate_with_over_without'][peer])}" for peer in PEERS
    )
    return worst(
        {
            f"{name} the function": Goal.of(
                "throughput",
                "worker_init: dpex/torch, with and without a worker_init_fn",
                part["dpex_over"]["torch"]["all"],
                ">=",
                GOAL_OVER_TORCH,
                "ratio",
                note,
            )
            for name, part in record["parts"].items()
        }
    )


if __name__ == "__main__":
    main()
