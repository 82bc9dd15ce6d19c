"""Photographs: 1,024 JPEG files of 500x375, decoded and augmented as for ImageNet, batch 64.

Decoding takes nearly all the time, as in most training on images: a loader that keeps its workers
busy reaches the limit (one process's rate times the cores), whatever it does per batch.
"""

from pathlib import Path

from benchmarks.harness import Case, arguments, compare, table
from benchmarks.workloads import JpegFiles, make_jpegs

FOLDER = Path("build/bench-data/jpeg")


def main() -> None:
    options = arguments(__doc__, "jpeg")
    dataset = JpegFiles(make_jpegs(FOLDER.resolve()))
    case = Case("jpeg", dataset, batch_size=64, shuffle=True, inline_batches=4)
    print(table([compare(case, options)]))


if __name__ == "__main__":
    main()
