"""A program for ``test_fair_share.py``: one of several training processes that share CPUs.

Usage: even_program.py ADDRESS DIRECTORY RANK RANKS samples|streams

At its end, it writes how many batches each training process has read, and how many calls its
pipeline actor has not answered. With ``samples``, the training processes wait for one another's
first batch.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cluster_programs import ask_actor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from dpex import DpexDataLoader

WORKERS = {"samples": 8, "streams": 4}
BATCHES = {"samples": 160, "streams": 640}
BATCH_SIZE = 8
SAMPLE_CPU_SECONDS = 0.005


class Busy(Dataset[torch.Tensor]):
    """Samples that take processor time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.process_time() + SAMPLE_CPU_SECONDS
        while time.process_time() < until:
            pass
        return torch.tensor(index)


class BusyStreams(IterableDataset[torch.Tensor]):
    """``Busy`` as streams; a file for each stream records how often the stream was started."""

    def __init__(self, samples: Busy, directory: Path) -> None:
        self.samples = samples
        self.directory = directory

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        with (self.directory / f"begun{worker.id}").open("a") as log:
            log.write(".")
        for index in range(worker.id, len(self.samples), worker.num_workers):
            yield self.samples[index]


def open_questions(loader: Any) -> int:
    """Return how many calls the loader's pipeline actor has not answered yet."""

    def count(actor: Any) -> int:
        (opening,) = actor._pipelines.values()
        return len(asyncio.all_tasks(opening.get_loop()))

    return int(ask_actor(loader, count))


def main() -> None:
    address, directory, own, ranks, kind = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    progress = [directory / f"progress{rank}" for rank in range(int(ranks))]
    dataset: Any = Busy(BATCHES[kind] * BATCH_SIZE)
    if kind == "streams":
        (streams := directory / f"streams{own}").mkdir()
        dataset = BusyStreams(dataset, streams)
    # Prefetch only as much as torch: an early training process must not finish before the others
    # start.
    options: dict[str, Any] = {"prefetch_bytes": 0, "distribute_mode": True}
    loader = DpexDataLoader(
        dataset, BATCH_SIZE, num_workers=WORKERS[kind], head_address=address, **options
    )
    batches = iter(loader)
    next(batches)
    with (directory / f"progress{own}").open("ab", buffering=0) as log:
        log.write(b".")
        while kind == "samples" and not all(path.exists() for path in progress):
            time.sleep(0.02)
        for _ in batches:
            log.write(b".")
    sizes = [path.stat().st_size for path in progress]
    ended = {"batches": sizes, "open": open_questions(loader)}
    (directory / f"ended{own}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
