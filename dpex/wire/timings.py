"""Costs of batches: wall time, CPU time and counts.

The state is at module level on purpose, as in ``worker/logical_worker.py``. The user's dataset, or
a cache below it, has no other way to report costs to the task that makes the batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

__all__ = ["Costs", "count", "noted", "spent"]


@dataclass(slots=True)
class Costs:
    """The costs of some batches.

    Attributes:
        seconds: Wall time in the first stage. dpex sizes chunks by it.
        cpu_seconds: CPU time of the worker process during ``seconds``.
        read_s: Wall time in the dataset, without the transforms of a ``MappedDataset``.
        transform_s: Wall time in the transforms of a ``MappedDataset``, in all stages.
        collate_s: Wall time in ``collate_fn``.
        encode_s: Wall time to pickle batches, and to unpickle them between stages.
        samples: Number of samples read from a stream.
        cache_hits: Number of samples found in a cache.
        cache_misses: Number of samples computed for a cache.
        retries: Number of batches given to a second process because the first process died.
        after_restart: Number of batches of logical workers whose first process has ended.
        late_changes: Number of dataset copies that a batch changed under ``Binding.RELEASED``.
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
        """Add the costs of other batches."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def settle(self) -> None:
        """Set ``read_s`` to the wall time of the batch that no other cost accounts for."""
        others = self.transform_s + self.collate_s + self.encode_s
        self.read_s = max(0.0, self.seconds - others)


_NAMES = [field.name for field in fields(Costs)]
_noted = Costs()


@contextlib.contextmanager
def noted() -> Iterator[Costs]:
    """Record the costs of the code in this context.

    Yields:
        The costs. They are complete when the context ends.
    """
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
    """Add the seconds since ``since``, a ``time.perf_counter()`` value, to the cost ``name``."""
    setattr(_noted, name, getattr(_noted, name) + time.perf_counter() - since)


def count(name: str, number: int = 1) -> None:
    """Add ``number`` to the count ``name``."""
    setattr(_noted, name, getattr(_noted, name) + number)
