"""Small images: 60,000 of 28x28 through PIL and ToTensor, batch 100; what a batch itself costs.

A sample takes tens of microseconds, a batch a few milliseconds, and an epoch has 600 of them. What
a loader does once per batch (a message, a task, a wake-up) shows here and nowhere else.
"""

from benchmarks.harness import Case, arguments, compare, table
from benchmarks.workloads import TinyImages


def main() -> None:
    options = arguments(__doc__, "tiny")
    case = Case("tiny", TinyImages(), batch_size=100, shuffle=True, inline_batches=150)
    print(table([compare(case, options)]))


if __name__ == "__main__":
    main()
