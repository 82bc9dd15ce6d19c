"""The first stage: what torch's worker loop does, one chunk at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from dpex.wire.block_format import Entry
from dpex.wire.pickling import Pickled, dump
from dpex.wire.timings import Costs, count, noted, spent
from dpex.worker.batched_reads import reads_batches
from dpex.worker.binding import Binding
from dpex.worker.collate_memory import BatchMemory
from dpex.worker.dataset_copies import SHARED, Copy, copy_of, forget_copy, hand_over, keep_copy
from dpex.worker.logical_worker import (
    At,
    Cancelled,
    Run,
    initialise,
    leave_worker,
    settle_process,
    show_worker,
    wrap_error,
)
from dpex.worker.seeding import sample_seed, seed_generators, seeds_offered, stream_key
from dpex.worker.skipped_samples import Failures, NothingLeft
from dpex.worker.state_watch import StateWatch

__all__ = ["Chunk", "Job", "StageInput", "collate", "encode", "fetch_chunk"]

# An answer takes some milliseconds where all workers ask at once, and for no longer than this is a
# chunk to wait for a task that still makes another.
_NEARLY_S = 0.01


@dataclass(frozen=True)
class Job:
    """What every worker of a loader needs; pickled once, while its bytes stay the same.

    Attributes:
        dataset: The dataset.
        collate_fn: Makes a batch from a list of samples; None where a later stage does.
        worker_init_fn: Called with the worker id before a logical worker's first sample.
        auto_collation: Whether indices come in lists (torch's automatic batching).
        finishes: Whether there is no later stage.
        skips_errors: Whether a sample that cannot be read is left out.
        drop_last: Whether a stream's incomplete last batch is left out.
        pickled_bytes: In a worker: sizes of its pickle's stream, and of stream and buffers.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    auto_collation: bool
    finishes: bool = True
    skips_errors: bool = False
    drop_last: bool = False
    pickled_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Chunk:
    """Consecutive batches of one logical worker, made by one task.

    Attributes:
        run: The iteration that it belongs to.
        number: Its number in the iteration.
        first_batch: Number of its first batch in the epoch.
        batches: The indices of each batch, as the sampler gave them.
        positions: Place in the epoch of each batch's first sample.
        patient: Whether so much is in flight before it that its batches may come together.
        stream: Whether its batches are of an ``IterableDataset``.
        begin: What that stream goes on from in this epoch: how many batches, and the packed state.
    """

    run: Run
    number: int
    first_batch: int
    batches: Sequence[Any]
    positions: Sequence[int]
    patient: bool = False
    stream: bool = False
    begin: tuple[int, bytes] | None = None

    @property
    def stride(self) -> int:
        """How far its batches' numbers are apart."""
        return self.run.num_workers

    @property
    def numbers(self) -> range:
        """The numbers of its batches in the epoch."""
        end = self.first_batch + len(self.batches) * self.stride
        return range(self.first_batch, end, self.stride)

    @property
    def worker(self) -> int:
        """The logical worker whose batches they are."""
        return self.first_batch % self.run.num_workers


@dataclass(frozen=True)
class StageInput:
    """A batch on its way from one stage to the next.

    Attributes:
        run: The iteration that it belongs to.
        indices: Its dataset indices, as the sampler gave them.
        position: Place in the epoch of its first sample.
        value: Its samples in a list, or what ``collate_fn`` made of them.
        places: The samples' places in the batch, where some were left out.
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
    nearly_made: Callable[[], object] | None = None,
    seen_unchanged: Callable[[bool], object] = lambda _: None,
) -> Iterator[tuple[Entry, Costs]]:
    """Make the batches of one chunk.

    Args:
        chunk: What to make.
        read_job: Makes one more copy of the ``Job``, which nobody else has.
        where: Node and process, for error messages.
        cancelled: Asked between samples; once it says so, nothing more is made.
        binding: Whether the chunk's logical worker has a copy of its own here.
        restarted: Whether that worker begins again, since the task that it was bound to has ended.
        nearly_made: Called between samples of the last batch when the rest of them will take some
            milliseconds, most likely: more than once, or never.
        seen_unchanged: Called after a batch with whether its copy is as it was made, if that has
            been looked at.

    Yields:
        The batch, or the error in its place, and what it cost. A batch that a later stage finishes
        is an ``Unfinished``.
    """
    run = chunk.run
    settle_process(run)
    key = stream_key(run.base_seed, run.epoch)
    worker_id = chunk.worker
    if restarted:
        forget_copy((run.loader, run.generation, worker_id))
    for batch, indices, position in zip(chunk.numbers, chunk.batches, chunk.positions, strict=True):
        at = At("indices", indices)
        last = batch == chunk.numbers[-1]
        between = _BetweenSamples(cancelled, nearly_made if last else None)
        copy = None
        with noted() as costs, run.settings.gradients():
            try:
                copy = _enter_worker(worker_id, run, read_job, binding, restarted=restarted)
                failures = Failures(left_out=copy.job.skips_errors)
                once = binding is Binding.ALWAYS
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
            except (Exception, SystemExit):
                place_of_error = f"dataset {at}, batch {batch}, {where}"
                error = wrap_error(f"in DataLoader worker process {worker_id} ({place_of_error})")
                entry = Entry(batch, error, "error")
            finally:
                leave_worker()
        costs.settle()
        if copy is not None and copy.watch is not None and _is_to_look(copy.watch, binding):
            unchanged = copy.watch.look()
            seen_unchanged(unchanged)
            if not unchanged:
                # From here on the copy has the state of this worker, and of no other.
                keep_copy((run.loader, run.generation, worker_id), copy)
                costs.late_changes += binding is Binding.RELEASED
                binding = Binding.ALWAYS
        yield entry, costs
        value = None
        del entry  # whoever has it may let its memory go
        if cancelled():
            return


class _BetweenSamples:
    """What is to be done between a batch's samples.

    Args:
        cancelled: Asked each time.
        nearly_made: Called when few are left, if there is anybody to call.
    """

    def __init__(
        self, cancelled: Callable[[], bool], nearly_made: Callable[[], object] | None
    ) -> None:
        self._cancelled = cancelled
        self._nearly_made = nearly_made

    def begin(self, samples: int) -> None:
        """Note that the first of them is about to be read."""
        self._samples = samples
        self._began = time.monotonic()

    def made(self, samples: int) -> None:
        """Note how many have been read.

        Raises:
            Cancelled: Nobody wants the batch any more.
        """
        if self._cancelled():
            raise Cancelled
        if self._nearly_made is not None:
            per_sample_s = (time.monotonic() - self._began) / samples
            if per_sample_s * (self._samples - samples) <= _NEARLY_S:
                self._nearly_made()


def _enter_worker(
    worker_id: int, run: Run, read_job: Callable[[], Job], binding: Binding, *, restarted: bool
) -> Copy[Job]:
    slot = (run.loader, run.generation, worker_id if binding.bound else SHARED)
    hand_over(slot, watched=binding is Binding.WATCHED)
    copy = copy_of(slot, read_job)
    job = copy.job
    if copy.init_error is not None:
        raise copy.init_error.with_traceback(copy.init_traceback)
    if not copy.initialised:
        copy.initialised = True
        if binding is Binding.ALWAYS:
            copy.restarted = restarted
        else:  # there was no state to lose
            copy.watch = StateWatch(job.dataset, job.collate_fn, *job.pickled_bytes)
        if job.worker_init_fn is not None:
            show_worker(worker_id, run, job.dataset)
            try:
                initialise(worker_id, run.base_seed, job.worker_init_fn, copy.generators)
            except (Exception, SystemExit) as error:
                copy.init_error, copy.init_traceback = error, error.__traceback__
                raise
    show_worker(worker_id, run, job.dataset, owns_generator=copy.generators.owns_torchs)
    if binding is Binding.ALWAYS:
        count("after_restart", int(copy.restarted))
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
    between: _BetweenSamples,
    at: At,
    failures: Failures,
    *,
    once: bool,
) -> Any:
    """Do what torch's ``_MapDatasetFetcher.fetch`` does, each sample seeded.

    Args:
        copy: Dataset and collate_fn.
        indices: One batch of indices; a single index without automatic batching.
        key: Key of the epoch's seeds.
        position: Place of the first sample in the epoch.
        between: Called between samples.
        at: Kept at the index being read, for error messages.
        failures: Takes what fails, if that is to be left out.
        once: Whether to read no sample a second time.
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
    indices = list(indices)  # they may be read twice

    def attempt(before_sample: Callable[[int], None]) -> Any:
        at.set("index", None)
        failures.forget()
        between.begin(len(indices))
        memory = BatchMemory(job.collate_fn, len(indices))
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
                samples.append(memory.take(sample))
            between.made(place + 1)
        at.set("indices", indices)
        return collate(job.collate_fn, failures.rest(samples), memory)

    return copy.habits.reproducibly(key, position, attempt, once=once)


def _read_at_once(
    dataset: Any, indices: Any, key: int, position: int, failures: Failures
) -> list[Any]:
    """Read a batch's samples in one call; one by one if that fails and failures are left out."""
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


def collate(
    collate_fn: Callable[[Any], Any] | None, samples: Any, memory: BatchMemory | None = None
) -> Any:
    """Make a batch, where that is to be done here, as a worker of torch's would.

    Args:
        collate_fn: Makes it.
        samples: Of what.
        memory: What has taken each of them.
    """
    if collate_fn is None:
        return samples
    started = time.perf_counter()
    try:
        if collate_fn is default_collate:
            return (memory or BatchMemory(collate_fn, 0)).collate(samples)
        return collate_fn(samples)
    finally:
        spent("collate_s", started)


def encode(value: Any) -> Pickled:
    """Pickle a batch."""
    started = time.perf_counter()
    try:
        return dump(value, "batch")
    finally:
        spent("encode_s", started)
