"""The benchmark ``null``: transport alone; every sample is the same (3, 224, 224) float32 tensor.

Workers only collate batches of 38 MB. So the rate is that of moving a batch from a worker to the
training loop.
"""

from benchmarks.harness import Case, arguments, table
from benchmarks.peers import TORCH_PEERS
from benchmarks.throughput import compare
from benchmarks.workloads import SameTensor


def case() -> Case:
    return Case(
        "null",
        "one (3, 224, 224) tensor, batch 64",
        SameTensor(),
        batch_size=64,
        shuffle=False,
        inline_batches=16,
        peers=TORCH_PEERS,
        goals_over={"torch": 1.0},
        goal_first_batch_ms=30.0,
    )


def main() -> None:
    options = arguments(__doc__, "null")
    print(table([compare(case(), options)]))


if __name__ == "__main__":
    main()
