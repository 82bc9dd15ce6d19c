"""The first stage of a map-style dataset: torch's worker loop, one chunk at a time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Chunk, Entry, Part, PickledChunk, Run
from dpex.wire.pickling import Pickled, dump, dump_in_band
from dpex.wire.timings import Costs, count, noted, spent
from dpex.worker.batched_reads import reads_batches
from dpex.worker.collation import collated
from dpex.worker.dataset_copies import SHARED, Copy, copy_of, forget_copy, hand_over, keep_copy
from dpex.worker.logical_worker import (
    Cancelled,
    initialise,
    leave_worker,
    settle_process,
    show_worker,
)
from dpex.worker.sample_errors import At, wrap_error
from dpex.worker.seeding import sample_seed, seed_generators, seeds_offered, stream_key
from dpex.worker.skipped_samples import Failures, NothingLeft
from dpex.worker.state_watch import StateWatch
from dpex.worker.training_settings import gradients

__all__ = ["Job", "StageInput", "collate", "encode", "fetch_chunk", "pickled_chunks"]


@dataclass(frozen=True)
class Job:
    """The parts of a loader that every worker process needs.

    dpex pickles the job for every new iterator, and stores it again only if its bytes differ.

    Attributes:
        dataset: The dataset.
        collate_fn: Makes a batch from a list of samples; None if a later stage makes it.
        worker_init_fn: Called with the worker id before a logical worker's first sample.
        auto_collation: Whether indices come in lists (torch's automatic batching).
        finishes: Whether there is no later stage.
        skips_errors: Whether a sample that cannot be read is left out.
        drop_last: Whether a stream's incomplete last batch is left out.
        pickled_bytes: Size of the pickle stream, and of the stream with its buffers. Set only in
            worker processes.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    auto_collation: bool
    finishes: bool = True
    skips_errors: bool = False
    drop_last: bool = False
    pickled_bytes: tuple[int, int] = (0, 0)


def pickled_chunks(chunks: Sequence[Chunk], **how: bool) -> list[PickledChunk]:
    """Pickle chunks; ``how`` as in ``PickledChunk``.

    Raises:
        SerializationError: A chunk's indices cannot be pickled.
    """
    return [
        PickledChunk(dump_in_band(c, "chunk"), c.worker, Part(c.run.key, c.number), **how)
        for c in chunks
    ]


@dataclass(frozen=True)
class StageInput:
    """A batch on its way from one stage to the next.

    Attributes:
        run: The iteration that it belongs to.
        indices: Its dataset indices, as the sampler gave them.
        position: Position in the epoch of its first sample.
        value: A list of its samples, or the batch that ``collate_fn`` made of them.
        places: Places in the batch of the samples in ``value``; None if no sample was left out.
    """

    run: Run
    indices: Any
    position: int
    value: Any
    places: tuple[int, ...] | None = None


def fetch_chunk(
    chunk: Chunk,
    read_job: Callable[[], Job],
    where: str,
    cancelled: Callable[[], bool],
    *,
    binding: Binding = Binding.ALWAYS,
    restarted: bool = False,
    may_read_again: bool = False,
    nearly_made: Callable[[], object] | None = None,
    seen_unchanged: Callable[[bool], object] = lambda _: None,
) -> Iterator[tuple[Entry, Costs]]:
    """Make the batches of one chunk.

    Args:
        chunk: The chunk to make.
        read_job: Makes a new copy of the ``Job``, which nothing else refers to.
        where: Node and process, for error messages.
        cancelled: Called between samples; once it returns True, no more samples are made.
        binding: Which worker processes may make batches of the chunk's logical worker.
        restarted: Whether the logical worker starts again, because the task that it was bound to
            has ended.
        may_read_again: Whether a bound logical worker may read the samples of a batch again. If it
            keeps state, the state would change twice.
        nearly_made: Called between samples of the chunk's last batch, once the remaining samples
            should take only milliseconds. It may be called several times or never.
        seen_unchanged: Called after a batch if its copy was compared; gets whether the copy is
            unchanged.

    Yields:
        The batch, or the error in its place, and its costs. The value is a ``StageInput`` if a
        later stage finishes the batch.
    """
    run = chunk.run
    settle_process(run)
    key = stream_key(run.base_seed, run.epoch)
    worker_id = chunk.worker
    if restarted:
        forget_copy((run.loader, run.dataset_version, worker_id))
    # Otherwise no batch had changed the copy, so the restart has lost no state.
    loses_state = restarted and binding is Binding.ALWAYS
    for batch, indices, position in zip(chunk.numbers, chunk.batches, chunk.positions, strict=True):
        at = At("indices", indices)
        nearly = nearly_made if batch == chunk.numbers[-1] else None
        between = functools.partial(_between_samples, cancelled, nearly)
        copy = None
        with noted() as costs, gradients(run.settings):
            try:
                copy = _enter_worker(worker_id, run, read_job, binding)
                copy.restarted = copy.restarted or loses_state
                count("after_restart", int(binding is Binding.ALWAYS and copy.restarted))
                failures = Failures(left_out=copy.job.skips_errors)
                once = binding is Binding.ALWAYS and not may_read_again
                with copy.generators.at_work():
                    value = _fetch(copy, indices, key, position, between, at, failures, once=once)
                if not copy.job.finishes:
                    places = failures.places(enumerate(indices)) if failures.samples else None
                    value = StageInput(run, indices, position, value, places)
                entry = Entry(batch, encode(value), "batch", failures.samples)
            except NothingLeft:
                entry = Entry(batch, encode(None), "nothing", failures.samples)
            except Cancelled:
                return
            except KeyboardInterrupt:  # Ray has cancelled the task
                raise
            except BaseException:
                place = f"dataset {at}, batch {batch}, {where}"
                entry = Entry(batch, wrap_error(worker_id, place), "error")
            finally:
                leave_worker()
        costs.settle()
        if copy is not None and copy.watch is not None and _is_to_look(copy.watch, binding):
            unchanged = copy.watch.look()
            seen_unchanged(unchanged)
            if not unchanged:
                # The copy has changed: from here on it serves this logical worker and no other.
                keep_copy((run.loader, run.dataset_version, worker_id), copy)
                costs.late_changes += binding is Binding.RELEASED
                binding = Binding.ALWAYS
        yield entry, costs
        value = None
        del entry  # the consumer alone decides how long the batch stays in memory
        if cancelled():
            return


def _between_samples(
    cancelled: Callable[[], bool],
    nearly_made: Callable[[], object] | None,
    started: float,
    made: int,
    left: int,
) -> None:
    """End a batch that nothing waits for, or call ``nearly_made`` if the rest takes no time."""
    if cancelled():
        raise Cancelled
    if nearly_made is not None:
        per_sample_s = (time.monotonic() - started) / made
        if per_sample_s * left <= tuning.NEARLY_S:
            nearly_made()


def _enter_worker(
    worker_id: int, run: Run, read_job: Callable[[], Job], binding: Binding
) -> Copy[Job]:
    slot = (run.loader, run.dataset_version, worker_id if binding.bound else SHARED)
    hand_over(slot, watched=binding is Binding.WATCHED)
    copy = copy_of(slot, read_job)
    job = copy.job
    if copy.init_error is not None:
        raise copy.init_error.with_traceback(copy.init_traceback)
    if not copy.initialised:
        copy.initialised = True
        if binding is not Binding.ALWAYS:
            copy.watch = StateWatch(job.dataset, job.collate_fn, *job.pickled_bytes)
        if job.worker_init_fn is not None:
            show_worker(worker_id, run, job.dataset)
            try:
                initialise(worker_id, run.base_seed, job.worker_init_fn, copy.generators)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                copy.init_error, copy.init_traceback = error, error.__traceback__
                raise
    show_worker(worker_id, run, job.dataset, owns_generator=copy.generators.owns_torchs)
    return copy


def _is_to_look(watch: StateWatch, binding: Binding) -> bool:
    due = watch.made_batch()
    if binding is Binding.RELEASED:
        return watch.seen_unchanged and due
    return binding is Binding.WATCHED


def _fetch(
    copy: Copy[Job],
    indices: Any,
    key: int,
    position: int,
    between: Callable[[float, int, int], None],
    at: At,
    failures: Failures,
    *,
    once: bool,
) -> Any:
    """Fetch a batch as torch's ``_MapDatasetFetcher.fetch`` does, with a seed for each sample.

    Args:
        copy: The copy that has the dataset and ``collate_fn``.
        indices: The indices of one batch; a single index without automatic batching.
        key: Key of the epoch's seeds.
        position: Position of the first sample in the epoch.
        between: Called after each sample with the time of the batch's start, the number of samples
            that are made, and of those that are left.
        at: Updated to the index being read, for error messages.
        failures: Records the samples that fail, if they are to be left out.
        once: Whether no sample may be read twice.
    """
    job, dataset = copy.job, copy.job.dataset
    if not job.auto_collation:
        at.set("index", indices)
        seed_generators(sample_seed(key, position))
        try:
            sample = dataset[indices]
        except Exception as error:
            if failures.take(0, indices, error):
                raise NothingLeft from error
            raise
        return collate(job.collate_fn, sample)
    if reads_batches(dataset):
        samples = _read_at_once(dataset, indices, key, position, failures)
        at.set("indices", indices)
        return collate(job.collate_fn, failures.rest(samples))
    indices = list(indices)  # ``attempt`` may iterate over them twice

    def attempt(before_sample: Callable[[int], None]) -> Any:
        at.set("index", None)
        failures.forget()
        started = time.monotonic()
        samples = []
        for place, index in enumerate(indices):
            at.value = index
            before_sample(place)
            try:
                sample = dataset[index]
            except Exception as error:
                if not failures.take(place, index, error):
                    raise
            else:
                samples.append(sample)
            between(started, place + 1, len(indices) - place - 1)
        at.set("indices", indices)
        return collate(job.collate_fn, failures.rest(samples))

    return copy.habits.reproducibly(key, position, attempt, once=once)


def _read_at_once(
    dataset: Any, indices: Any, key: int, position: int, failures: Failures
) -> list[Any]:
    """Read a batch's samples in one call, or one by one if that fails and failures are left out."""
    seed_generators(sample_seed(key, position))
    try:
        with seeds_offered(key, position):
            samples: list[Any] = dataset.__getitems__(indices)
            return samples
    except Exception:
        if not failures.left_out:
            raise
    samples = []
    for place, index in enumerate(indices):
        seed_generators(sample_seed(key, position + place))
        try:
            with seeds_offered(key, position + place):
                samples += dataset.__getitems__([index])
        except Exception as error:
            failures.take(place, index, error)
    return samples


def collate(collate_fn: Callable[[Any], Any] | None, samples: Any) -> Any:
    """Collate samples as torch's worker does; without a ``collate_fn``, return the samples."""
    if collate_fn is None:
        return samples
    started = time.perf_counter()
    try:
        return collated(samples) if collate_fn is default_collate else collate_fn(samples)
    finally:
        spent("collate_s", started)


def encode(value: Any) -> Pickled:
    """Pickle a batch."""
    started = time.perf_counter()
    try:
        return dump(value, "batch")
    finally:
        spent("encode_s", started)
