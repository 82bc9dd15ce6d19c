"""The benchmark ``epochs``: short epochs, epochs with new workers, and two ranks of one machine.

- ``short``: 100 batches of 32 and of 8 workers, whose samples wait 4 ms. Start and end of an epoch
  are a large part of it. ``thousand`` has ten times as many batches. For each of them, a program
  without dpex sends two messages for each batch through an actor of Ray.
- ``new workers``: a list of 3 million tuples without ``persistent_workers``. In every epoch, torch
  forks its workers, and so does dpex.
- ``two ranks``: two processes of one machine, each with a ``DistributedSampler`` and one worker, as
  in DDP. Rank 0 measures. A barrier before each epoch keeps the ranks together.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import (
    Case,
    Epoch,
    arguments,
    close,
    describe_machine,
    make_loader,
    spread,
    summarise,
    table,
    time_epoch,
    write,
)
from benchmarks.in_memory import ObjectRows
from benchmarks.plots import bars
from benchmarks.throughput import measure_apart, ratios, summarised
from benchmarks.workloads import SleepingSamples, TinyImages

PEERS = ("torch", "dpex")
SHORT_BATCH_SIZE, SHORT_WAIT_S = 32, 0.004
# Batches, workers and goal of each short epoch.
SHORT = {
    "short": (100, 32, 0.98),
    "short, 8 workers": (100, 8, 0.98),
    "thousand": (1_000, 32, 0.98),
}
OBJECTS = 3_000_000
GOAL_FIRST_BATCH = 1.2
RANKS, RANK_WORKERS = 2, 1


class QuickObjects(ObjectRows):
    """Rows of a list of tuples, whose samples do not wait."""

    sleep_s = 0.0


def cases() -> dict[str, tuple[Case, int]]:
    """Return the cases that one process runs, by part, each with its number of workers."""
    short = {
        name: (
            Case(
                f"epochs, {name}",
                f"samples that sleep {SHORT_WAIT_S * 1e3:.0f} ms, {batches:,} batches of "
                f"{SHORT_BATCH_SIZE}, {workers} workers",
                SleepingSamples(batches * SHORT_BATCH_SIZE, SHORT_WAIT_S),
                batch_size=SHORT_BATCH_SIZE,
                goals_over={"torch": goal},
                subject="latency",
            ),
            workers,
        )
        for name, (batches, workers, goal) in SHORT.items()
    }
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
    return {**short, "new workers": (new, 2)}


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
    add_floors(parts, options.rounds)
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


def add_floors(parts: dict[str, dict[str, Any]], rounds: int) -> None:
    """Add what Ray needs without dpex to the notes, and the goal for the first batch."""
    for name, (batches, workers, _) in SHORT.items():
        part = parts[name]
        times = run_fresh(epochs_of_messages, batches=batches, workers=workers, rounds=rounds)
        part["ray_alone_s"] = times
        torchs_s = [epoch["seconds"] for epoch in part["runs"]["torch"]]
        over = statistics.median(torchs_s) / statistics.median(times)
        part["goals"][0]["note"] = f"messages for each batch alone, by Ray without dpex: {over:.2f}"
    new = parts["new workers"]
    firsts = {peer: [epoch["first_batch_s"] for epoch in new["runs"][peer]] for peer in PEERS}
    goal = Goal.of(
        "latency",
        "epochs, new workers: first batch, dpex / torch",
        [ours / theirs for ours, theirs in zip(firsts["dpex"], firsts["torch"], strict=True)],
        "<=",
        GOAL_FIRST_BATCH,
        "ratio",
        ", ".join(f"{peer} {spread(summarise(values))} s" for peer, values in firsts.items()),
    )
    new["goals"].append(asdict(goal))


def epochs_of_messages(batches: int, workers: int, rounds: int) -> list[float]:
    """Measure short epochs whose batches are messages of Ray, without dpex.

    As in dpex, an actor gives tasks their batches, gets the results, and gives them to this
    process.

    Returns:
        Seconds of each counted epoch.
    """
    import ray

    class Queues:
        def __init__(self) -> None:
            self.wanted: asyncio.Queue[int] = asyncio.Queue()
            self.made: asyncio.Queue[int] = asyncio.Queue()

        async def want(self, batches: int) -> None:
            for batch in range(batches):
                self.wanted.put_nowait(batch)

        async def next(self) -> int:
            return await self.wanted.get()

        async def deliver(self, batch: int) -> None:
            self.made.put_nowait(batch)

        async def take(self) -> list[int]:
            taken = [await self.made.get()]
            while not self.made.empty():
                taken.append(self.made.get_nowait())
            return taken

    def work(queues: Any) -> None:
        while True:
            batch = ray.get(queues.next.remote())
            for _ in range(SHORT_BATCH_SIZE):
                time.sleep(SHORT_WAIT_S)
            queues.deliver.remote(batch)

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    queues = ray.remote(Queues).options(num_cpus=0, max_concurrency=1_000).remote()
    tasks = [ray.remote(work).remote(queues) for _ in range(workers)]
    times = []
    # The tasks start in the first epochs.
    for _ in range(3 * rounds):
        began = time.perf_counter()
        queues.want.remote(batches)
        left = batches
        while left:
            left -= len(ray.get(queues.take.remote()))
        times.append(time.perf_counter() - began)
    for task in tasks:
        ray.cancel(task, force=True)
    ray.shutdown()
    return times[-rounds:]


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
        for peer in PEERS
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
