"""Samplers of every kind for a dataset of ``LENGTH`` samples, as arguments of torch's loader."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

LENGTH = 23


class Eager:
    """A sampler that draws from numpy's and Python's generators when its iterator is created."""

    def __iter__(self) -> Iterator[int]:
        indices = np.random.permutation(LENGTH).tolist()
        random.shuffle(indices)
        return iter(indices)

    def __len__(self) -> int:
        return LENGTH


class Ragged:
    """A batch sampler of one to four indices a batch, in a new order in each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(LENGTH).tolist())
        for size in itertools.cycle([1, 4, 2]):
            batch = list(itertools.islice(order, size))
            if not batch:
                return
            yield batch


class Stateful:
    """A sampler whose state is the number of yielded indices, as in torchdata's samplers."""

    def __init__(self) -> None:
        self.yielded = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.begin = self.begin, 0
        while self.yielded < LENGTH:
            self.yielded += 1
            yield self.yielded * 5 % LENGTH

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["yielded"]


class StatefulIterator(Iterator[list[int]]):
    """An iterator with a state, like the iterators of torchdata's samplers."""

    def __init__(self, seed: int) -> None:
        self.order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)).tolist()
        self.place = 0

    def __next__(self) -> list[int]:
        batch = self.order[self.place : self.place + 4]
        if not batch:
            raise StopIteration
        self.place += 4
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"], state["place"]


class IteratesStatefully:
    def __iter__(self) -> StatefulIterator:
        return StatefulIterator(int(torch.randint(1 << 30, ())))


def own(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


INDICES = range(LENGTH)
SAMPLERS: dict[str, Any] = {
    "sequential": lambda seed: {"batch_size": 4},
    "shuffle": lambda seed: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda seed: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": lambda seed: {"batch_size": 4, "shuffle": True, "generator": own(seed)},
    "sampler's generator": lambda seed: {
        "batch_size": 4,
        "sampler": RandomSampler(INDICES, generator=own(seed)),
        "generator": own(seed + 1),
    },
    "replacement": lambda seed: {
        "batch_size": 4,
        "sampler": RandomSampler(INDICES, replacement=True, num_samples=23, generator=own(seed)),
    },
    "subset": lambda seed: {"batch_size": 4, "sampler": SubsetRandomSampler(range(3, 20))},
    "weighted": lambda seed: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0] * LENGTH, 23, generator=own(seed)),
    },
    "eager": lambda seed: {"batch_size": 4, "sampler": Eager()},
    "unbatched": lambda seed: {"batch_size": None, "sampler": SubsetRandomSampler(range(9))},
    "batch_sampler": lambda seed: {
        "batch_sampler": BatchSampler(RandomSampler(INDICES, generator=own(seed)), 4, False)
    },
    "ragged": lambda seed: {"batch_sampler": Ragged()},
    "distributed": lambda seed: {
        "batch_size": 4,
        "sampler": DistributedSampler(INDICES, num_replicas=2, rank=1),
    },
    "stateful": lambda seed: {"batch_size": 4, "sampler": Stateful()},
    "stateful iterator": lambda seed: {"batch_sampler": IteratesStatefully()},
}
