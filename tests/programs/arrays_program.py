"""A program for ``test_shared_arrays.py``: it prints the memory that its worker processes map.

Samples of the second half of the epoch wait until two worker processes have read samples.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from cluster_programs import wait_until
from cluster_programs.on_ray import on_ray
from cluster_programs.output import take_stdout
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from dpex.datasets import on_node
from dpex.wire.memory_map import address_of, spans

LENGTH = 40
WORKERS = 2


class Table(Dataset[list[int]]):
    """Sample i is its reader's pid, the inode of the mapped memory, and the sum of row i.

    Reading a sample overwrites its row.
    """

    def __init__(self, marks: str) -> None:
        self.marks = Path(marks)
        self.rows = torch.arange(LENGTH << 16).reshape(LENGTH, -1)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[int]:
        (self.marks / str(os.getpid())).touch()
        if index >= LENGTH // 2:
            wait_until(lambda: len(list(self.marks.iterdir())) == WORKERS, 60, "a second worker")
        start = address_of(self.rows.numpy())
        inode = next(span.inode for span in spans() if span.start <= start < span.end)
        found = self.rows[index].sum().item()
        self.rows[index] = -1
        return [os.getpid(), inode, int(found)]


def main() -> None:
    replies = take_stdout()
    marks = Path("marks").resolve()
    marks.mkdir()
    dataset = on_node(Table, str(marks), arrays_in_common=True)
    loader: Any = DpexDataLoader(
        dataset,
        4,
        num_workers=WORKERS,
        collate_fn=list,
        distribute_mode=True,
        head_address="local",
    )
    rows = [row for batch in on_ray(loader) for row in batch]
    print(json.dumps([*rows, dataset[0]]), file=replies)


if __name__ == "__main__":
    main()
