"""The benchmark ``ragged``: 300,000 lists of 16 to 512 tokens, padded in batches of 64.

A sample takes microseconds, and samples differ in length. So the benchmark shows how fast a loader
moves many small batches.
"""

from benchmarks.harness import Case, arguments, table
from benchmarks.peers import TORCH_PEERS
from benchmarks.throughput import compare
from benchmarks.workloads import TokenLists, pad


def case() -> Case:
    return Case(
        "ragged",
        "lists of 16 to 512 tokens, padded, batch 64",
        TokenLists(),
        batch_size=64,
        collate_fn=pad,
        inline_batches=1_000,
        peers=TORCH_PEERS,
        goals_over={"torch": 1.0},
        goal_first_batch_ms=30.0,
    )


def main() -> None:
    options = arguments(__doc__, "ragged")
    print(table([compare(case(), options)]))


if __name__ == "__main__":
    main()
