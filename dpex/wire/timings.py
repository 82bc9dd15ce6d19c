"""What batches cost: noted where it is spent, summed by who asks.

Module-level state on purpose, as in ``worker``: what is spent in a dataset of the user's, or in a
cache below it, has no other way to the task that makes a batch of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

__all__ = ["Costs", "count", "noted", "spent"]


@dataclass(slots=True)
class Costs:
    """What some batches took.

    Attributes:
        seconds: Wall time in the first stage, by which chunks are sized.
        cpu_seconds: Processor time of the worker process in that time.
        read_s: Wall time in the dataset, less its ``MappedDataset``'s transforms.
        transform_s: Wall time in those, in all stages.
        collate_s: Wall time in ``collate_fn``.
        encode_s: Wall time to pickle, and to unpickle between stages.
        samples: How many samples were read of a stream.
        cache_hits: Samples that were found in a cache.
        cache_misses: Samples that were made for one.
        retries: Chunks that were given to a second process, because the first one died.
        after_restart: Batches of a logical worker whose first process has ended.
        late_changes: Copies that a batch changed after dpex had released their loader.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    read_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    encode_s: float = 0.0
    samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    retries: int = 0
    after_restart: int = 0
    late_changes: int = 0

    def add(self, other: Costs) -> None:
        """Take other batches' costs into the sum."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def settle(self) -> None:
        """Take what is left of a batch's wall time for reading."""
        others = self.transform_s + self.collate_s + self.encode_s
        self.read_s = max(0.0, self.seconds - others)

    def plain(self) -> tuple[float, ...]:
        """Return the numbers, for ``Costs(*numbers)``."""
        return astuple(self)


_NAMES = [field.name for field in fields(Costs)]
_noted = Costs()


@contextlib.contextmanager
def noted() -> Iterator[Costs]:
    """Note what is spent from here on; complete at the end."""
    global _noted
    outer, _noted = _noted, Costs()
    started, cpu_started = time.perf_counter(), time.process_time()
    costs = _noted
    try:
        yield costs
    finally:
        costs.seconds += time.perf_counter() - started
        costs.cpu_seconds += time.process_time() - cpu_started
        _noted = outer


def spent(name: str, since: float) -> None:
    """Note the seconds from ``since``, a ``time.perf_counter()``, until now."""
    setattr(_noted, name, getattr(_noted, name) + time.perf_counter() - since)


def count(name: str, number: int = 1) -> None:
    """Note that something happened so many times."""
    setattr(_noted, name, getattr(_noted, name) + number)
