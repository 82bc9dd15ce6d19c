"""The benchmark ``cold``: time from the start of a training script's process to its first batch.

The time includes the interpreter, the imports of torch, torchvision and the dataset, the start of
the workers, and the first batch. Each run has a fresh process, and no other run beside it. The
first round only fills the page cache.

Two more programs run in each round. One reads two epochs of small pictures. The other imports
torch, starts a local Ray without dpex, and calls an actor: a part of what ``local`` does.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import arguments, describe_machine, say, spread, summarise, write
from benchmarks.plots import bars
from benchmarks.start_up import first_jpeg_batch, first_ray_task, two_epochs
from benchmarks.workloads import make_jpegs

FOLDER = Path("build/bench-data/jpeg")
PEERS = ("torch fork", "torch spawn", "dpex", "local")
BATCH_SIZE = 64
MOMENTS = ("imported_s", "iterated_s", "first_batch_s")
GOAL_OVER_SPAWN = 1.0
GOAL_OVER_FORK = 1.03
PICTURES = 2_000
EPOCH_PEERS = ("torch fork", "dpex")
GOAL_TWO_EPOCHS = 1.0


def main() -> None:
    options = arguments(__doc__, "cold", ["--rounds", "4", *sys.argv[1:]])
    record = describe_machine("cold")
    record["settings"] = {"num_workers": options.workers, "batch_size": BATCH_SIZE}
    folder = str(make_jpegs(FOLDER.resolve()))
    runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
    epochs: dict[str, list[dict[str, float]]] = {peer: [] for peer in EPOCH_PEERS}
    bare_ray: list[dict[str, float]] = []
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
        for peer, ends in epochs.items():
            ends.append(
                run_fresh(
                    two_epochs,
                    peer=peer,
                    samples=PICTURES,
                    batch_size=BATCH_SIZE,
                    workers=options.workers,
                )
            )
        bare_ray.append(run_fresh(first_ray_task))
        times = ", ".join(f"{peer} {m[-1]['first_batch_s']:.2f}" for peer, m in runs.items())
        say(f"cold round {round_number}/{options.rounds}, s: {times}")
    runs = {peer: moments[1:] for peer, moments in runs.items()}
    epochs = {peer: ends[1:] for peer, ends in epochs.items()}
    del bare_ray[0]

    record["runs"], record["two_epochs"], record["bare_ray"] = runs, epochs, bare_ray
    for moment in MOMENTS:
        record[moment] = {peer: summarise([m[moment] for m in runs[peer]]) for peer in PEERS}
    first = {peer: record["first_batch_s"][peer]["all"] for peer in PEERS}
    over = {peer: ratios(first["dpex"], first[peer]) for peer in PEERS if peer != "dpex"}
    record["dpex_over"] = {peer: summarise(values) for peer, values in over.items()}
    one = {peer: [ends["first_epoch_s"] for ends in each] for peer, each in epochs.items()}
    two = {peer: [ends["second_epoch_s"] for ends in each] for peer, each in epochs.items()}
    calls = ratios([run["first_call_s"] for run in bare_ray], first["torch fork"])
    local = ratios(first["local"], first["torch fork"])
    floor = (
        f"a local Ray {spread(summarise(local))}; one call of an actor, in Ray without dpex: "
        f"{spread(summarise(calls))} of torch fork"
    )
    after_one = ratios(one["dpex"], one["torch fork"])
    goals = [
        Goal.of(
            "latency",
            "process start to first batch, dpex / torch spawn",
            over["torch spawn"],
            "<=",
            GOAL_OVER_SPAWN,
            "ratio",
        ),
        Goal.of(
            "latency",
            "process start to first batch, dpex / torch fork",
            over["torch fork"],
            "<=",
            GOAL_OVER_FORK,
            "ratio",
            floor,
        ),
        Goal.of(
            "latency",
            f"process start to the end of two epochs of {PICTURES:,} pictures, dpex / torch fork",
            ratios(two["dpex"], two["torch fork"]),
            "<=",
            GOAL_TWO_EPOCHS,
            "ratio",
            f"the first of them {spread(summarise(after_one))}",
        ),
    ]
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Process start to first batch, JPEG, {options.workers} workers",
        first,
        "s",
    )
    for peer in PEERS:
        print(f"{peer}: {', '.join(f'{name} {spread(record[name][peer])}' for name in MOMENTS)}")
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}")


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of the values of each round."""
    return [value / other for value, other in zip(values, others, strict=True)]


if __name__ == "__main__":
    main()
