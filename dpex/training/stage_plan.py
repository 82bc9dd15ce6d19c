"""A loader's work, divided into what each stage does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex.transforms.mapped import CollateAndTransform, MappedDataset, stages_inside
from dpex.worker.later_stage import StageJob
from dpex.worker.map_style import Job

if TYPE_CHECKING:
    from dpex.transforms.stage import Stage

__all__ = ["StagePlan", "divide"]


@dataclass(frozen=True)
class StagePlan:
    """A stage after the one that reads.

    Attributes:
        job: What its workers do.
        stage: What it asks of the cluster.
    """

    job: StageJob
    stage: Stage


def divide(
    dataset: Any,
    collate_fn: Callable[[Any], Any],
    worker_init_fn: Callable[[int], None] | None,
    *,
    auto_collation: bool,
    skips_errors: bool,
    drop_last: bool,
) -> tuple[Job, list[StagePlan]]:
    """Divide a loader's work at the stages of its dataset, if it has any.

    Samples become a batch in the last stage that gets samples.

    Raises:
        ValueError: A stage that asks for a GPU, or for resources, is in a dataset inside of another
            one, where it would run with what reads.
    """
    for stage in stages_inside(dataset):
        if stage.num_gpus or stage.resources:
            raise ValueError(
                f"{stage!r} asks for what it would not get: its MappedDataset is inside of a "
                f"{type(dataset).__name__}. Let the MappedDataset be the outermost: "
                "MappedDataset(Subset(source, indices), chain)"
            )
    parts = dataset.parts if isinstance(dataset, MappedDataset) else []
    collating = sum(not part.batched for part in parts[1:])
    if parts[1:] and isinstance(collate_fn, CollateAndTransform):
        collate_fn = collate_fn.collate_fn
    first = Job(
        dataset=dataset.first_part() if parts[1:] else dataset,
        collate_fn=None if collating else collate_fn,
        worker_init_fn=worker_init_fn,
        auto_collation=auto_collation,
        finishes=not parts[1:],
        skips_errors=skips_errors,
        drop_last=drop_last,
    )
    later = [
        StagePlan(
            StageJob(
                transform=part.chain,
                batched=part.batched,
                collate_fn=collate_fn if number == collating else None,
                auto_collation=auto_collation,
                finishes=number == len(parts) - 1,
                skips_errors=skips_errors,
            ),
            part.stage,
        )
        for number, part in enumerate(parts)
        if part.stage is not None
    ]
    return first, later
