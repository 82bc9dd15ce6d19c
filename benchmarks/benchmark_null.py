"""No work: one (3, 224, 224) float32 tensor again and again, batch 64; transport alone.

Workers collate 38 MB and do nothing else, so the rate is that of moving a batch from a worker to
the training loop.
"""

from benchmarks.harness import Case, arguments, compare, table
from benchmarks.workloads import SameTensor


def main() -> None:
    options = arguments(__doc__, "null")
    case = Case("null", SameTensor(), batch_size=64, shuffle=False, inline_batches=16)
    print(table([compare(case, options)]))


if __name__ == "__main__":
    main()
