"""The Ray Dataset of a pipeline: one source block per lease, one ``map_batches`` per stage."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from dpex.carriers.ray.tasks_or_actors import actor_pool, scale_by_leases, task_pool
from dpex.carriers.ray.worker_options import NODE_LABEL
from dpex.compat.executor import POLICIES, limit_to_concurrency
from dpex.protocol.binding import Binding
from dpex.wire.local_modules import sources
from dpex.worker.task import (
    MakeBatches,
    StartTasks,
    TransformBatches,
    lease_block,
    make_batches,
    start_tasks,
    transform_batches,
)

if TYPE_CHECKING:
    import ray.data

    from dpex.wire.pickling import Pickled

__all__ = ["LaterStage", "PipelineSpec", "build", "store_job"]

# By default, Ray Data requests as much memory for a task as the output of earlier tasks took. An
# autoscaler starts no node for such a task if its configuration omits the memory of a node.
_NO_MEMORY = {"memory": 0}


@dataclass(frozen=True)
class LaterStage:
    """A later stage, as the pipeline actor builds it.

    Attributes:
        job: Reference to the pickled ``StageJob``, as in ``PipelineSpec``.
        job_key: Digest of the job's bytes.
        options: Ray options of one worker process.
        most_workers: Maximum number of worker processes at work.
        capped: Whether the user has set this maximum.
        keeps_processes: Whether the worker processes are actors, which outlive a block.
    """

    job: list[ray.ObjectRef]
    job_key: str
    options: dict[str, Any]
    most_workers: int
    capped: bool
    keeps_processes: bool


@dataclass(frozen=True)
class PipelineSpec:
    """The specification of a pipeline, from which ``build`` makes its Ray Datasets.

    Attributes:
        job: Reference to what ``store_job`` has stored: the pickled ``Job``, and what it needs.
            A list holds it, so that Ray does not resolve it.
        job_key: Digest of the job's bytes.
        actor_name: Name of the pipeline actor that the tasks call.
        pipeline_key: Key of the pipeline that the tasks belong to.
        claims_cpus: Whether other Ray tasks may wait for the CPUs of these tasks.
        num_workers: Number of logical workers.
        binding: Initial binding of logical workers to processes.
        persistent: Whether logical workers outlive an iteration.
        options: Ray options of one worker process.
        later: The stages after the first stage.
        reader: ``machine()`` of the training process, if it can read segments; else empty.
        in_actors: Whether worker processes are actors of Ray Data; see ``tasks_or_actors.py``.
    """

    job: list[ray.ObjectRef]
    job_key: str
    actor_name: str
    pipeline_key: str = ""
    claims_cpus: bool = False
    num_workers: int = 1
    binding: Binding = Binding.WATCHED
    persistent: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    later: tuple[LaterStage, ...] = ()
    reader: str = ""
    in_actors: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The digests of all jobs and the reader: pipelines with equal keys do the same work."""
        return (self.reader, self.job_key, *(stage.job_key for stage in self.later))


def build(spec: PipelineSpec, *, leases: int, further: bool, started: int) -> ray.data.Dataset:
    """Return a Dataset whose tasks make a pipeline's batches.

    The last stage delivers the batches to the pipeline actor and yields no rows, because Ray Data's
    executor polls only ten times a second.

    Args:
        spec: The pipeline.
        leases: Number of task leases that begin with the Dataset.
        further: Whether further leases follow. A stage before them yields a block whenever the
            pipeline actor wants a task.
        started: Number of tasks that the pipeline has started, with those of this Dataset.
    """
    import ray.data

    first_options = {**_NO_MEMORY, "num_cpus": 1, **spec.options}
    whose = {"actor_name": spec.actor_name, "pipeline_key": spec.pipeline_key}
    parts = [ray.data.from_blocks([lease_block() for _ in range(leases)])] if leases else []
    if further:
        starts = ray.data.from_blocks([lease_block()]).map_batches(
            **_worker(
                spec, start_tasks, StartTasks, {"started": started, **whose}, least=1, most=1
            ),
            batch_size=None,
            batch_format="pyarrow",
            # Ray Data would fuse stages that request equal resources into one task.
            num_cpus=0 if first_options["num_cpus"] else 0.001,
            **_on_this_node(),
            **_NO_MEMORY,
        )
        parts.append(starts)
    dataset = parts[0].union(*parts[1:]) if parts[1:] else parts[0]
    work = {
        "job": spec.job,
        "job_key": spec.job_key,
        "last": not spec.later,
        "reader": "" if spec.later else spec.reader,
        "persistent": spec.persistent,
        **whose,
    }
    # Ray Data ends the actors of a pool only after the pool's last input. So a pool of fixed size
    # has one input for each of its actors.
    least, most = (1, None) if further else (leases, leases)
    dataset = dataset.map_batches(
        **_worker(spec, make_batches, MakeBatches, work, least=least, most=most, capped=False),
        batch_size=None,
        batch_format="pyarrow",
        **first_options,
    )
    for number, stage in enumerate(spec.later, 1):
        last = number == len(spec.later)
        what = {
            "stage": number,
            "job": stage.job,
            "job_key": stage.job_key,
            "last": last,
            "reader": spec.reader if last else "",
            **whose,
        }
        dataset = _with_stage(dataset, spec, stage, what, first_options)
    _configure(dataset.context, has_later_stages=bool(spec.later))
    if spec.in_actors:
        scale_by_leases(dataset.context)
    return dataset


def _worker(
    spec: PipelineSpec,
    function: Callable[..., Any],
    actor: type,
    arguments: dict[str, Any],
    *,
    least: int,
    most: int | None,
    capped: bool = True,
) -> dict[str, Any]:
    """Return the arguments of ``map_batches`` that decide how Ray Data runs a stage.

    Args:
        spec: The pipeline.
        function: The stage's function, for tasks.
        actor: The class that calls the function, for actors.
        arguments: Keyword arguments of the function, apart from the block.
        least: Least number of actors.
        most: Most tasks or actors; None for no limit.
        capped: Whether the limit holds for tasks.
    """
    if spec.in_actors:
        compute = actor_pool(least=least, most=most)
        return {"fn": actor, "fn_constructor_kwargs": arguments, "compute": compute}
    compute = {"compute": task_pool(most)} if capped else {}
    return {"fn": function, "fn_kwargs": arguments, **compute}


def _with_stage(
    dataset: ray.data.Dataset,
    spec: PipelineSpec,
    stage: LaterStage,
    what: dict[str, Any],
    first_options: dict[str, Any],
) -> ray.data.Dataset:
    """Return a Dataset with a later stage appended.

    Args:
        dataset: The Dataset with the stages before it.
        spec: The pipeline.
        stage: The stage.
        what: Arguments of ``transform_batches``, apart from the block.
        first_options: Ray options of the first stage's tasks.
    """
    options = {**_NO_MEMORY, **stage.options}
    most = stage.most_workers
    if stage.keeps_processes:
        what = {**what, "kept": True}
        worker = _worker(
            replace(spec, in_actors=True),
            transform_batches,
            TransformBatches,
            what,
            least=most,
            most=most,
        )
    else:
        # Ray Data fuses a stage into the first stage's tasks if their options are equal and the
        # stage has no ``compute``.
        fused = not stage.capped and options == first_options
        worker = _worker(
            spec, transform_batches, TransformBatches, what, least=1, most=most, capped=not fused
        )
    return dataset.map_batches(
        **worker,
        # A block has one row. With GPUs, Ray Data requires a batch size.
        batch_size=1 if stage.keeps_processes else None,
        batch_format="pyarrow",
        **options,
    )


def _configure(context: ray.data.DataContext, *, has_later_stages: bool) -> None:
    """Set the options of Ray Data that concern the whole Dataset.

    Args:
        context: The Dataset's context.
        has_later_stages: Whether the Dataset has later stages.
    """
    # The training process puts the batches in order.
    context.execution_options.preserve_order = False
    # Each row that a task yields becomes a block at once.
    context.target_max_block_size = 1
    # The training process, not Ray Data, decides how many batches are in flight.
    if has_later_stages:
        limit_to_concurrency(context)
    else:
        context.set_config(POLICIES, [])
    # A training process that evaluates for an hour, and reads no batch, is not stuck.
    for name, value in (
        ("execution_no_progress_timeout_s", -1),
        ("memory_usage_poll_interval_s", None),
        ("enable_lineage_reconstruction_resource_accounting", False),
        ("enable_progress_bars", False),
        ("enable_operator_progress_bars", False),
        ("print_on_execution_start", False),
    ):
        if hasattr(context, name):
            setattr(context, name, value)
    if hasattr(context, "issue_detectors_config"):
        context.issue_detectors_config.detectors = []


def _on_this_node() -> dict[str, Any]:
    """Return options that place a task on the pipeline actor's node, if Ray labels nodes.

    On another node, the task would keep an autoscaler from removing that node.
    """
    here = ray.get_runtime_context().get_node_id()
    labels = next((n.get("Labels") or {} for n in ray.nodes() if n["NodeID"] == here), {})
    return {"label_selector": {NODE_LABEL: here}} if labels.get(NODE_LABEL) == here else {}


def store_job(pickled: Pickled, *, same_host: bool) -> ray.ObjectRef:
    """Put a pickled job into the object store, for the worker processes of all nodes.

    The modules that it refers to go along, as the search path and their sources. multiprocessing's
    authentication key goes along too, but never leaves this machine: a manager in the job's dataset
    accepts only clients that know it.

    Args:
        pickled: The job.
        same_host: Whether all nodes are on this machine.
    """
    search_path = [str(Path(path).resolve()) for path in sys.path]
    key = bytes(multiprocessing.current_process().authkey) if same_host else None
    content = (pickled.head, pickled.buffers, *pickled.slots, pickled.object_refs)
    return ray.put((search_path, sources(), key, *content))
