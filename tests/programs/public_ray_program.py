"""A program for ``test_public_names_alone.py``: it checks batches, errors and recovery."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from living import AlwaysKills, DividesByZero, Plain, read_past_errors
from torch.utils.data import DataLoader

from dpex import BatchLostError, DpexDataLoader
from dpex.transforms import MappedDataset, Stage


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def main() -> None:
    """Iterate, break, fail and recover; raise an error if a result is wrong."""
    options = {"batch_size": 10, "num_workers": 2, "distribute_mode": True, "head_address": "local"}
    for persistent in (False, True):
        epochs = []
        for loader in (
            DataLoader(Plain(), 10, shuffle=True, num_workers=2, persistent_workers=persistent),
            DpexDataLoader(Plain(), **options, shuffle=True, persistent_workers=persistent),
        ):
            torch.manual_seed(1)
            next(iter(loader))
            epochs.append([batch[1].tolist() for _ in range(3) for batch in loader])
        assert epochs[0] == epochs[1], "other batches than torch's"

    dataset = MappedDataset(
        Plain(), [double, Stage(double, num_cpus=2), Stage(double, batched=True)]
    )
    expected = [b[0].tolist() for b in DataLoader(dataset, 10, collate_fn=dataset.collate())]
    for _ in range(2):
        assert [batch[0].tolist() for batch in DpexDataLoader(dataset, **options)] == expected

    firsts, errors = read_past_errors(iter(DpexDataLoader(DividesByZero(), **options)))
    assert errors == 1
    assert firsts == [first for first in range(0, 200, 10) if first != 50], firsts

    iterator = iter(DpexDataLoader(AlwaysKills(), **options))
    assert [next(iterator)[1].tolist()[0] for _ in range(5)] == [0, 10, 20, 30, 40]
    with pytest.raises(BatchLostError, match="batch 5"):
        next(iterator)
    assert [batch[1].tolist()[0] for batch in iterator] == list(range(60, 200, 10))
    print("all as it should be")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
