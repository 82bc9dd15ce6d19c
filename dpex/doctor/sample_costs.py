"""Costs of a loader's samples, measured alone in one worker process of torch."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dpex.compat.torch_names import WorkerInfo, set_worker_info
from dpex.doctor.facts import Problem
from dpex.doctor.fixed_part import FixedPart, RandomSample, fixed_part
from dpex.wire.timings import Costs, noted, spent
from dpex.worker.batched_reads import read_at_once, reads_batches

__all__ = ["SampleCosts", "measure"]

_MOST_BATCHES = 200
# Part of the time that is left for the search for a part that can be cached.
_FIXED_SHARE = 0.4
_END = object()


@dataclass(frozen=True)
class SampleCosts:
    """Mean costs of a sample, in seconds.

    Attributes:
        samples: Number of samples measured.
        wall_s: Time to make a sample and its part of the batch.
        cpu_s: CPU time of the worker process during ``wall_s``.
        queued_s: Part of ``wall_s`` in which the process was ready to run and had no core.
        read_s: Time in the dataset, without the transforms of a ``MappedDataset``.
        transform_s: Time in these transforms.
        collate_s: Time in ``collate_fn``.
        batch_samples: Mean number of samples in a batch.
        skipped: Number of samples that raised an exception, with ``on_error="skip"``.
        fixed: The part of a sample that is the same every time, if there is one.
    """

    samples: int
    wall_s: float
    cpu_s: float
    queued_s: float
    read_s: float
    transform_s: float
    collate_s: float
    batch_samples: float
    skipped: int
    fixed: FixedPart | RandomSample | None

    @property
    def busy_s(self) -> float:
        """Time to make a sample if the process always has a core."""
        return self.wall_s - self.queued_s

    @property
    def idle_s(self) -> float:
        """Time in which the worker process waits, for example for a disk or a network."""
        return max(0.0, self.busy_s - self.cpu_s)


def measure(loader: DataLoader[Any], *, budget_s: float) -> SampleCosts:
    """Measure samples in a new worker process, so that this process reads none.

    Args:
        loader: The loader. Its sampler gives the indices.
        budget_s: Seconds to measure for. The first batch has no time limit.

    Raises:
        Problem: A sample or ``collate_fn`` raises an exception, or there is no sample.
    """
    worker = DataLoader(
        _Probe(loader, budget_s),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=_begin,
    )
    [measured] = worker
    if isinstance(measured, Problem):
        raise measured
    assert isinstance(measured, SampleCosts)
    return measured


class _Probe(IterableDataset[SampleCosts | Problem]):
    """A stream of one item: the costs of the samples of a loader."""

    def __init__(self, loader: DataLoader[Any], budget_s: float) -> None:
        self.dataset = loader.dataset
        self.collate_fn = loader.collate_fn
        self.worker_init_fn = loader.worker_init_fn
        self.num_workers = max(1, loader.num_workers)
        self.batch_size = loader.batch_size
        self.batched = loader.batch_sampler is not None
        self.skips = getattr(loader, "on_error", "raise") == "skip"
        self.budget_s = budget_s
        self.indices: list[Any] = []
        if not isinstance(loader.dataset, IterableDataset):
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            self.indices = list(islice(sampler, _MOST_BATCHES))
        self.reading = "the first sample"
        self.skipped = 0

    def __iter__(self) -> Iterator[SampleCosts | Problem]:
        try:
            yield self._measured()
        except Exception as error:
            text = f"{self.reading} raises {type(error).__name__}: {error}"
            yield Problem(text, traceback.format_exc())

    def _measured(self) -> SampleCosts | Problem:
        started = time.perf_counter()
        batches: list[tuple[int, float, Costs]] = []
        reads = self._reads()
        while not batches or time.perf_counter() - started < (1 - _FIXED_SHARE) * self.budget_s:
            queued_before_s = _queued_s()
            with noted() as costs:
                read: Any = next(reads, _END)
                if read is _END:
                    break
                size = len(read) if self.batched else 1
                if size:  # otherwise every sample of the batch was skipped
                    self._collate(read)
            costs.settle()
            batches.append((size, _queued_s() - queued_before_s, costs))
        # The first batch also imports modules and opens files.
        counted = batches[1:] or batches
        samples = sum(size for size, _, _ in counted)
        if not samples:
            return Problem("the loader has no sample")
        total = Costs()
        for _, _, costs in counted:
            total.add(costs)
        queued_s = sum(queued_s for _, queued_s, _ in counted)
        return SampleCosts(
            samples=samples,
            wall_s=total.seconds / samples,
            cpu_s=min(total.cpu_seconds, total.seconds) / samples,
            queued_s=min(queued_s, total.seconds) / samples,
            read_s=total.read_s / samples,
            transform_s=total.transform_s / samples,
            collate_s=total.collate_s / samples,
            batch_samples=samples / len(counted),
            skipped=self.skipped,
            fixed=self._fixed_part(until=started + self.budget_s),
        )

    def _fixed_part(self, *, until: float) -> FixedPart | RandomSample | None:
        if isinstance(self.dataset, IterableDataset):
            return None
        # The last indices: their samples have most likely not been read yet.
        last = (i for at in reversed(self.indices) for i in (at if self.batched else [at]))
        return fixed_part(self.dataset, last, until=until)

    def _collate(self, read: Any) -> None:
        since = time.perf_counter()
        try:
            self.collate_fn(read)
        except Exception:
            self.reading = f"collate_fn, after {self.reading},"
            raise
        spent("collate_s", since)

    def _reads(self) -> Iterator[Any]:
        """Yield what ``collate_fn`` gets, batch by batch, as torch's worker reads it."""
        if isinstance(self.dataset, IterableDataset):
            self.reading = "the stream"
            stream = iter(self.dataset)
            if not self.batched:
                yield from stream
                return
            while batch := list(islice(stream, self.batch_size)):
                yield batch
        for at in self.indices:
            if not self.batched:
                yield from self._samples([at])
            elif reads_batches(self.dataset) and not self.skips:
                self.reading = f"the batch of samples {at!r:.60}"
                yield read_at_once(self.dataset, at)
            else:
                yield list(self._samples(at))

    def _samples(self, indices: list[Any]) -> Iterator[Any]:
        for index in indices:
            self.reading = f"sample {index!r}"
            try:
                yield self.dataset[index]
            except Exception:
                if not self.skips:
                    raise
                self.skipped += 1


def _begin(_: int) -> None:
    """Show the user's dataset to ``worker_init_fn`` and to the dataset, as torch's worker does."""
    info = get_worker_info()
    assert info is not None
    probe = info.dataset
    assert isinstance(probe, _Probe)
    seen = WorkerInfo(id=0, num_workers=probe.num_workers, seed=info.seed, dataset=probe.dataset)
    set_worker_info(seen)
    if probe.worker_init_fn is not None:
        probe.worker_init_fn(0)


def _queued_s() -> float:
    """Return for how long this process's main thread was ready to run and had no core.

    Source:
        ``/proc/self/schedstat``, whose second number is in nanoseconds. 0 if there is no such file.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
