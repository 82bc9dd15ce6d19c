"""A table: 4,000,000 rows of 32 float32 columns, read by ``__getitems__``, batch 4,096.

The dataset gives a batch in one call, so that a row costs less than its index does: what counts is
how a loader draws, sends and remembers indices.
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
    # An epoch begins with the shuffling of four million indices, which takes torch and dpex the
    # same time, but 0.16 to 0.27 s of it: fewer rounds do not show what comes on top of that.
    options = arguments(__doc__, "tabular", ["--rounds", "15", *sys.argv[1:]])
    print(table([compare(case(), options)]))


if __name__ == "__main__":
    main()
