"""One seed per sample, whoever computes it.

torch seeds a worker process once, so what a random transform draws depends on which samples the
worker saw before. Here every sample is seeded from (base_seed, epoch, place in the epoch): the
result depends neither on num_workers nor on chunks, nodes, retries or the order of tasks.

Seeding happens before every sample, so it has to be cheap. ``torch.manual_seed`` also walks the
accelerator back ends; seeding the CPU generator alone does what a worker needs.
"""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["sample_seed", "seed_generators", "stream_key"]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the increment of splitmix64


def _mix(value: int) -> int:
    """Scramble 64 bits (the output function of splitmix64, Steele et al., OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def stream_key(base_seed: int, epoch: int) -> int:
    """Return the 64-bit key of one epoch's stream of sample seeds."""
    return _mix((base_seed ^ _mix((epoch * _GOLDEN) & _MASK64)) & _MASK64)


def sample_seed(key: int, position: int) -> int:
    """Return the seed of the sample at ``position`` (0-based place in the epoch)."""
    return _mix((key + (position + 1) * _GOLDEN) & _MASK64)


def seed_generators(seed: int) -> None:
    """Seed torch's CPU generator, numpy's global generator and ``random`` with 64 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
