"""What a loader has done in its newest epoch, and what the training loop waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

from dpex.wire.timings import Costs

__all__ = ["LoaderStats", "Meter"]

# Who waits less than this has its data in time.
_IN_TIME = 0.05


@dataclass(frozen=True)
class LoaderStats:
    """One epoch of a loader, until now.

    Without workers on a cluster only the first five and the last are known.

    Attributes:
        seconds: From ``iter()`` to the last ``next()``, or to the epoch's end.
        waiting_s: Of these, in ``iter()`` and in ``next()``.
        first_batch_s: From ``iter()`` until the first batch was there; None before.
        batches: Delivered ones.
        samples: That these were to have, with those that were left out; a stream's batches say how
            many they have, where a cluster makes them.
        size_bytes: Of all blocks that came, batches in flight among them.
        read_s: Workers' seconds in the dataset; its own transforms are among them.
        transform_s: Workers' seconds in the transforms of a ``MappedDataset``.
        collate_s: Workers' seconds in ``collate_fn``.
        encode_s: Workers' seconds to pickle batches.
        transfer_s: Seconds to get blocks out of the object store, beside the training loop.
        decode_s: Seconds to unpack them, into page-locked memory if that is asked for, likewise.
        retries: Chunks of batches that were made again, because worker processes died.
        skipped: Samples left out by ``on_error="skip"``.
        cache_hits: Samples that workers found in a ``cached`` dataset.
        cache_misses: Samples that they made for one.
        in_flight: Batches asked for and not delivered, now.
    """

    seconds: float = 0.0
    waiting_s: float = 0.0
    first_batch_s: float | None = None
    batches: int = 0
    samples: int = 0
    size_bytes: int = 0
    read_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    retries: int = 0
    skipped: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    in_flight: int = 0

    @property
    def samples_per_s(self) -> float:
        """Delivered samples per second of the epoch."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Share of the epoch in which the training loop waited, 0 to 1."""
        return self.waiting_s / self.seconds if self.seconds else 0.0

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the samples that were found in a cache; None without one."""
        looked_up = self.cache_hits + self.cache_misses
        return self.cache_hits / looked_up if looked_up else None

    @property
    def worker_shares(self) -> dict[str, float]:
        """Share of the workers' seconds in each kind of work, the largest first."""
        spent = {
            "reading": self.read_s,
            "transforms": self.transform_s,
            "collate_fn": self.collate_s,
            "encoding": self.encode_s,
        }
        total = sum(spent.values())
        shares = {name: seconds / total for name, seconds in spent.items() if total and seconds}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def __repr__(self) -> str:
        """Say in one line what bounds the loop."""
        parts = [
            f"{self.batches:,} batches, {self.samples:,} samples in {self.seconds:.3g} s "
            f"({self.samples_per_s:,.0f} samples/s)"
        ]
        if self.waiting_share > _IN_TIME:
            parts.append(f"waits {self.waiting_share:.0%} of its time for data")
        elif self.batches:
            parts.append(f"the data is in time (waits {self.waiting_share:.1%})")
        shares = self.worker_shares
        if shares:
            most, share = next(iter(shares.items()))
            parts.append(f"{most}: {share:.0%} of the workers' time")
        if self.cache_hit_rate is not None:
            parts.append(f"{self.cache_hit_rate:.0%} of the samples from the cache")
        parts += [
            f"{number:,} {what}"
            for number, what in ((self.retries, "retries"), (self.skipped, "samples skipped"))
            if number
        ]
        return f"<{'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return the table that Jupyter shows."""
        rows = [(field.name, _shown(getattr(self, field.name))) for field in fields(self)]
        rows += [("samples_per_s", _shown(self.samples_per_s))]
        rows += [("waiting_share", f"{self.waiting_share:.1%}")]
        cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
        bounds = repr(self)[1:-1]
        return f"<table><caption>{bounds}</caption>{cells}</table>"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


class Meter:
    """Counts one epoch.

    Attributes:
        retries: Batches that were sent a second time.
        skipped: Samples that were left out.
        in_flight: Batches asked for and not delivered.
        published: What Ray's metrics know of them.
    """

    def __init__(self) -> None:
        self._began = self._left = time.perf_counter()
        self._waiting_s = 0.0
        self._first_batch_s: float | None = None
        self._batches = 0
        self._costs = Costs()
        self._size_bytes = 0
        self._transfer_s = 0.0
        self._decode_s = 0.0
        self.retries = 0
        self.skipped = 0
        self.in_flight = 0
        self.published = LoaderStats()

    @contextlib.contextmanager
    def asked(self, *, for_batch: bool = True) -> Iterator[None]:
        """Count the time in which the training loop waits.

        Args:
            for_batch: Whether for a batch, which is there if nothing is raised.
        """
        entered = time.perf_counter()
        try:
            yield
            if for_batch:
                self._batches += 1
        finally:
            self._left = time.perf_counter()
            self._waiting_s += self._left - entered
            if self._batches and self._first_batch_s is None:
                self._first_batch_s = self._left - self._began

    def arrived(self, costs: Costs, *, size_bytes: int, transfer_s: float, decode_s: float) -> None:
        """Take a block's costs into account."""
        self._costs.add(costs)
        self._size_bytes += size_bytes
        self._transfer_s += transfer_s
        self._decode_s += decode_s

    def stats(self, *, samples: int) -> LoaderStats:
        """Return what has been counted.

        Args:
            samples: Delivered ones.
        """
        costs = self._costs
        return LoaderStats(
            seconds=self._left - self._began,
            waiting_s=self._waiting_s,
            first_batch_s=self._first_batch_s,
            batches=self._batches,
            samples=samples,
            size_bytes=self._size_bytes,
            read_s=costs.read_s,
            transform_s=costs.transform_s,
            collate_s=costs.collate_s,
            encode_s=costs.encode_s,
            transfer_s=self._transfer_s,
            decode_s=self._decode_s,
            retries=costs.retries + self.retries,
            skipped=self.skipped,
            cache_hits=costs.cache_hits,
            cache_misses=costs.cache_misses,
            in_flight=self.in_flight,
        )
