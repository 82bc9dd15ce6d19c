"""The benchmark ``on_node``: bytes that the training process's node sends to the workers' node.

The rows are in a file that both nodes see. Without ``on_node``, the training process reads the
rows, and they travel with the dataset. With ``on_node``, only a function and the file's name
travel, and the workers map the file.

The link between the nodes counts all bytes: the dataset, indices, calls and their answers, messages
between Ray's nodes, and headers. A sample is only the mean of its row, because acknowledgements of
large batches would count too.

Before the measurement, another loader runs its epochs in the same Ray. Each figure has a new
loader.
"""

import itertools
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal, worst
from benchmarks.harness import arguments, describe_machine, say, summarise, write
from benchmarks.linked_node import linked_node, new_link
from benchmarks.plots import bars
from benchmarks.rows_in_file import Rows, make_file, rows_of

FOLDER = Path("build/bench-data/on_node")
ROWS = 1_024
ROW_BYTES = (50_000, 200_000)
BATCH_SIZE = 32
EPOCHS = 3
QUIET_S = 10.0
MB, KB = 1e6, 1e3
GOAL_KB = 100.0


def measure(files: Mapping[str, str], workers: int) -> dict[str, Any]:
    """Read every file with and without ``on_node``, in a Ray of two nodes.

    Args:
        files: Paths of the files, by name.
        workers: Number of workers of each loader.

    Returns:
        ``quiet_bytes_per_s``, the traffic while nothing is read, and ``sent_bytes``. The latter has
        the bytes of each epoch of a new loader, by way and name.
    """
    from dpex import DpexDataLoader
    from dpex.datasets import on_node

    sent: dict[str, dict[str, list[int]]] = defaultdict(dict)
    with linked_node(workers) as link:

        def read(dataset: Any) -> list[int]:
            loader: DpexDataLoader[Any] = DpexDataLoader(
                dataset,
                batch_size=BATCH_SIZE,
                shuffle=True,
                num_workers=workers,
                persistent_workers=True,
                distribute_mode=True,
            )
            counts = [link.sent_bytes()]
            for _ in range(EPOCHS):
                assert sum(map(len, loader)) == ROWS
                counts.append(link.sent_bytes())
            loader.close()
            return [after - before for before, after in itertools.pairwise(counts)]

        read(Rows(np.ones((ROWS, 1), np.float32)))
        before = link.sent_bytes()
        time.sleep(QUIET_S)
        quiet = (link.sent_bytes() - before) / QUIET_S
        for name, file in files.items():
            sent["on_node"][name] = read(on_node(rows_of, file, length=ROWS))
            sent["passed"][name] = read(Rows(np.load(file)))
    return {"quiet_bytes_per_s": quiet, "sent_bytes": sent}


def main() -> None:
    options = arguments(__doc__, "on_node", ["--rounds", "3", *sys.argv[1:]])
    try:
        with new_link():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"on_node: nothing measured, it needs root and the ip command: {error}")
        return
    files = {
        f"{ROWS * size / MB:.0f} MB": str(make_file(FOLDER.resolve(), ROWS, size))
        for size in ROW_BYTES
    }
    record = describe_machine("on_node")
    record["settings"] = {
        "num_workers": options.workers,
        "batch_size": BATCH_SIZE,
        "samples": ROWS,
        "sample_bytes": ROW_BYTES,
    }
    runs = []
    for number in range(options.rounds):
        runs.append(run_fresh(measure, files=files, workers=options.workers))
        say(f"on_node round {number + 1}/{options.rounds}: {runs[-1]}")
    record["runs"] = runs
    record["quiet_bytes_per_s"] = summarise([run["quiet_bytes_per_s"] for run in runs])
    first, later = (
        {
            way: {
                name: [float(sent) for run in runs for sent in run["sent_bytes"][way][name][epochs]]
                for name in files
            }
            for way in ("on_node", "passed")
        }
        for epochs in (slice(1), slice(1, None))
    )
    for epochs, values in (("first", first), ("later", later)):
        record[f"{epochs}_sent_bytes"] = {
            way: {name: summarise(sent) for name, sent in by_name.items()}
            for way, by_name in values.items()
        }
    goal = worst({f"dataset of {name}": goal_of(name, record) for name in files})
    record["goals"] = [asdict(goal)]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Sent to the workers' node in a first epoch, {ROWS:,} samples",
        {
            f"{way}, {name}": [sent / MB for sent in first[key][name]]
            for name in files
            for key, way in (("on_node", "dpex, on_node"), ("passed", "dpex, passed"))
        },
        "MB",
    )
    print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


def goal_of(name: str, record: Mapping[str, Any]) -> Goal:
    """Return the goal for one dataset.

    Args:
        name: Name of the dataset.
        record: Record with the summaries of all epochs.
    """
    first, later = record["first_sent_bytes"], record["later_sent_bytes"]
    return Goal.of(
        "nodes",
        "on_node: sent to the workers in a first epoch",
        [sent / KB for sent in first["on_node"][name]["all"]],
        "<=",
        GOAL_KB,
        "kB",
        f"without on_node {first['passed'][name]['median'] / KB:,.0f} kB; later epochs "
        f"{later['on_node'][name]['median'] / KB:.0f} kB, without on_node "
        f"{later['passed'][name]['median'] / KB:.0f} kB; {ROWS:,} samples; Ray alone sends "
        f"{record['quiet_bytes_per_s']['median'] / KB:.1f} kB a second",
    )


if __name__ == "__main__":
    main()
