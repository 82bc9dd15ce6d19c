"""The benchmark ``epochs``: short epochs, epochs with new workers, and two ranks of one machine.

- ``short``: 100 batches of 32 workers, whose samples wait 4 ms. Start and end of an epoch are a
  large part of it.
- ``new workers``: a list of a million tuples without ``persistent_workers``. In every epoch, torch
  forks its workers, and dpex pickles the list to see whether it has changed.
- ``two ranks``: two processes of one machine, each with a ``DistributedSampler`` and one worker, as
  in DDP. Rank 0 measures. A barrier before each epoch keeps the ranks together.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from benchmarks.fresh import run_fresh
from benchmarks.harness import (
    Case,
    Epoch,
    arguments,
    close,
    describe_machine,
    make_loader,
    table,
    time_epoch,
    write,
)
from benchmarks.in_memory import ObjectRows
from benchmarks.plots import bars
from benchmarks.throughput import measure_apart, ratios, summarised
from benchmarks.workloads import SleepingSamples, TinyImages

PEERS = ("torch", "dpex")
SHORT_WORKERS, SHORT_BATCHES, SHORT_WAIT_S = 32, 100, 0.004
OBJECTS = 1_000_000
RANKS, RANK_WORKERS = 2, 1


class QuickObjects(ObjectRows):
    """Rows of a list of a million tuples, whose samples do not wait."""

    sleep_s = 0.0


def cases() -> dict[str, tuple[Case, int]]:
    """Return the cases that one process runs, by part, each with its number of workers."""
    short = Case(
        "epochs, short",
        f"samples that sleep {SHORT_WAIT_S * 1e3:.0f} ms, {SHORT_BATCHES} batches of 32, "
        f"{SHORT_WORKERS} workers",
        SleepingSamples(SHORT_BATCHES * 32, SHORT_WAIT_S),
        batch_size=32,
        goals_over={"torch": 0.95},
        subject="latency",
    )
    new = Case(
        "epochs, new workers",
        f"tuples of a list of {OBJECTS:,}, {ObjectRows.samples:,} an epoch, no persistent_workers, "
        "batch 32",
        QuickObjects(OBJECTS),
        batch_size=32,
        persistent_workers=False,
        goals_over={"torch": 0.95},
        subject="latency",
    )
    return {"short": (short, SHORT_WORKERS), "new workers": (new, 2)}


def ranks_case() -> Case:
    return Case(
        "epochs, two ranks",
        f"28x28 images through PIL and ToTensor, batch 100, {RANKS} ranks with {RANK_WORKERS} "
        "worker each; samples/s of one rank",
        TinyImages(),
        batch_size=100,
        goals_over={"torch": 1.0},
    )


def main() -> None:
    options = arguments(__doc__, "epochs")
    record = describe_machine("epochs")
    parts: dict[str, dict[str, Any]] = {}
    for name, (case, options.workers) in cases().items():
        parts[name] = measure_apart(case, options)
    parts["two ranks"] = two_ranks(options.rounds)
    record["parts"] = parts
    record["goals"] = [goal for part in parts.values() for goal in part.pop("goals")]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        "Epochs: dpex over torch",
        {name: part["dpex_over"]["torch"]["all"] for name, part in parts.items()},
        "dpex/torch",
        1.0,
    )
    print(table([record]))


def two_ranks(rounds: int) -> dict[str, Any]:
    """Return the record of two ranks."""
    found: Mapping[str, list[dict[str, Any]]] = run_fresh(read_as_rank, ranks=RANKS, rounds=rounds)
    epochs = {peer: [Epoch(**epoch) for epoch in each] for peer, each in found.items()}
    cold = {peer: each[0] for peer, each in epochs.items()}
    runs = {peer: each[1:] for peer, each in epochs.items()}
    return summarised(ranks_case(), RANK_WORKERS, cold, runs, ratios(runs))


def read_as_rank(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Read the epochs of each peer in turn, in one rank.

    Args:
        rounds: Number of counted epochs of each peer. One more epoch comes first.

    Returns:
        The epochs of each peer.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = ranks_case()
    loaders = {
        peer: make_loader(
            peer,
            case.dataset,
            batch_size=case.batch_size,
            num_workers=RANK_WORKERS,
            sampler=DistributedSampler(case.dataset),
        )
        for peer in PEERS  # torch forks its workers before Ray starts
    }
    epochs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS}
    for number in range(rounds + 1):
        for peer, loader in loaders.items():
            assert isinstance(loader.sampler, DistributedSampler)
            loader.sampler.set_epoch(number)
            dist.barrier()
            epochs[peer].append(asdict(time_epoch(loader)))
    for loader in loaders.values():
        close(loader)
    dist.destroy_process_group()
    return epochs


if __name__ == "__main__":
    main()
