"""Division of a loader's work into stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpex.transforms.mapped import CollateAndTransform, MappedDataset, stages_inside
from dpex.worker.later_stage import StageJob
from dpex.worker.map_style import Job

if TYPE_CHECKING:
    from dpex.transforms.stage import Stage

__all__ = ["divide"]


def divide(
    dataset: Any,
    collate_fn: Callable[[Any], Any],
    worker_init_fn: Callable[[int], None] | None,
    *,
    auto_collation: bool,
    skips_errors: bool,
    drop_last: bool,
) -> tuple[Job, list[tuple[Stage, StageJob]]]:
    """Divide a loader's work at the stages of its dataset, if the dataset has stages.

    The last stage that receives single samples collates them into a batch.

    Returns:
        The job of the first stage, which reads samples; and the later stages, each with its job.

    Raises:
        ValueError: A stage requests a GPU, resources or labels, but its ``MappedDataset`` is inside
            another dataset. There it would run as part of the first stage, which reads samples.
    """
    for stage in stages_inside(dataset):
        if stage.needs_ray:
            raise ValueError(
                f"{stage!r} cannot run inside a {type(dataset).__name__}, where it would get no "
                "GPU and no resources, and could not choose its node. Make its MappedDataset the "
                "outermost dataset: MappedDataset(Subset(source, indices), chain)"
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
        (
            part.stage,
            StageJob(
                transform=part.chain,
                batched=part.batched,
                collate_fn=collate_fn if number == collating else None,
                auto_collation=auto_collation,
                finishes=number == len(parts) - 1,
                skips_errors=skips_errors,
            ),
        )
        for number, part in enumerate(parts)
        if part.stage is not None
    ]
    return first, later
