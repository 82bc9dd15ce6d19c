"""The benchmark ``seeding``: the time of seeding a sample, as a share of a tiny sample's time.

dpex seeds torch, numpy and ``random`` before every sample, if samples draw from them. The benchmark
reads samples with and without seeding, in turns, in one process and without a loader.
"""

import time

import torch

from benchmarks.harness import arguments, describe_machine, say, spread, summarise, write
from benchmarks.plots import bars
from benchmarks.workloads import TinyImages
from dpex.worker.seeding import sample_seed, seed_generators, stream_key

SAMPLES = 5_000


def main() -> None:
    options = arguments(__doc__, "seeding")
    record = describe_machine("seeding")
    torch.set_num_threads(1)
    dataset, key = TinyImages(), stream_key(1, 2)

    def read(*, seeded: bool) -> float:
        """Return the microseconds for each sample."""
        start = time.perf_counter()
        for position in range(SAMPLES):
            if seeded:
                seed_generators(sample_seed(key, position))
            dataset[position]
        return (time.perf_counter() - start) / SAMPLES * 1e6

    read(seeded=True)
    pairs = [(read(seeded=False), read(seeded=True)) for _ in range(options.rounds)]
    record["settings"] = {"samples": SAMPLES}
    record["sample_us"] = summarise([plain for plain, _ in pairs])
    record["seeding_us"] = summarise([seeded - plain for plain, seeded in pairs])
    record["share"] = summarise([(seeded - plain) / seeded for plain, seeded in pairs])
    record["goals"] = []
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        "What a tiny sample takes, and seeding it",
        {"sample": record["sample_us"]["all"], "seeding": record["seeding_us"]["all"]},
        "µs",
    )
    seeding_us = record["seeding_us"]["median"]
    say(f"a sample takes {spread(record['sample_us'])} µs, its seeding {seeding_us:.2f}")
    print(f"seeding's share of a tiny sample: {spread(record['share'], '.1%')}")


if __name__ == "__main__":
    main()
