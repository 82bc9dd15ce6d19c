"""Changes to Ray Data's executor in the pipeline actor."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import ray

from dpex.compat.private_names import PrivateName, Shortcut

if TYPE_CHECKING:
    import ray.data

__all__ = ["ACTOR_ONLY", "POLICIES", "failed_shortcuts", "limit_to_concurrency", "tune_executor"]

POLICIES = "backpressure_policies.enabled"
"""Ray Data's setting for its backpressure policies. If Ray renames it, tasks start later."""

ACTOR_ONLY = "RAY_DATA_ACTOR_ONLY_BACKEND"
"""Environment variable of later versions of Ray, which makes Ray Data run tasks in actors."""

METADATA_ON_THREAD = "RAY_DATA_METADATA_PREFETCH_ON_THREAD"
"""Environment variable of Ray Data: whether a thread of its own fetches blocks' metadata."""

_EXECUTION = "ray.data._internal.execution."

_RAY_OF_EXECUTOR = PrivateName(
    _EXECUTION + "streaming_executor_state:ray",
    "ends the executor's wait with the first task that is ready",
    check="it is the module ray, and an unknown call goes to ray.wait",
)
WAIT = Shortcut(
    "start further tasks at once",
    "further tasks start up to 0.1 s later",
    "ray",
    ray=_RAY_OF_EXECUTOR,
)
_REGISTER = PrivateName(
    "ray.data._internal.stats:_StatsManager.register_dataset_to_stats_actor",
    "starts no actor for statistics",
    check="it can be called",
)
_UPDATE = PrivateName(
    "ray.data._internal.stats:_StatsManager.update_execution_metrics",
    "starts no actor for statistics",
    check="it can be called",
)
STATISTICS = Shortcut(
    "run pipelines without Ray Data's actor for statistics",
    "each Ray has one process more",
    "ray",
    register=_REGISTER,
    update=_UPDATE,
)
_CREATE_AUTOSCALER = PrivateName(
    _EXECUTION + "streaming_executor:create_cluster_autoscaler",
    "leaves scaling to Ray's own autoscaler",
    check="it can be called",
)
AUTOSCALER = Shortcut(
    "run pipelines without Ray Data's autoscaler",
    "Ray Data divides the CPUs between the loaders of a process by its own rules",
    "ray",
    create=_CREATE_AUTOSCALER,
)
CONCURRENCY = Shortcut(
    "limit later stages by their number of workers alone",
    "Ray Data also holds later stages back when it sees much data",
    "ray",
    policy=PrivateName(
        _EXECUTION + "backpressure_policy:BackpressurePolicy",
        "has a policy of dpex's",
        check="it is a class",
    ),
    limit=PrivateName(
        _EXECUTION + "operators.task_pool_map_operator:TaskPoolMapOperator"
        ".get_max_concurrency_limit",
        "tells how many tasks a stage may have",
        check="it returns None or a positive number",
    ),
    active=PrivateName(
        _EXECUTION + "interfaces.physical_operator:PhysicalOperator.num_active_tasks",
        "tells how many tasks a stage has",
        check="it returns a number",
    ),
)

_NO_LIMIT = 1e15


def failed_shortcuts() -> int:
    """Return how many shortcuts through the executor have failed in this process."""
    return sum(s.failed for s in (WAIT, STATISTICS, AUTOSCALER, CONCURRENCY))


def tune_executor() -> None:
    """Adapt Ray Data in this process to pipelines that last as long as their loaders.

    Only the pipeline actor's process changes: the user's Ray Data keeps its defaults.
    """
    # A task lease lasts as long as an epoch and yields no rows. If Ray Data ran tasks in actors, a
    # second task in an actor's queue would wait for the end of the first.
    os.environ[ACTOR_ONLY] = "0"
    # With the thread, the executor's loop makes one more pass for each block.
    os.environ[METADATA_ON_THREAD] = "0"

    import ray.data  # reads the variables, and configures its logger

    # A forked actor inherits the user's warning filters, which may turn warnings into errors. No
    # user code runs in this process.
    warnings.simplefilter("ignore")
    # This logger warns that ray.get blocks an async actor. The executor has a thread of its own, so
    # it does not block the actor's event loop.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    logger = logging.getLogger("ray.data")
    logger.setLevel(logging.ERROR)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = False
    if WAIT.find_checked(ray=lambda value: value is ray):
        _RAY_OF_EXECUTOR.set(_WaitForAny())
    if STATISTICS.find_checked(register=callable, update=callable):
        for name in STATISTICS.names.values():
            name.set(staticmethod(lambda *_, **__: None))
    if AUTOSCALER.find_checked(create=callable):
        autoscaler = _NoAutoscaler()
        _CREATE_AUTOSCALER.set(lambda *_, **__: autoscaler)


class _WaitForAny:
    """A replacement of the module ``ray`` whose ``wait`` returns at the first task that is ready.

    Ray Data's executor polls: it waits until all running tasks are ready or the timeout expires.
    Short timeouts cost a quarter of a core, and long timeouts leave workers idle.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    @staticmethod
    def wait(refs: list[Any], **options: Any) -> Any:
        """Wait until one task is ready, then return all tasks that are ready."""
        if options.keys() != {"num_returns", "timeout", "fetch_local"}:
            return ray.wait(refs, **options)
        ready, _ = ray.wait(refs, **options | {"num_returns": 1})
        return ray.wait(refs, **options | {"timeout": 0}) if ready else ([], refs)


class _NoAutoscaler:
    """An autoscaler for Ray Data that leaves scaling to Ray's own autoscaler.

    Ray's own autoscaler sees the tasks that wait for a CPU. Ray Data's autoscaler divides the CPUs
    of the cluster equally between its executions, in whole numbers. With two CPUs, each of four
    loaders would get no CPU.
    """

    def __init__(self) -> None:
        # The limits are finite, because Ray Data divides them.
        self._limits = ray.data.ExecutionResources(
            cpu=_NO_LIMIT, gpu=_NO_LIMIT, object_store_memory=_NO_LIMIT, memory=_NO_LIMIT
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None  # a method of a newer Ray does nothing

    def get_total_resources(self) -> Any:
        """Return limits that no task reaches: tasks wait for CPUs in Ray's scheduler."""
        return self._limits


def limit_to_concurrency(context: ray.data.DataContext) -> None:
    """Limit stages by their ``concurrency`` alone.

    Ray's own policies also delay input that the reader has requested. They reserve resources for
    each stage, which delays the start by a second.
    """
    found = CONCURRENCY.find_checked(policy=lambda value: isinstance(value, type))
    if found is None:
        return
    policy: Any = found["policy"]

    class Caps(policy):
        """A policy that limits the parallel tasks of a stage to its concurrency."""

        def can_add_input(self, op: Any) -> bool:
            try:
                # In older versions of Ray, only operators that run tasks have a limit.
                has_one = hasattr(op, "get_max_concurrency_limit")
                limit = op.get_max_concurrency_limit() if has_one else None
                if limit is None:
                    return True
                if limit < 1:
                    raise ValueError(f"the concurrency limit of {op} is {limit}")
                return bool(op.num_active_tasks() < limit)
            except Exception as error:
                # Ends this execution. The next pipeline uses Ray's own policies.
                CONCURRENCY.fail(error)
                raise

    context.set_config(POLICIES, [Caps])
