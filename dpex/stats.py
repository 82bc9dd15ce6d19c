"""Statistics of a loader's newest epoch, and of the time that the training loop waited."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dpex.compat.untraced import untraced, untraced_alone
from dpex.wire.timings import Costs

if TYPE_CHECKING:
    from dpex.training.checkpoint import EpochProgress

__all__ = ["LoaderStats", "Meter"]

# ``repr()`` reports that the loop waits for data if ``waiting_share`` is above this value.
_IN_TIME = 0.05


@dataclass(frozen=True)
class LoaderStats:
    """Statistics of one epoch of a loader, up to now.

    All times are in seconds. ``read_s``, ``transform_s``, ``collate_s`` and ``encode_s`` are sums
    over all worker processes. If the loader has no workers on Ray, dpex counts only ``seconds``,
    ``waiting_s``, ``first_batch_s``, ``batches``, ``samples`` and ``in_flight``.

    Attributes:
        seconds: Time from ``iter()`` to the end of the last ``next()``.
        waiting_s: The part of ``seconds`` that the loop spent in ``iter()`` and ``next()``.
        first_batch_s: Time from ``iter()`` to the first batch; None before the first batch.
        batches: Batches delivered.
        samples: Samples requested for the delivered batches, including the skipped samples. For an
            ``IterableDataset`` with workers on Ray: samples that the delivered batches hold. A
            batch whose indices have no ``len()`` counts as 0 samples.
        size_bytes: Size of all blocks received, including batches that are not delivered yet.
        read_s: Time in the dataset, including transforms that the dataset applies itself.
        transform_s: Time in the transforms of a ``MappedDataset``.
        collate_s: Time in ``collate_fn``.
        encode_s: Time to pickle batches, and to unpickle them between stages.
        transfer_s: Time to fetch blocks from the object store, in a background thread of the
            training process.
        decode_s: Time to unpack blocks into the batches' memory, in a background thread too. The
            memory is page-locked with ``pin_memory``.
        retries: Batches that dpex resent or that a restarted Ray task recomputed, because worker
            processes, nodes or blocks were lost.
        skipped: Samples that ``on_error="skip"`` left out.
        cache_hits: Samples that workers found in the cache of a ``cached`` dataset.
        cache_misses: Samples that workers computed because that cache did not have them.
        in_flight: Batches requested and not delivered yet.
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
        """Fraction of the epoch that the training loop waited, from 0 to 1."""
        return self.waiting_s / self.seconds if self.seconds else 0.0

    @property
    def cache_hit_rate(self) -> float | None:
        """Fraction of cache lookups that were hits, from 0 to 1; None without a lookup."""
        looked_up = self.cache_hits + self.cache_misses
        return self.cache_hits / looked_up if looked_up else None

    @property
    def worker_shares(self) -> dict[str, float]:
        """Fraction of worker time by kind of work, the largest first.

        The keys are ``"reading"``, ``"transforms"``, ``"collate_fn"`` and ``"encoding"``. Kinds
        that took no time are absent.
        """
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
        """Return one line with counts, speed, waiting, and the largest share of worker time."""
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
            for number, what in (
                (self.retries, "retries"),
                (self.skipped, "samples skipped"),
                (self.in_flight, "batches in flight"),
            )
            if number
        ]
        return f"<{'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return the statistics as an HTML table for Jupyter."""
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
    """Counters from which the statistics of one epoch are computed.

    Attributes:
        retries: Batches that dpex resent.
        skipped: Samples that were left out.
        in_flight: Batches requested and not delivered yet.
        published: Statistics that were last published as Ray metrics.
    """

    def __init__(self) -> None:
        self._began = self._left = time.perf_counter()
        self._waiting_s = 0.0
        self._first_batch_s: float | None = None
        self._batches = 0
        self._epoch: EpochProgress | None = None
        self._uncounted_samples = 0
        self._costs = Costs()
        self._size_bytes = 0
        self._transfer_s = 0.0
        self._decode_s = 0.0
        self.retries = 0
        self.skipped = 0
        self.in_flight = 0
        self.published = LoaderStats()

    def count_samples_of(self, epoch: EpochProgress) -> None:
        """Count the samples that an epoch delivers from now on."""
        self._epoch = epoch
        self._uncounted_samples = epoch.samples_delivered

    @property
    @untraced
    def _samples(self) -> int:
        return 0 if self._epoch is None else self._epoch.samples_delivered - self._uncounted_samples

    @contextlib.contextmanager
    @untraced_alone
    def asked(self, *, for_batch: bool = True) -> Iterator[None]:
        """Count the time inside the context as waiting time of the training loop.

        Args:
            for_batch: Whether to count a batch if the context ends without an exception.
        """
        entered = time.perf_counter()
        samples = self._samples
        try:
            yield
            if for_batch:
                self._batches += 1
        except StopIteration:
            self.in_flight = 0  # torch's workers never make the last requests for a stream
            raise
        except BaseException:
            self._uncounted_samples += self._samples - samples
            raise
        finally:
            self._left = time.perf_counter()
            self._waiting_s += self._left - entered
            if self._batches and self._first_batch_s is None:
                self._first_batch_s = self._left - self._began

    def arrived(self, costs: Costs, *, size_bytes: int, transfer_s: float, decode_s: float) -> None:
        """Add the costs of a received block."""
        self._costs.add(costs)
        self._size_bytes += size_bytes
        self._transfer_s += transfer_s
        self._decode_s += decode_s

    def stats(self) -> LoaderStats:
        """Return the statistics up to now."""
        costs = self._costs
        return LoaderStats(
            seconds=self._left - self._began,
            waiting_s=self._waiting_s,
            first_batch_s=self._first_batch_s,
            batches=self._batches,
            samples=self._samples,
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
