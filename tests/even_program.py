"""One of the trainers of ``test_even.py``, which says how far all are when it ends.

Usage: even_program.py ADDRESS DIRECTORY RANK RANKS
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader

BATCHES = 160
BATCH_SIZE = 8
SAMPLE_CPU_SECONDS = 0.005


class Busy(Dataset[torch.Tensor]):
    """Samples that take processor time."""

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.process_time() + SAMPLE_CPU_SECONDS
        while time.process_time() < until:
            pass
        return torch.tensor(index)


def main() -> None:
    address, directory, own, ranks = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    progress = [directory / f"progress{rank}" for rank in range(ranks)]
    # No further ahead than torch: who begins early is not to have everything before the others.
    options: dict[str, Any] = {"num_workers": 8, "prefetch_bytes": 0, "head_address": address}
    loader = DpexDataLoader(Busy(), BATCH_SIZE, distribute_mode=True, **options)
    batches = iter(loader)
    next(batches)
    with (directory / f"progress{own}").open("ab", buffering=0) as log:
        log.write(b".")
        while not all(path.exists() for path in progress):
            time.sleep(0.02)
        for _ in batches:
            log.write(b".")
    sizes = [path.stat().st_size for path in progress]
    (directory / f"ended{own}.json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
