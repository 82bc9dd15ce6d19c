"""The later stages, which transform the batches of the previous stage."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dpex.compat.torch_names import tree_map_only
from dpex.protocol.chunks import Entry
from dpex.wire.pickling import load
from dpex.wire.timings import Costs, noted, spent
from dpex.worker.dataset_copies import SHARED, Copy, copy_of
from dpex.worker.logical_worker import Cancelled, leave_worker, settle_process, show_worker
from dpex.worker.map_style import StageInput, collate, encode
from dpex.worker.sample_errors import At, wrap_error
from dpex.worker.seeding import sample_seed, seed_cuda, seed_generators, stage_key, stream_key
from dpex.worker.skipped_samples import Failures, NothingLeft
from dpex.worker.training_settings import gradients

__all__ = ["StageJob", "apply_stage"]


@dataclass(frozen=True)
class StageJob:
    """The job of a later stage, of which each of its worker processes has a copy.

    Attributes:
        transform: Function that transforms a sample or a batch.
        batched: Whether ``transform`` gets batches.
        collate_fn: Function that makes a batch of the transformed samples; None if an earlier or
            later stage collates.
        auto_collation: Whether a batch's samples come in a list.
        finishes: Whether this is the last stage.
        skips_errors: Whether a sample that cannot be transformed is skipped.
    """

    transform: Callable[[Any], Any]
    batched: bool
    collate_fn: Callable[[Any], Any] | None
    auto_collation: bool
    finishes: bool
    skips_errors: bool = False


def apply_stage(
    stage: int,
    entries: Sequence[Entry],
    read_job: Callable[[], StageJob],
    where: str,
    cancelled: Callable[[], bool],
    *,
    kept: bool = False,
) -> Iterator[tuple[Entry, Costs]]:
    """Apply a stage to the batches of one block.

    Args:
        stage: Number of the stage; the first stage, which reads the dataset, has number 0.
        entries: Entries with a pickled ``StageInput`` each. Other entries, such as errors, are
            yielded unchanged.
        read_job: Function that returns a new copy of the ``StageJob``, which nothing else uses.
        where: Node and process, for error messages.
        cancelled: Called between samples; when it returns True, the stage stops.
        kept: Whether this process's copy of the stage serves all iterations, unlike the copies of
            torch's workers. Objects that the copy has put on a GPU stay there, and CUDA's
            generators are seeded too.

    Yields:
        An entry with the batch, or with the error in its place, and the costs of this stage.
    """
    for entry in entries:
        content, left_out = entry.value, entry.left_out
        if entry.outcome != "batch":
            yield entry, Costs()
            continue
        at = At("indices", None)
        worker_id = 0
        with noted() as costs:
            try:
                started = time.perf_counter()
                came: StageInput = load(content)
                spent("encode_s", started)
                run = came.run
                settle_process(run)
                worker_id = entry.batch % run.num_workers
                at.value = came.indices
                slot = (f"{run.loader}/{stage}", 0 if kept else run.dataset_version, SHARED)
                copy = copy_of(slot, read_job)
                show_worker(worker_id, run, None)
                key = stage_key(stream_key(run.base_seed, run.epoch), stage)
                failures = Failures(left_out=copy.job.skips_errors)
                load_again = functools.partial(load, content)
                with gradients(run.settings):
                    value = _apply(
                        copy, came, load_again, key, cancelled, at, failures, on_gpu=kept
                    )
                if kept:
                    value = tree_map_only(torch.Tensor, _to_cpu, value)
                if not copy.job.finishes:
                    places = failures.places(_placed(came)) if failures.samples else came.places
                    value = replace(came, value=value, places=places)
                done = Entry(entry.batch, encode(value), "batch", left_out + failures.samples)
            except NothingLeft:
                done = Entry(entry.batch, encode(None), "nothing", left_out + failures.samples)
            except Cancelled:
                return
            except KeyboardInterrupt:  # Ray has cancelled the task
                raise
            except BaseException:
                place = f"dataset {at}, batch {entry.batch}, stage {stage}, {where}"
                done = Entry(entry.batch, wrap_error(worker_id, place), "error")
            finally:
                leave_worker()
        # The sizes of chunks depend on the times of the first stage alone.
        costs.seconds = costs.cpu_seconds = 0.0
        yield done, costs
        if cancelled():
            return


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu")  # cpu() would turn a torchvision TVTensor into a plain tensor


def _apply(
    copy: Copy[StageJob],
    came: StageInput,
    load_again: Callable[[], StageInput],
    key: int,
    cancelled: Callable[[], bool],
    at: At,
    failures: Failures,
    *,
    on_gpu: bool,
) -> Any:
    """Transform a batch or each of its samples, and seed the generators before each call.

    Args:
        copy: This process's copy of the stage.
        came: The batch.
        load_again: Function that unpickles the batch again, because the first attempt may have
            changed it.
        key: Key of the stage's seeds in this epoch.
        cancelled: Called between samples.
        at: Set to the index of the current sample, for error messages.
        failures: Records the samples that fail, if they are skipped.
        on_gpu: Whether CUDA's generators are seeded too.
    """
    job = copy.job
    if job.batched or not job.auto_collation:
        seed_generators(sample_seed(key, came.position))
        if on_gpu:
            seed_cuda(sample_seed(key, came.position))
        try:
            value = job.transform(came.value)
        except Exception as error:
            if not job.batched and failures.take(0, came.indices, error):
                raise NothingLeft from error
            raise
        return collate(job.collate_fn, value)
    untouched = [came]

    def attempt(before_sample: Callable[[int], None]) -> Any:
        samples = (untouched.pop() if untouched else load_again()).value
        at.set("index", None)
        failures.forget()
        placed = _placed(came)
        transformed = []
        for (place, index), sample in zip(placed, samples, strict=True):
            at.value = index
            before_sample(place)
            if on_gpu:
                seed_cuda(sample_seed(key, came.position + place))
            try:
                result = job.transform(sample)
            except Exception as error:
                if not failures.take(place, index, error):
                    raise
            else:
                transformed.append(result)
            if cancelled():
                raise Cancelled
        at.set("indices", came.indices)
        return collate(job.collate_fn, failures.rest(transformed))

    return copy.habits.reproducibly(key, came.position, attempt)


def _placed(came: StageInput) -> list[tuple[int, Any]]:
    """Return the place in the batch and the dataset index of each sample."""
    indices = list(came.indices)
    places = range(len(indices)) if came.places is None else came.places
    return [(place, indices[place]) for place in places]
