"""The benchmark ``accuracy``: loss and accuracy with ``distribute_mode`` on and off.

It trains on one device, with ``DataParallel``, and with DDP. Each round has another seed. There are
no random transforms, so with equal seeds the loss of every step must be equal to the bit. The
difference between seeds shows how much trainings vary.
"""

import sys
from dataclasses import asdict
from typing import Any

from benchmarks.both_modes import BATCH_SIZE, DISTRIBUTE_MODE, LEARNING_RATE, train
from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import arguments, describe_machine, spread, summarise, write
from benchmarks.plots import bars

EPOCHS = 40
RANKS = {"single device": 1, "DataParallel": 1, "DDP": 2}
# FashionMNIST on a CPU takes hours.
RUN_TIMEOUT_S = 12 * 3_600


def main() -> None:
    options = arguments(__doc__, "accuracy", ["--rounds", "5", *sys.argv[1:]])
    record = describe_machine("accuracy")
    parts: dict[str, Any] = {}
    for setting, ranks in RANKS.items():
        found = run_fresh(
            train,
            timeout_s=RUN_TIMEOUT_S,
            ranks=ranks,
            setting=setting,
            seeds=options.rounds,
            epochs=EPOCHS,
            workers=options.workers,
        )
        for figure in ("accuracy", "loss"):
            found[figure] = {
                mode: summarise([run[figure][mode] for run in found["runs"]])
                for mode in DISTRIBUTE_MODE
            }
        found["ranks"] = ranks
        parts[setting] = found
    record["settings"] = {
        "epochs": EPOCHS,
        "seeds": options.rounds,
        "learning_rate": LEARNING_RATE,
        "batch_size": BATCH_SIZE,
        "num_workers": options.workers,
    }
    record["trainings"] = parts
    goals = [equal_losses(parts), *(equal_accuracy(name, parts[name]) for name in parts)]
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Test accuracy after {EPOCHS} epochs, {options.rounds} seeds",
        {
            f"{'dpex' if distribute_mode else 'torch'}, {setting}": found["accuracy"][mode]["all"]
            for setting, found in parts.items()
            for mode, distribute_mode in DISTRIBUTE_MODE.items()
        },
        "%",
    )
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


def equal_losses(parts: dict[str, Any]) -> Goal:
    """Return the goal that no step has different losses in the two modes."""
    differing = [run["differing"] for found in parts.values() for run in found["runs"]]
    steps = {name: sum(run["steps"] for run in found["runs"]) for name, found in parts.items()}
    return Goal(
        what="accuracy: training steps whose losses with distribute_mode on and off differ",
        value=sum(differing),
        min=min(differing),
        max=max(differing),
        goal=0,
        relation="<=",
        form="count",
        note="of " + ", ".join(f"{count:,} ({name})" for name, count in steps.items()),
    )


def equal_accuracy(setting: str, found: dict[str, Any]) -> Goal:
    """Return the goal that the modes differ, seed by seed, by at most the range of the seeds."""
    off, on = (found["accuracy"][mode] for mode in DISTRIBUTE_MODE)
    return Goal.of(
        f"accuracy, {setting}: percentage points between distribute_mode on and off",
        [abs(mine - other) for mine, other in zip(on["all"], off["all"], strict=True)],
        "<=",
        off["max"] - off["min"],
        "percent",
        f"off {spread(off)} %, on {spread(on)} %; the goal is the seeds' range",
    )


if __name__ == "__main__":
    main()
