"""The later stages: what a worker does to batches that come from the stage before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dpex.fetch import Unfinished, collate
from dpex.frame import Entry
from dpex.pickling import dump, load
from dpex.seeding import sample_seed, seed_generators, stage_key, stream_key
from dpex.worker import (
    At,
    Cancelled,
    Copy,
    copy_of,
    leave_worker,
    settle_process,
    show_worker,
    wrap_error,
)

__all__ = ["StageJob", "apply_stage"]


@dataclass(frozen=True)
class StageJob:
    """What every worker of a later stage needs.

    Attributes:
        transform: What it does to a sample, or to a batch.
        batched: Whether it gets batches.
        collate_fn: Makes a batch when the stage has done with its samples; None where the stage
            before or after does.
        auto_collation: Whether a batch's samples come in a list.
        finishes: Whether there is no later stage.
    """

    transform: Callable[[Any], Any]
    batched: bool
    collate_fn: Callable[[Any], Any] | None
    auto_collation: bool
    finishes: bool


def apply_stage(
    stage: int,
    entries: Sequence[Entry],
    read_job: Callable[[], StageJob],
    where: str,
    cancelled: Callable[[], bool],
    *,
    kept: bool = False,
) -> Iterator[Entry]:
    """Do a stage's part of the batches of one block.

    Args:
        stage: The stage's number; 0 is the one that fetches.
        entries: Each an ``Unfinished``, or the error in its place, which is passed on.
        read_job: Makes one more copy of the ``StageJob``, which nobody else has.
        where: Node and process, for error messages.
        cancelled: Asked between samples; once it says so, nothing more is made.
        kept: Whether this process's copy of the stage serves all iterations, whatever torch's
            workers would do: what it has put on a GPU stays there.

    Yields:
        The batch, or the error in its place.
    """
    for entry in entries:
        content = entry.value
        if entry.failed:
            yield entry
            continue
        at = At("indices", None)
        worker_id = 0
        try:
            came: Unfinished = load(content)
            run = came.run
            settle_process(run)
            worker_id = entry.batch % run.num_workers
            at.value = came.indices
            generation, oldest = (0, 0) if kept else (run.generation, run.oldest_generation)
            slot = (f"{run.loader}/{stage}", generation, -1)
            copy = copy_of(slot, read_job, oldest, 0)
            show_worker(worker_id, run, None)
            key = stage_key(stream_key(run.base_seed, run.epoch), stage)
            value = _apply(copy, came, functools.partial(load, content), key, cancelled, at)
            if kept:
                value = tree_map_only(torch.Tensor, torch.Tensor.cpu, value)
            if not copy.job.finishes:
                value = Unfinished(run, came.indices, came.position, value)
            done = Entry(entry.batch, dump(value, "batch"), failed=False)
        except Cancelled:
            return
        except (Exception, SystemExit):
            place_of_error = f"dataset {at}, batch {entry.batch}, stage {stage}, {where}"
            error = wrap_error(f"in DataLoader worker process {worker_id} ({place_of_error})")
            done = Entry(entry.batch, error, failed=True)
        finally:
            leave_worker()
        yield done
        if cancelled():
            return


def _apply(
    copy: Copy[StageJob],
    came: Unfinished,
    load_again: Callable[[], Unfinished],
    key: int,
    cancelled: Callable[[], bool],
    at: At,
) -> Any:
    """Transform a batch or its samples, each seeded.

    Args:
        copy: The stage.
        came: The batch.
        load_again: Makes it anew: what was transformed once may have been changed.
        key: Key of the stage's seeds in this epoch.
        cancelled: Asked between samples.
        at: Kept at the index being worked on, for error messages.
    """
    job = copy.job
    if job.batched or not job.auto_collation:
        seed_generators(sample_seed(key, came.position))
        return collate(job.collate_fn, job.transform(came.value))
    indices = list(came.indices)
    untouched = [came]

    def attempt(before_sample: Callable[[int], None]) -> Any:
        samples = (untouched.pop() if untouched else load_again()).value
        at.set("index", None)
        for place, sample in enumerate(samples):
            at.value = indices[place]
            before_sample(place)
            samples[place] = job.transform(sample)
            if cancelled():
                raise Cancelled
        at.set("indices", came.indices)
        return collate(job.collate_fn, samples)

    return copy.habits.reproducibly(key, came.position, attempt)
