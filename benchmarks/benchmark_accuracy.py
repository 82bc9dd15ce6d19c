"""The benchmark ``accuracy``: loss and accuracy with ``distribute_mode`` on and off.

It trains on one device, with ``DataParallel``, and with DDP. Each round has another seed. There are
no random transforms, so with equal seeds the loss of every step must be equal to the bit. The
difference between seeds shows how much trainings vary. The benchmark has no goals:
``tests/integrations/test_trainers.py`` compares the steps of trainings with both loaders.
"""

import sys
from typing import Any

from benchmarks.both_modes import BATCH_SIZE, DISTRIBUTE_MODE, LEARNING_RATE, train
from benchmarks.fresh import run_fresh
from benchmarks.harness import arguments, describe_machine, summarise, write
from benchmarks.plots import bars
from benchmarks.training_tables import accuracy_table

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
    print(accuracy_table(record))


if __name__ == "__main__":
    main()
