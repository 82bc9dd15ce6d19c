"""The Ray Dataset of a pipeline: one source block for each task, and a ``map_batches`` a stage."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from dpex.compat.executor import limit_to_concurrency
from dpex.worker.binding import Binding
from dpex.worker.task import (
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

# Ray Data's setting of what holds tasks back. If it has another name, tasks start later.
_POLICIES = "backpressure_policies.enabled"
# The label that Ray gives each node.
_NODE = "ray.io/node-id"
# Ray Data lets tasks ask for the memory that their output took so far. An autoscaler starts no node
# for such a task where its configuration does not say how much memory a node has.
_NO_MEMORY = {"memory": 0}


@dataclass(frozen=True)
class LaterStage:
    """A stage after the one that reads, as the pipeline actor builds it.

    Attributes:
        job: Reference to the pickled ``StageJob``, as in ``PipelineSpec``.
        job_key: Digest of its bytes.
        options: Ray options of one worker.
        most_workers: How many work at once.
        capped: Whether the user has said how many.
        keeps_processes: Whether its workers keep their processes.
    """

    job: list[ray.ObjectRef]
    job_key: str
    options: dict[str, Any]
    most_workers: int
    capped: bool
    keeps_processes: bool


@dataclass(frozen=True)
class PipelineSpec:
    """What a loader's Ray Dataset is made from.

    Attributes:
        job: Reference to the driver's ``sys.path`` and the parts of the pickled ``Job``, in a
            list so that Ray does not resolve it; empty where workers inherit the job.
        job_key: Digest of the job's bytes.
        actor_name: Name of the pipeline actor, asked whether a chunk is still wanted.
        pipeline_key: The pipeline that its tasks belong to.
        claims_cpus: Whether its tasks share the CPUs with others'.
        num_workers: How many logical workers there are.
        binding: Whether they are bound to processes, to begin with.
        persistent: Whether they outlive an iteration.
        options: Ray options of one worker.
        later: The stages after the first one.
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

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from a pipeline that does something else."""
        return (self.job_key, *(stage.job_key for stage in self.later))


def build(spec: PipelineSpec, *, first: bool, further: bool) -> ray.data.Dataset:
    """Return a Dataset whose tasks make a pipeline's batches.

    The last stage delivers the batches to the actor and yields no rows: Ray Data's executor looks
    only ten times a second.

    Args:
        spec: What the Dataset is made from.
        first: Whether the Dataset has the pipeline's first task.
        further: Whether it has the further ones: a stage before them yields a block whenever the
            host wants a task.
    """
    import ray.data
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    first_options = {**_NO_MEMORY, "num_cpus": 1, **spec.options}
    scheduling_strategy = first_options.pop("scheduling_strategy", None)
    whose = {"actor_name": spec.actor_name, "pipeline_key": spec.pipeline_key}
    sources = [ray.data.from_blocks([lease_block()])] if first else []
    if further:
        starts = ray.data.from_blocks([lease_block()]).map_batches(
            start_tasks,
            batch_size=None,
            batch_format="pyarrow",
            fn_kwargs=whose,
            compute=TaskPoolStrategy(size=1),
            # Ray would do stages that ask for the same in one task.
            num_cpus=0 if first_options["num_cpus"] else 0.001,
            **_on_this_node(),
            **_NO_MEMORY,
        )
        sources.append(starts)
    dataset = sources[0].union(*sources[1:]) if sources[1:] else sources[0]
    dataset = dataset.map_batches(
        make_batches,
        batch_size=None,
        batch_format="pyarrow",
        fn_kwargs={
            "job": spec.job,
            "job_key": spec.job_key,
            "last": not spec.later,
            **whose,
        },
        **first_options,
    )
    for number, stage in enumerate(spec.later, 1):
        what = {"stage": number, "job": stage.job, "job_key": stage.job_key, **whose}
        what["last"] = number == len(spec.later)
        options = {**_NO_MEMORY, **stage.options}
        if stage.keeps_processes:
            options |= {"fn_constructor_kwargs": what}
            options["compute"] = ActorPoolStrategy(size=stage.most_workers)
        else:
            options |= {"fn_kwargs": what}
            # What asks for the same as the first stage is done by Ray in its tasks.
            if stage.capped or {**_NO_MEMORY, **stage.options} != first_options:
                options["compute"] = TaskPoolStrategy(size=stage.most_workers)
        dataset = dataset.map_batches(
            TransformBatches if stage.keeps_processes else transform_batches,
            # A block has one row. With GPUs Ray wants to be told.
            batch_size=1 if stage.keeps_processes else None,
            batch_format="pyarrow",
            **options,
        )
    context = dataset.context
    # Whoever reads the batches knows their order.
    context.execution_options.preserve_order = False
    # Every row that a task yields becomes a block at once.
    context.target_max_block_size = 1
    # How much is in flight is decided by whoever feeds the chunks, not by Ray Data.
    if spec.later:
        limit_to_concurrency(context)
    else:
        context.set_config(_POLICIES, [])
    if scheduling_strategy is not None:
        context.scheduling_strategy = context.scheduling_strategy_large_args = scheduling_strategy
    # A trainer that evaluates for an hour is not stuck.
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
    return dataset


def _on_this_node() -> dict[str, Any]:
    """Return options of a task that is to run beside the pipeline actor.

    On another node it would keep an autoscaler from taking that away.
    """
    here = ray.get_runtime_context().get_node_id()
    labels = next((n.get("Labels") or {} for n in ray.nodes() if n["NodeID"] == here), {})
    return {"label_selector": {_NODE: here}} if labels.get(_NODE) == here else {}


def store_job(pickled: Pickled) -> ray.ObjectRef:
    """Put a pickled job where workers of all nodes find it."""
    search_path = [str(Path(path).resolve()) for path in sys.path]
    content = (pickled.head, pickled.buffers, *pickled.slots, pickled.object_refs)
    return ray.put((search_path, *content))
