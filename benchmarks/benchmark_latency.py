"""The benchmark ``latency``: samples that wait 5 ms, as for a remote store; 2, 8 and 32 workers.

Samples take time but no processor time. So the rate should grow with the number of workers, far
beyond the number of cores. An epoch takes about five seconds with any number of workers.
"""

from benchmarks.harness import Case, arguments, describe_machine, table, write
from benchmarks.plots import bars
from benchmarks.throughput import measure_apart
from benchmarks.workloads import SleepingSamples

WORKERS = (2, 8, 32)
SLEEP_S = 0.005
BATCH_SIZE = 50
BATCHES_PER_WORKER = 20


def case(workers: int) -> Case:
    return Case(
        f"latency, {workers} workers",
        f"samples that sleep {SLEEP_S * 1e3:.0f} ms, batch {BATCH_SIZE}, {workers} workers",
        SleepingSamples(workers * BATCHES_PER_WORKER * BATCH_SIZE, SLEEP_S),
        batch_size=BATCH_SIZE,
        goals_over={"torch": 0.98},
        subject="latency",
    )


def main() -> None:
    options = arguments(__doc__, "latency")
    record = describe_machine("latency")
    parts = {}
    for workers in WORKERS:
        options.workers = workers
        parts[f"{workers} workers"] = measure_apart(case(workers), options)
    record["parts"] = parts
    record["goals"] = [goal for part in parts.values() for goal in part.pop("goals")]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Samples that sleep {SLEEP_S * 1e3:.0f} ms, batch {BATCH_SIZE}: warm epochs",
        {
            f"{peer}, {name}": rate["all"]
            for name, part in parts.items()
            for peer, rate in part["samples_per_s"].items()
        },
        "samples/s",
    )
    print(table([record]))


if __name__ == "__main__":
    main()
