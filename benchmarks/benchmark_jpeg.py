"""The benchmark ``jpeg``: 1,024 JPEG files of 500x375, decoded and augmented as for ImageNet.

Decoding takes nearly all the time, as in most training on images. A loader that keeps its workers
busy reaches the limit: the rate of one process, times the number of cores.
"""

from pathlib import Path

from benchmarks.harness import Case, arguments, table
from benchmarks.peers import TURN_ORDER
from benchmarks.throughput import compare
from benchmarks.workloads import JpegFiles, make_jpegs

FOLDER = Path("build/bench-data/jpeg")


def case() -> Case:
    return Case(
        "jpeg",
        "JPEG files of 500x375, decoded and augmented, batch 64",
        JpegFiles(make_jpegs(FOLDER.resolve())),
        batch_size=64,
        inline_batches=4,
        peers=TURN_ORDER,
        goals_over={"torch": 1.0, "rpc": 1.0, "raydata": 1.5},
        goal_of_limit=0.9,
        goal_first_batch_ms=30.0,
    )


def main() -> None:
    options = arguments(__doc__, "jpeg")
    print(table([compare(case(), options)]))


if __name__ == "__main__":
    main()
