"""The first stage for an ``IterableDataset``: every logical worker reads its own stream.

A stream lives in one process and only moves forward. A chunk names the batches of a stream by
number. A process that does not have the stream, or has read past those batches, restarts the stream
and reads up to them. So a chunk has the same batches in every process.

If the dataset or its iterator has a ``state_dict()``, every batch carries the state after it. A
resumed epoch starts from such a state. The replacement of a dead worker process rereads the stream
instead, because a state may be inexact: shuffled streams often omit their buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dpex.compat.torch_names import IterableDatasetFetcher
from dpex.protocol.chunks import Chunk, Entry, Run
from dpex.wire.timings import Costs, count, noted
from dpex.worker.dataset_copies import Copy, Slot, copy_of, find_copy, forget_copy, keep_copy
from dpex.worker.logical_worker import (
    Cancelled,
    initialise,
    leave_worker,
    settle_process,
    show_worker,
)
from dpex.worker.map_style import Job, collate, encode
from dpex.worker.sample_errors import wrap_error
from dpex.worker.seeding import Habits, global_states, set_global_states, stream_key
from dpex.worker.stateful import StreamState
from dpex.worker.training_settings import gradients

__all__ = ["stream_chunk"]


class _Stream:
    """The batches that one logical worker reads in one epoch.

    Attributes:
        dataset: The logical worker's copy of the dataset.
        epoch: Number and ``base_seed`` of the epoch.
        made: Number of batches that have been read in the epoch.
        is_fresh: Whether the stream started at its beginning, and not from a state.
        owns_generator: Whether torch's generator belongs to the logical worker because its
            ``worker_init_fn`` seeded it or drew from it.
        generators: States of the global generators after the last chunk, to restore before the
            next chunk.

    Args:
        copy: The logical worker's copy of the dataset.
        epoch: Number and ``base_seed`` of the epoch.
        others: Copies to read in turn as long as no copy has yielded a batch.
    """

    def __init__(
        self,
        copy: Copy[Job],
        epoch: tuple[int, int],
        others: Iterator[Copy[Job]] | None = None,
    ) -> None:
        self.epoch = epoch
        self.made = 0
        self.is_fresh = True
        self.generators: Sequence[Any] | None = None
        self._others = others or iter(())
        self._end_told = False
        self._open(copy)

    def _open(self, copy: Copy[Job]) -> None:
        job = copy.job
        self.dataset = job.dataset
        self.owns_generator = copy.generators.owns_torchs
        self._fetcher = IterableDatasetFetcher(
            job.dataset,
            job.auto_collation,
            functools.partial(_collate, job.collate_fn),
            job.drop_last,
        )

    def read(self, request: Any) -> Any:
        """Return the next batch.

        Args:
            request: A list with one entry for each sample to read; None without batching.

        Raises:
            StopIteration: The stream has ended.
        """
        self.made += 1
        while True:
            try:
                batch = self._fetcher.fetch(request)
            except StopIteration:
                copy = next(self._others, None) if self.made == 1 else None
                if copy is None:
                    raise
                self._open(copy)
            else:
                self._others = iter(())
                return batch

    def comes_to(self, chunk: Chunk) -> bool:
        """Return whether this stream can read forward to a chunk, without a restart."""
        begin = chunk.begin[0] if chunk.begin else 0
        return begin <= self.made <= chunk.first_batch // chunk.run.num_workers

    @property
    def state(self) -> bytes | None:
        """The packed state of the stream, or None if it has no state."""
        return StreamState.of(self._fetcher, self.made)

    def state_at_end(self) -> bytes | None:
        """Return the state of the ended stream on the first call, and None on later calls."""
        if self._end_told:
            return None
        self._end_told = True  # before state_dict(), so that an error of it is raised only once
        return self.state

    @property
    def over_state(self) -> StreamState | None:
        """The state from which the dataset starts the next epoch.

        None if this epoch has not ended, or if the stream has no state.
        """
        state = self.state if self._end_told else None
        return None if state is None else StreamState.unpacked(state).at_end_of_epoch()

    def stand_at(self, state: StreamState) -> None:
        """Resume from a state, of which the dataset has loaded its part already."""
        state.give_iterator(self._fetcher)
        state.generators.give_global()
        self.made = state.batches
        self.is_fresh = False


class _NeverBegun(_Stream):
    """A stream that failed to start, and therefore has ended, as in torch."""

    def __init__(self, epoch: tuple[int, int]) -> None:
        self.dataset = None
        self.epoch = epoch
        self.made = 0
        self.is_fresh = False
        self.owns_generator = False
        self.generators = None

    state = over_state = None

    def state_at_end(self) -> None:
        """Return None: there is no state."""

    def comes_to(self, chunk: Chunk) -> bool:
        """Return True: the stream is not restarted."""
        return True

    def read(self, request: Any) -> Any:
        """Raise ``StopIteration``."""
        raise StopIteration


def stream_chunk(
    chunk: Chunk,
    read_job: Callable[[], Job],
    where: str,
    cancelled: Callable[[], bool],
) -> Iterator[tuple[Entry, Costs]]:
    """Read the batches of one chunk of a stream.

    Args:
        chunk: The chunk.
        read_job: Function that returns a new copy of the ``Job``, which nothing else uses.
        where: Node and process, for error messages.
        cancelled: Called between batches; when it returns True, reading stops.

    Yields:
        An entry and its costs. The entry is a batch, the error in its place, or the end of the
        stream. No entry follows the end.

    Source:
        torch's ``_worker_loop`` with an ``IterableDataset``.
    """
    run = chunk.run
    worker_id = chunk.worker
    settle_process(run)
    slot = (run.loader, run.dataset_version, worker_id)
    epoch = (run.epoch, run.base_seed)
    stream = _stream_in(slot)
    if stream is not None and not (stream.epoch == epoch and stream.comes_to(chunk)):
        stream = None
    if stream is not None and stream.generators is not None:
        set_global_states(stream.generators)
    try:
        for number, request in zip(chunk.numbers, chunk.batches, strict=True):
            with noted() as costs, gradients(run.settings):
                try:
                    if stream is None:
                        stream = _begin(slot, run, read_job, chunk.begin)
                    show_worker(
                        worker_id, run, stream.dataset, owns_generator=stream.owns_generator
                    )
                    entry = _read(number, stream, run, request, cancelled, costs)
                except Cancelled:
                    return
                except KeyboardInterrupt:  # Ray has cancelled the task
                    raise
                except BaseException:
                    if stream is None:
                        stream = _NeverBegun(epoch)
                        keep_copy(slot, Copy(None, "", Habits(), stream=stream))
                    place = f"batch {number // run.num_workers} of its stream, {where}"
                    entry = Entry(number, wrap_error(worker_id, place), "error")
                finally:
                    leave_worker()
            costs.settle()
            yield entry, costs
            if entry.outcome == "end" or cancelled():
                return
    finally:
        if stream is not None:
            stream.generators = global_states()


def _read(
    number: int,
    stream: _Stream,
    run: Run,
    request: Any,
    cancelled: Callable[[], bool],
    costs: Costs,
) -> Entry:
    """Return the entry of one batch, or of the stream's end."""
    try:
        _read_up_to(number // run.num_workers, stream, request, cancelled)
        before = costs.samples  # samples of the batches that were read only to skip them
        value = encode(stream.read(request))
    except StopIteration:
        return Entry(number, encode(None), "end", state=stream.state_at_end())
    return Entry(number, value, samples=costs.samples - before, state=stream.state)


def _read_up_to(place: int, stream: _Stream, request: Any, cancelled: Callable[[], bool]) -> None:
    """Read a stream up to the batch at ``place``, and drop the batches before it."""
    while stream.made < place:
        if cancelled():
            raise Cancelled
        try:
            stream.read(request)
        except (StopIteration, KeyboardInterrupt):
            raise
        except BaseException:  # the error was delivered in place of this batch
            continue


def _stream_in(slot: Slot) -> _Stream | None:
    copy = find_copy(slot)
    return None if copy is None else copy.stream


def _begin(
    slot: Slot, run: Run, read_job: Callable[[], Job], begin: tuple[int, bytes] | None
) -> _Stream:
    """Start a logical worker's stream of an epoch, or resume it from a state.

    In the first epoch the stream draws the same random numbers as torch's worker. In later epochs
    torch's persistent workers do not reseed their generators. dpex seeds each epoch, so that a
    restarted stream is the same in another process. Generators that ``worker_init_fn`` seeded or
    drew from keep their states.

    A dataset that has loaded a state may start every later epoch from that state. So after such an
    epoch the process makes a new copy and loads the state of the epoch's end into it. Some datasets
    then start the next epoch. Some yield nothing at first, and start it in their second pass. If
    the second pass yields nothing either, a copy without a state replaces the dataset.
    """
    before = _stream_in(slot)
    if before is not None and before.epoch != (run.epoch - 1, run.base_seed):
        before = None
    state = StreamState.unpacked(begin[1]) if begin else None
    if before is not None and not before.is_fresh:
        state, before = before.over_state, None
    if before is None:
        copy = _new_copy(slot, run, read_job)
    else:
        copy = copy_of(slot, read_job)
        _seed(copy, run, slot[2], None)
        if before.generators is not None:
            copy.generators.restore(before.generators)
    epoch = (run.epoch, run.base_seed)
    if state is None:
        stream = _Stream(copy, epoch)
    else:
        state.give_dataset(copy.job.dataset)
        others = _others(copy, slot, run, read_job) if state.epoch_over else None
        stream = _Stream(copy, epoch, others)
        if not state.epoch_over:
            stream.stand_at(state)
    copy.stream = stream
    return stream


def _others(
    copy: Copy[Job], slot: Slot, run: Run, read_job: Callable[[], Job]
) -> Iterator[Copy[Job]]:
    """Yield the copies to read if a copy with the state of an epoch's end yields nothing."""
    yield copy
    new = _new_copy(slot, run, read_job)
    new.stream = copy.stream
    yield new


def _new_copy(slot: Slot, run: Run, read_job: Callable[[], Job]) -> Copy[Job]:
    forget_copy(slot)
    copy = copy_of(slot, read_job)
    _seed(copy, run, slot[2], copy.job.worker_init_fn)
    return copy


def _seed(copy: Copy[Job], run: Run, worker_id: int, init_fn: Callable[[int], None] | None) -> None:
    show_worker(worker_id, run, copy.job.dataset)
    base_seed = stream_key(run.base_seed, run.epoch) >> 2 if run.epoch else run.base_seed
    initialise(worker_id, base_seed, init_fn, copy.generators)


def _collate(collate_fn: Callable[[Any], Any] | None, samples: Any) -> Any:
    count("samples", len(samples) if isinstance(samples, list) else 1)
    return collate(collate_fn, samples)
