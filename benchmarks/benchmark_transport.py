"""The benchmark ``transport``: batches of 38 MB to one consumer, compared with a plain copy.

In the variant ``ready``, ``collate_fn`` returns the same array of 38 MB each time. Then only the
transport from a worker to the training loop remains, and the goal is about this variant. In
``stacked``, workers first stack 64 tensors for every batch, on the same cores. The consumer touches
every page of a batch.

The speed of a copy depends on the memory and on other processes of the machine. So the benchmark
measures copies in every round: into memory that is already in use, and into fresh memory. For fresh
memory, the kernel must first provide every page.
"""

import sys
import time
from collections.abc import Callable, Sequence
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

PEERS = ("torch", "dpex", "local")
# Peers that run in turns. An idle Ray takes time of the cores, so the peer on Ray comes last.
GROUPS = (("torch", "dpex"), ("local",))
VARIANTS = ("ready", "stacked")
BATCH_SIZE = 64
SAMPLE_SHAPE = (3, 224, 224)
BATCH_BYTES = 4 * BATCH_SIZE * int(np.prod(SAMPLE_SHAPE))
BATCHES = 128
COPIES = 20
GB = 1e9
GOAL_OF_COPY = 0.5


class ReadyBatch:
    """A ``collate_fn`` that returns a ready batch.

    The tensor is new each time, but its memory is numpy's. torch moves a tensor that it sends into
    shared memory. It would send the same tensor a second time at no cost.
    """

    def __init__(self) -> None:
        self.batch = np.ones((BATCH_SIZE, *SAMPLE_SHAPE), dtype=np.float32)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.from_numpy(self.batch)


def copy_rates() -> dict[str, float]:
    """Return the GB/s at which this thread copies a batch, for each kind of target."""
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
    turns: dict[str, dict[str, list[dict[str, float]]]] = {variant: {} for variant in VARIANTS}
    for group in GROUPS:
        for variant, found in run_group(group, options).items():
            turns[variant] |= dict.fromkeys(group, found)
    record["gb_per_s"] = {
        variant: {
            **{
                copy: summarise([turn[copy] for turn in by_peer["dpex"]])
                for copy in ("copy", "copy to fresh memory")
            },
            **{peer: summarise([turn[peer] for turn in by_peer[peer]]) for peer in PEERS},
        }
        for variant, by_peer in turns.items()
    }
    record["of_copy"] = {
        variant: {
            peer: summarise([turn[peer] / turn["copy"] for turn in by_peer[peer]]) for peer in PEERS
        }
        for variant, by_peer in turns.items()
    }
    of_copy, ready_rates = record["of_copy"], record["gb_per_s"]["ready"]
    goal = Goal.of(
        "throughput",
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


def run_group(peers: Sequence[str], options: Any) -> dict[str, list[dict[str, float]]]:
    """Run some peers in turns.

    Args:
        peers: Peers of ``make_loader``.
        options: ``workers`` and ``rounds``.

    Returns:
        For each variant, the GB/s of each peer and of copies in each round.
    """
    ready = SameTensor(BATCHES, (1,)), 1, ReadyBatch()
    stacked = SameTensor(BATCHES * BATCH_SIZE, SAMPLE_SHAPE), BATCH_SIZE, None
    workloads = dict(zip(VARIANTS, (ready, stacked), strict=True))
    loaders = {
        (peer, variant): make_loader(
            peer, dataset, batch_size=batch_size, num_workers=options.workers, collate_fn=collate_fn
        )
        for peer in peers
        for variant, (dataset, batch_size, collate_fn) in workloads.items()
    }

    def deliver(peer: str, variant: str) -> float:
        """Return the GB/s of one epoch."""
        time.sleep(SETTLE_S)  # the clean-up of one epoch must not slow down the next
        epoch = time_epoch(loaders[peer, variant])
        assert epoch.samples == BATCHES * BATCH_SIZE
        return BATCHES * BATCH_BYTES / epoch.seconds / GB

    for peer, variant in loaders:
        say(f"transport start-up {peer} {variant}: {deliver(peer, variant):.2f} GB/s")
    turns: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for round_number in range(options.rounds):
        for variant in VARIANTS:
            turn = copy_rates() | {peer: deliver(peer, variant) for peer in peers}
            turns[variant].append(turn)
            rates = ", ".join(f"{name} {rate:.2f}" for name, rate in turn.items())
            say(f"transport round {round_number + 1}/{options.rounds} {variant}, GB/s: {rates}")
    for loader in loaders.values():
        close(loader)
    return turns


if __name__ == "__main__":
    main()
