"""Processes that build the same dataset, for ``test_shared_arrays.py``; prints what they map."""

import json
import os
from typing import Any

import torch
from cluster_programs.output import take_stdout
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from dpex.datasets import on_node
from dpex.memory import address_of, spans

LENGTH = 40


class Table(Dataset[list[int]]):
    """Samples that tell who has read them from what, and what is in it; reading writes to it."""

    def __init__(self) -> None:
        self.rows = torch.arange(LENGTH << 16).reshape(LENGTH, -1)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[int]:
        start = address_of(self.rows.numpy())
        inode = next(span.inode for span in spans() if span.start <= start < span.end)
        found = self.rows[index].sum().item()
        self.rows[index] = -1
        return [os.getpid(), inode, int(found)]


def main() -> None:
    replies = take_stdout()
    dataset = on_node(Table, arrays_in_common=True)
    loader: Any = DpexDataLoader(
        dataset,
        4,
        num_workers=2,
        collate_fn=list,
        distribute_mode=True,
        head_address="local",
    )
    rows = [row for batch in loader for row in batch]
    print(json.dumps([*rows, dataset[0]]), file=replies)


if __name__ == "__main__":
    main()
