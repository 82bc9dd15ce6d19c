"""Test of the comparison of batches in ``dpex doctor``."""

from __future__ import annotations

import dataclasses

import torch

from dpex.doctor.self_test import Epoch, difference
from dpex.stats import LoaderStats


def test_one_bit_is_a_difference() -> None:
    epoch = Epoch([torch.arange(8), torch.arange(8)], set(), LoaderStats())
    assert difference(epoch, epoch) is None
    other = torch.arange(8)
    other[7] ^= 1
    for batches, said in (
        ([torch.arange(8), other], "batch 1 "),
        ([torch.arange(8).int(), torch.arange(8)], "batch 0 "),
        ([torch.arange(8)], "1 batches"),
    ):
        text = difference(dataclasses.replace(epoch, batches=batches), epoch)
        assert text is not None
        assert text.startswith(said)
