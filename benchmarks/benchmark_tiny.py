"""The benchmark ``tiny``: 60,000 images of 28x28 through PIL and ToTensor, batch 100.

A sample takes tens of microseconds, a batch takes a few milliseconds, and an epoch has 600 batches.
The benchmark shows the overhead of a batch: a message, a task, a wake-up.
"""

from benchmarks.harness import Case, arguments, table
from benchmarks.peers import TURN_ORDER
from benchmarks.throughput import compare
from benchmarks.workloads import TinyImages


def case() -> Case:
    return Case(
        "tiny",
        "28x28 images through PIL and ToTensor, batch 100",
        TinyImages(),
        batch_size=100,
        inline_batches=150,
        peers=TURN_ORDER,
        goals_over={"torch": 1.0, "rpc": 1.0},
        goal_first_batch_ms=30.0,
    )


def main() -> None:
    options = arguments(__doc__, "tiny")
    print(table([compare(case(), options)]))


if __name__ == "__main__":
    main()
