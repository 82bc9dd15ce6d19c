"""The benchmark ``tabular``: 4,000,000 rows of 32 float32 columns, read by ``__getitems__``.

The dataset returns a batch in one call, so a row costs less than its index. The benchmark shows how
fast a loader draws, sends and stores indices.
"""

import sys

from benchmarks.harness import Case, arguments, table
from benchmarks.peers import TORCH_PEERS
from benchmarks.throughput import compare
from benchmarks.workloads import TableRows, stack


def case() -> Case:
    return Case(
        "tabular",
        "rows of 32 float32 columns by __getitems__, batch 4,096",
        TableRows(),
        batch_size=4_096,
        collate_fn=stack,
        inline_batches=200,
        peers=TORCH_PEERS,
        goals_over={"torch": 1.0},
        goal_first_batch_ms=30.0,
    )


def main() -> None:
    # At the start of an epoch, torch and dpex shuffle four million indices in the same way. This
    # takes 0.16 to 0.27 s. With fewer rounds, that range hides the difference between the loaders.
    options = arguments(__doc__, "tabular", ["--rounds", "15", *sys.argv[1:]])
    print(table([compare(case(), options)]))


if __name__ == "__main__":
    main()
