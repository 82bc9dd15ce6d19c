"""A table: 4,000,000 rows of 32 float32 columns, read by ``__getitems__``, batch 4,096.

The dataset gives a batch in one call, so that a row costs less than its index does: what counts is
how a loader draws, sends and remembers indices.
"""

from benchmarks.harness import Case, arguments, table
from benchmarks.peers import TORCH_PEERS
from benchmarks.throughput import compare
from benchmarks.workloads import TableRows, stack


def main() -> None:
    options = arguments(__doc__, "tabular")
    case = Case(
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
    print(table([compare(case, options)]))


if __name__ == "__main__":
    main()
