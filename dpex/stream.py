"""The first stage for an ``IterableDataset``: every logical worker reads a stream of its own.

A stream can only go on where it stands, which is in one process. A chunk says which of a stream's
batches it is to have; a process that does not have the stream, or has it too far on, begins it anew
and reads up to there. So a chunk has the same batches whoever makes it.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from dpex.costs import Costs, count, noted
from dpex.fetch import Chunk, Job, collate, encode
from dpex.frame import Entry
from dpex.worker import (
    Cancelled,
    Copy,
    Run,
    copy_of,
    forget_copy,
    initialise,
    leave_worker,
    settle_process,
    show_worker,
    wrap_error,
)

__all__ = ["stream_chunk"]

# Streams that a process keeps: of a training and a validation loader, where it serves all workers.
_MAX_STREAMS = 128


class _Stream:
    """What one logical worker reads in one epoch.

    Attributes:
        copy: The worker's copy of the dataset.
        made: How many batches have been read.
    """

    def __init__(self, copy: Copy[Job]) -> None:
        job = copy.job
        self.copy = copy
        self.made = 0
        self._fetcher = _IterableDatasetFetcher(
            job.dataset,
            job.auto_collation,
            functools.partial(_collate, job.collate_fn),
            job.drop_last,
        )

    def read(self, request: Any) -> Any:
        """Return the next batch.

        Args:
            request: As many indices as it is to have samples; None without batching.

        Raises:
            StopIteration: There is none.
        """
        self.made += 1
        return self._fetcher.fetch(request)


_streams: OrderedDict[tuple[str, int, int, int], _Stream] = OrderedDict()
# What the global generators are about to draw in a worker that is at work in no chunk.
_generators: dict[tuple[str, int, int], tuple[Any, ...]] = {}


def stream_chunk(
    chunk: Chunk,
    read_job: Callable[[], Job],
    where: str,
    cancelled: Callable[[], bool],
) -> Iterator[tuple[Entry, Costs]]:
    """Read the batches of one chunk of a stream.

    Args:
        chunk: Which ones.
        read_job: Makes one more copy of the ``Job``, which nobody else has.
        where: Node and process, for error messages.
        cancelled: Asked between batches; once it says so, nothing more is read.

    Yields:
        The batch, the error in its place, or the stream's end, after which nothing comes; and what
        it cost.

    Source:
        torch's ``_worker_loop`` with an ``IterableDataset``.
    """
    run = chunk.run
    worker_id = chunk.first_batch % run.num_workers
    settle_process(run)
    slot = (run.loader, run.generation, worker_id)
    try:
        if slot in _generators:
            _set_generators(_generators[slot])
        for number, request in zip(chunk.numbers, chunk.batches, strict=True):
            with noted() as costs:
                try:
                    entry = _read(number, request, run, read_job, cancelled)
                except Cancelled:
                    return
                except StopIteration:
                    entry = Entry(number, encode(None), "end")
                except (Exception, SystemExit):
                    place = f"batch {number // run.num_workers} of its stream, {where}"
                    error = wrap_error(f"in DataLoader worker process {worker_id} ({place})")
                    entry = Entry(number, error, "error")
                finally:
                    leave_worker()
            costs.read_s = costs.seconds - costs.transform_s - costs.collate_s - costs.encode_s
            yield entry, costs
            if entry.outcome == "end" or cancelled():
                return
    finally:
        _generators[slot] = _get_generators()


def _read(
    number: int,
    request: Any,
    run: Run,
    read_job: Callable[[], Job],
    cancelled: Callable[[], bool],
) -> Entry:
    """Read one batch of a stream, after those before it if need be."""
    place, worker_id = divmod(number, run.num_workers)
    stream = _streams.get((run.loader, run.generation, run.epoch, worker_id))
    if stream is None or stream.made > place:
        stream = _begin(run, worker_id, read_job)
    show_worker(worker_id, run, stream.copy.job.dataset)
    while stream.made < place:
        if cancelled():
            raise Cancelled
        try:
            stream.read(request)
        except StopIteration:
            raise
        except Exception:
            continue
    return Entry(number, encode(stream.read(request)))


def _begin(run: Run, worker_id: int, read_job: Callable[[], Job]) -> _Stream:
    """Begin a worker's stream of an epoch, as torch's worker does when it starts, or resumes."""
    slot = (run.loader, run.generation, worker_id)
    goes_on = (*slot[:2], run.epoch - 1, worker_id) in _streams
    for key in [key for key in _streams if key[0] == run.loader and key[1:3] != _epoch(run)]:
        if key[3] == worker_id or key[1] < run.oldest_generation:
            del _streams[key]
    if not goes_on:
        forget_copy(slot)
    copy = copy_of(slot, read_job, run.oldest_generation, 2 * run.num_workers)
    show_worker(worker_id, run, copy.job.dataset)
    if not goes_on:
        initialise(worker_id, run, copy.job.worker_init_fn or _do_nothing)
    stream = _streams[run.loader, run.generation, run.epoch, worker_id] = _Stream(copy)
    while len(_streams) > _MAX_STREAMS:
        _streams.popitem(last=False)
    for old in [old for old in _generators if old[0] == run.loader and old[1] != run.generation]:
        if old[1] < run.oldest_generation:
            del _generators[old]
    return stream


def _epoch(run: Run) -> tuple[int, int]:
    return run.generation, run.epoch


def _do_nothing(_: int) -> None:
    pass


def _collate(collate_fn: Callable[[Any], Any] | None, samples: Any) -> Any:
    count("samples", len(samples) if isinstance(samples, list) else 1)
    return collate(collate_fn, samples)


def _get_generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generators(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
