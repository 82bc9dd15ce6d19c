"""The jobs of a loader, which its worker processes do in an iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from dpex.transforms.stage import Stage
    from dpex.wire.pickling import Pickled
    from dpex.worker.later_stage import StageJob
    from dpex.worker.map_style import Job

__all__ = ["LoaderJobs", "PickleJob"]

PickleJob = Callable[["Job | StageJob", bool], "Pickled"]
"""Pickles a job. The second argument: whether all worker processes run on this machine."""


@dataclass(frozen=True)
class LoaderJobs:
    """What an iteration asks of the worker processes.

    Attributes:
        job: The job of the first stage.
        later: The later stages, each with its job.
        stream: Whether the dataset is an ``IterableDataset``.
        context: The loader's ``multiprocessing_context``.
    """

    job: Job
    later: Sequence[tuple[Stage, StageJob]]
    stream: bool
    context: BaseContext
