"""What one consumer can get: batches of 38 MB, beside the speed of a plain copy of such a batch.

With ``ready``, ``collate_fn`` gives the same array of 38 MB each time, so that nothing but the way
from a worker to the training loop is left; the goal is about that. With ``stacked``, workers stack
every batch of 64 tensors first, on the same cores. The consumer touches every page of what it gets.
A machine's copies are as fast as its memory and its neighbours let them be, so they are measured
in every turn: into memory that is in use already, and into fresh memory, where the kernel has to
provide every page first.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from benchmarks.goals import Goal
from benchmarks.harness import (
    SETTLE_S,
    arguments,
    close,
    describe_machine,
    make_loader,
    say,
    spread,
    summarise,
    time_epoch,
    write,
)
from benchmarks.plots import bars
from benchmarks.workloads import SameTensor

PEERS = ("torch", "dpex")
VARIANTS = ("ready", "stacked")
BATCH_SIZE = 64
SAMPLE_SHAPE = (3, 224, 224)
BATCH_BYTES = 4 * BATCH_SIZE * int(np.prod(SAMPLE_SHAPE))
BATCHES = 128
COPIES = 20
GB = 1e9
GOAL_OF_COPY = 0.5


class ReadyBatch:
    """A ``collate_fn`` whose batch is there already.

    The tensor is a new one each time, over memory of numpy's: torch moves a tensor that it sends
    into shared memory, and would send the same one a second time for nothing.
    """

    def __init__(self) -> None:
        self.batch = np.ones((BATCH_SIZE, *SAMPLE_SHAPE), dtype=np.float32)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.from_numpy(self.batch)


def copy_rates() -> dict[str, float]:
    """Return the GB/s at which this thread copies a batch, by where it copies to."""
    source = np.ones(BATCH_BYTES, dtype=np.uint8)
    used = np.ones_like(source)
    targets: dict[str, Callable[[], Any]] = {
        "copy": lambda: used,
        "copy to fresh memory": lambda: np.empty_like(source),
    }
    rates = {}
    for name, target in targets.items():
        started = time.perf_counter()
        for _ in range(COPIES):
            np.copyto(target(), source)
        rates[name] = COPIES * BATCH_BYTES / (time.perf_counter() - started) / GB
    return rates


def main() -> None:
    options = arguments(__doc__, "transport", ["--rounds", "5", *sys.argv[1:]])
    torch.set_num_threads(1)
    record = describe_machine("transport")
    record["settings"] = {
        "num_workers": options.workers,
        "batch_bytes": BATCH_BYTES,
        "batches": BATCHES,
    }
    ready = SameTensor(BATCHES, (1,)), 1, ReadyBatch()
    stacked = SameTensor(BATCHES * BATCH_SIZE, SAMPLE_SHAPE), BATCH_SIZE, None
    workloads = dict(zip(VARIANTS, (ready, stacked), strict=True))
    # torch comes first: it forks its workers, once, before Ray's threads are here.
    loaders = {
        (peer, variant): make_loader(
            peer, dataset, batch_size=batch_size, num_workers=options.workers, collate_fn=collate_fn
        )
        for peer in PEERS
        for variant, (dataset, batch_size, collate_fn) in workloads.items()
    }

    def deliver(peer: str, variant: str) -> float:
        """Return the GB/s of one epoch."""
        time.sleep(SETTLE_S)  # what a peer tidies up after its epoch is not the next one's cost
        epoch = time_epoch(loaders[peer, variant])
        assert epoch.samples == BATCHES * BATCH_SIZE
        return BATCHES * BATCH_BYTES / epoch.seconds / GB

    for peer, variant in loaders:
        say(f"transport start-up {peer} {variant}: {deliver(peer, variant):.2f} GB/s")
    turns: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for round_number in range(options.rounds):
        for variant in VARIANTS:
            turn = copy_rates() | {peer: deliver(peer, variant) for peer in PEERS}
            turns[variant].append(turn)
            rates = ", ".join(f"{name} {rate:.2f}" for name, rate in turn.items())
            say(f"transport round {round_number + 1}/{options.rounds} {variant}, GB/s: {rates}")
    for loader in loaders.values():
        close(loader)

    record["gb_per_s"] = {
        variant: {
            name: summarise([turn[name] for turn in variant_turns]) for name in variant_turns[0]
        }
        for variant, variant_turns in turns.items()
    }
    record["of_copy"] = {
        variant: {peer: summarise([t[peer] / t["copy"] for t in turns[variant]]) for peer in PEERS}
        for variant in VARIANTS
    }
    of_copy, ready_rates = record["of_copy"], record["gb_per_s"]["ready"]
    goal = Goal.of(
        "batches of 38 MB, dpex / a copy in memory",
        of_copy["ready"]["dpex"]["all"],
        ">=",
        GOAL_OF_COPY,
        "ratio",
        ", ".join(f"{name} {rate['median']:.1f}" for name, rate in ready_rates.items())
        + f" GB/s; torch {spread(of_copy['ready']['torch'])} of a copy; where workers stack them "
        + ", ".join(f"{peer} {spread(of_copy['stacked'][peer])}" for peer in PEERS),
    )
    record["goals"] = [asdict(goal)]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Batches of 38 MB to one consumer, {options.workers} workers",
        {
            **{
                f"{peer}, {variant}": record["gb_per_s"][variant][peer]["all"]
                for variant in VARIANTS
                for peer in PEERS
            },
            **{name: rate["all"] for name, rate in ready_rates.items() if name not in PEERS},
        },
        "GB/s",
    )
    for variant in VARIANTS:
        summaries = record["gb_per_s"][variant].items()
        figures = (f"{name} {spread(summary)}" for name, summary in summaries)
        print(f"{variant}, GB/s: {', '.join(figures)}")
    print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


if __name__ == "__main__":
    main()
