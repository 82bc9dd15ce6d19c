"""The benchmark ``cold``: time from the start of a training script's process to its first batch.

The time includes the interpreter, the imports of torch, torchvision and the dataset, the start of
the workers, and the first batch. With dpex it also includes the start of a local Ray. Each run has
a fresh process, and no other run beside it. The first round only fills the page cache.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import arguments, describe_machine, say, spread, summarise, write
from benchmarks.plots import bars
from benchmarks.start_up import first_jpeg_batch
from benchmarks.workloads import make_jpegs

FOLDER = Path("build/bench-data/jpeg")
PEERS = ("torch fork", "torch spawn", "dpex")
BATCH_SIZE = 64
MOMENTS = ("imported_s", "iterated_s", "first_batch_s")
GOAL_OVER_SPAWN = 1.0


def main() -> None:
    options = arguments(__doc__, "cold", ["--rounds", "4", *sys.argv[1:]])
    record = describe_machine("cold")
    record["settings"] = {"num_workers": options.workers, "batch_size": BATCH_SIZE}
    folder = str(make_jpegs(FOLDER.resolve()))
    runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
    for round_number in range(options.rounds + 1):
        for peer, moments in runs.items():
            moments.append(
                run_fresh(
                    first_jpeg_batch,
                    peer=peer,
                    folder=folder,
                    batch_size=BATCH_SIZE,
                    workers=options.workers,
                )
            )
        times = ", ".join(f"{peer} {m[-1]['first_batch_s']:.2f}" for peer, m in runs.items())
        say(f"cold round {round_number}/{options.rounds}, s: {times}")
    runs = {peer: moments[1:] for peer, moments in runs.items()}

    record["runs"] = runs
    for moment in MOMENTS:
        record[moment] = {peer: summarise([m[moment] for m in runs[peer]]) for peer in PEERS}
    first = {peer: record["first_batch_s"][peer]["all"] for peer in PEERS}
    over = {
        peer: [dpex / torch for dpex, torch in zip(first["dpex"], first[peer], strict=True)]
        for peer in PEERS
        if peer != "dpex"
    }
    record["dpex_over"] = {peer: summarise(ratios) for peer, ratios in over.items()}
    goal = Goal.of(
        "latency",
        "process start to first batch, dpex / torch spawn",
        over["torch spawn"],
        "<=",
        GOAL_OVER_SPAWN,
        "ratio",
        f"{spread(record['dpex_over']['torch fork'])} of torch fork",
    )
    record["goals"] = [asdict(goal)]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Process start to first batch, JPEG, {options.workers} workers",
        first,
        "s",
    )
    for peer in PEERS:
        print(f"{peer}: {', '.join(f'{name} {spread(record[name][peer])}' for name in MOMENTS)}")
    print(f"{goal.what}: {goal.figure}, goal {goal.bound}")


if __name__ == "__main__":
    main()
