"""The memory of eight workers over a dataset that lies in memory: forked, spawned, and dpex's.

What counts is the proportional set size (PSS) of all processes together, an embedded Ray's too: a
page that several of them map is shared out among them and so counts once, which goes for pages
that a fork left in common, for torch's shared memory and for what was touched of Ray's object
store. (A library's pages are shared out to strangers too: where anybody else runs torch meanwhile,
every figure is up to 0.15 GB too small.) It is taken after the epoch in which the last worker
delivered. Every run is a process of its own, none beside another; a dataset of 1 MB tells what
each peer takes without any data.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import arguments, describe_machine, say, summarise, write
from benchmarks.in_memory import BATCH_SIZE, ROW_BYTES, SAMPLES, SLEEP_S, measure
from benchmarks.plots import bars

PEERS = {"torch": "torch fork", "spawn": "torch spawn", "dpex": "dpex"}
GIB = 1 << 30
MB = 1e6
# A name, the kind of dataset and its rows. What holds for spawned workers over an array holds for
# an Arrow table too, and takes a minute to see again.
DATASETS = {
    "1 MB": ("array", 8, ("torch", "spawn", "dpex")),
    "array": ("array", GIB // ROW_BYTES, ("torch", "spawn", "dpex")),
    "tensor": ("tensor", GIB // ROW_BYTES, ("torch", "spawn", "dpex")),
    "arrow": ("arrow", GIB // ROW_BYTES, ("torch", "dpex")),
    "objects": ("objects", 5_000_000, ("torch", "spawn", "dpex")),
}
EMPTY = "1 MB"
# dpex over whom, by dataset.
GOALS = {
    "array": ("torch", 1.10),
    "tensor": ("torch", 1.10),
    "arrow": ("torch", 1.10),
    "objects": ("spawn", 1.0),
}


def total_mb(run: Mapping[str, Any], role: str | None = None) -> float:
    """Return the PSS of a run's processes, or of those of one role."""
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
                    f"{total_mb(run):,.0f} MB, of them {total_mb(run, 'trainer'):,.0f} in the "
                    f"trainer, {total_mb(run, 'worker'):,.0f} in workers; "
                    f"{run['readers']} of them read"
                )
    record["runs"] = runs
    totals = {
        name: {peer: [total_mb(run) for run in peer_runs] for peer, peer_runs in by_peer.items()}
        for name, by_peer in runs.items()
    }
    record["total_mb"] = {
        name: {peer: summarise(values) for peer, values in by_peer.items()}
        for name, by_peer in totals.items()
    }

    def data_mb(name: str, peer: str) -> float:
        """Return what a peer takes more than for the dataset of 1 MB."""
        summaries = record["total_mb"]
        return float(summaries[name][peer]["median"] - summaries[EMPTY][peer]["median"])

    goals = []
    for name, (peer, bound) in GOALS.items():
        note = (
            f"for the data alone {data_mb(name, 'dpex'):,.0f} MB, {PEERS[peer]} "
            f"{data_mb(name, peer):,.0f} MB"
        )
        before, after = runs[name]["dpex"][-1]["stored_bytes"]
        note += f"; object store {(after - before) / MB:+,.0f} MB over two more epochs"
        ratios = [
            dpex / torch
            for dpex, torch in zip(totals[name]["dpex"], totals[name][peer], strict=True)
        ]
        what = f"memory of {options.workers} workers, {name}: dpex / {PEERS[peer]}"
        goals.append(Goal.of(what, ratios, "<=", bound, "ratio", note))
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


if __name__ == "__main__":
    main()
