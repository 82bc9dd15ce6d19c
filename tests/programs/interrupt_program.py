"""A program for ``test_interrupt.py``: Ctrl-C, then another epoch, then another Ray."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import ray
import torch
from cluster_programs.output import take_stdout

from dpex import DpexDataLoader


class Waits:
    """A dataset in ``__main__``, as in a notebook; sample 50 waits until it is interrupted."""

    def __init__(self, waiting: Path) -> None:
        self.waiting = waiting

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index == 50 and not self.waiting.exists():
            self.waiting.touch()
            threading.Event().wait()
        return torch.tensor(index)


def main() -> None:
    replies = take_stdout()
    # A process that a shell starts in the background ignores SIGINT, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = DpexDataLoader(
        Waits(Path(sys.argv[1])),
        batch_size=10,
        num_workers=2,
        distribute_mode=True,
        head_address="local",
    )
    try:
        for batch in loader:
            print("batch", batch[0].item(), file=replies)
    except KeyboardInterrupt:
        print("interrupted", file=replies)
    again = [int(index) for batch in loader for index in batch]
    print("complete" if again == list(range(100)) else again, file=replies)

    lasting = DpexDataLoader(
        loader.dataset,
        batch_size=10,
        num_workers=2,
        persistent_workers=True,
        distribute_mode=True,
        head_address="local",
    )
    list(lasting)
    ray.shutdown()
    for either in (loader, lasting):
        again = [int(index) for batch in either for index in batch]
        print("complete" if again == list(range(100)) else again, file=replies)


if __name__ == "__main__":
    main()
