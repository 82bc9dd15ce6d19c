"""The benchmark ``memory``: memory of eight workers for a dataset in memory, with torch and dpex.

It adds up the proportional set size (PSS) of all processes, with those of a local Ray. A page that
several processes map counts once, because the PSS divides it among them. Examples are pages after a
fork, torch's shared memory, and the used part of Ray's object store. Pages of libraries are also
divided among processes outside the benchmark. If other users run torch on the machine, every figure
is up to 0.15 GB too small.

The benchmark measures after the epoch in which the last worker delivered. Each run has a fresh
process, and no other run beside it. A dataset of 1 MB shows the memory of each loader without data.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal, worst
from benchmarks.harness import arguments, describe_machine, say, summarise, write
from benchmarks.in_memory import (
    BATCH_SIZE,
    ROW_BYTES,
    SAMPLES,
    SLEEP_S,
    TRAINING_PROCESS,
    measure,
)
from benchmarks.plots import bars

PEERS = {"torch": "torch fork", "spawn": "torch spawn", "dpex": "dpex", "local": "local Ray"}
GIB = 1 << 30
MB = 1e6
# By name: the kind of dataset, its number of rows, and the peers. Spawned workers use as much
# memory for an Arrow table as for an array. That run would take a minute, so it is left out.
DATASETS = {
    "1 MB": ("array", 8, ("torch", "spawn", "dpex", "local")),
    "array": ("array", GIB // ROW_BYTES, ("torch", "spawn", "dpex", "local")),
    "tensor": ("tensor", GIB // ROW_BYTES, ("torch", "spawn", "dpex")),
    "arrow": ("arrow", GIB // ROW_BYTES, ("torch", "dpex")),
    "objects": ("objects", 5_000_000, ("torch", "spawn", "dpex")),
}
EMPTY = "1 MB"
# Names of the datasets with one array, tensor or table of 1 GiB.
ARRAYS = {"array": "array", "tensor": "tensor", "arrow": "Arrow table"}
# Bounds of dpex's memory over that of torch's default on Linux, which is fork.
GOAL_ARRAYS = 1.1
GOAL_OBJECTS = 1.1


def total_mb(run: Mapping[str, Any], role: str | None = None) -> float:
    """Return the PSS of a run's processes, or of those with one role, in MB."""
    weights = [w["pss_bytes"] for w in run["processes"] if role in (None, w["role"])]
    return float(sum(weights)) / MB


def main() -> None:
    options = arguments(__doc__, "memory", ["--rounds", "1", "--workers", "8", *sys.argv[1:]])
    record = describe_machine("memory")
    record["settings"] = {
        "num_workers": options.workers,
        "batch_size": BATCH_SIZE,
        "samples": SAMPLES,
        "sleep_s": SLEEP_S,
        "datasets": {name: {"kind": kind, "rows": n} for name, (kind, n, _) in DATASETS.items()},
    }
    runs: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for round_number in range(options.rounds):
        for name, (kind, rows, peers) in DATASETS.items():
            for peer in peers:
                run = run_fresh(measure, kind=kind, rows=rows, peer=peer, workers=options.workers)
                runs[name][peer].append(run)
                say(
                    f"memory round {round_number + 1}/{options.rounds} {name} {PEERS[peer]}: "
                    f"{total_mb(run):,.0f} MB, of them {total_mb(run, TRAINING_PROCESS):,.0f} in "
                    f"the training process, {total_mb(run, 'worker'):,.0f} in workers; "
                    f"{run['readers']} of them read"
                )
    record["runs"] = runs
    totals = {
        name: {peer: list(map(total_mb, peer_runs)) for peer, peer_runs in by_peer.items()}
        for name, by_peer in runs.items()
    }
    record["total_mb"] = {
        name: {peer: summarise(values) for peer, values in by_peer.items()}
        for name, by_peer in totals.items()
    }

    goals = goals_of_runs(runs, options.workers)
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Memory of all processes, {options.workers} workers",
        {
            f"{PEERS[peer]}, {name}": [value / 1e3 for value in values]
            for name, by_peer in totals.items()
            for peer, values in by_peer.items()
        },
        "GB",
    )
    for name, by_peer in totals.items():
        figures = ", ".join(f"{PEERS[p]} {values[0]:,.0f} MB" for p, values in by_peer.items())
        print(f"{name}: {figures}")
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


def goals_of_runs(
    runs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], workers: int
) -> list[Goal]:
    """Return the goals for arrays and for Python objects.

    Args:
        runs: The runs of each peer with each dataset.
        workers: Number of workers.
    """
    what = f"memory of {workers} workers, 1 GiB in an array, tensor or Arrow table: "
    arrays = {
        kind: goal_of(what, runs[name], runs[EMPTY], GOAL_ARRAYS) for name, kind in ARRAYS.items()
    }
    what = f"memory of {workers} workers, {DATASETS['objects'][1]:,} Python objects: "
    return [worst(arrays), goal_of(what, runs["objects"], runs[EMPTY], GOAL_OBJECTS)]


def goal_of(
    what: str,
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    empty: Mapping[str, Sequence[Mapping[str, Any]]],
    bound: float,
) -> Goal:
    """Return the goal for one dataset: dpex's memory over that of torch's forks.

    Args:
        what: Description of the dataset.
        runs: The runs of each peer with the dataset.
        empty: The same without data.
        bound: Bound of the ratio.
    """
    totals = {peer: list(map(total_mb, peer_runs)) for peer, peer_runs in runs.items()}

    def over(peer: str) -> list[float]:
        return [dpex / other for dpex, other in zip(totals["dpex"], totals[peer], strict=True)]

    without = {peer: statistics.median(map(total_mb, empty[peer])) for peer in runs}
    data = ", ".join(
        f"{PEERS[peer]} {statistics.median(totals[peer]) - without[peer]:,.0f} MB"
        for peer in ("dpex", *(peer for peer in runs if peer != "dpex"))
    )
    note = f"the data alone: {data}"
    for run in (peer_runs[-1] for peer_runs in runs.values()):
        if run["stored_bytes"]:
            before, after = run["stored_bytes"]
            note += f"; object store {(after - before) / MB:+,.0f} MB in two epochs"
    if "spawn" in runs:
        note = f"{statistics.median(over('spawn')):.2f} of torch spawn; {note}"
    return Goal.of("memory", f"{what}dpex / torch fork", over("torch"), "<=", bound, "ratio", note)


if __name__ == "__main__":
    main()
