"""Tasks or actors: how Ray Data runs the worker processes of a pipeline.

dpex prefers tasks. A task that waits releases its CPU, and its process serves the next lease also
if another job had the CPU in between. An actor holds its CPU until its process ends.

Ray Data may have no tasks: its tasks are then missing, raise an error or do not start. In that
case, dpex uses actors, with public names of Ray only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from dpex import tuning

if TYPE_CHECKING:
    import ray.data

__all__ = [
    "IN_ACTORS",
    "REFUSALS",
    "StartWatch",
    "TaskPools",
    "actor_pool",
    "has_room",
    "scale_by_leases",
    "task_pool",
    "wants_actors",
]

logger = logging.getLogger("dpex")

IN_ACTORS = "DPEX_WORKERS_IN_ACTORS"
"""Name of the environment variable that makes dpex use actors if it is ``1``."""

REFUSALS = (AttributeError, ImportError, NotImplementedError, TypeError, ValueError)
"""Errors of a Ray Data that has no tasks, or does not accept their options."""


def wants_actors() -> bool:
    """Return whether the user wants actors even if there are tasks."""
    return os.environ.get(IN_ACTORS) == "1"


def task_pool(size: int | None) -> Any:
    """Return Ray Data's strategy that runs a stage in tasks.

    Args:
        size: Most tasks at once; None for no limit.
    """
    from ray.data import TaskPoolStrategy

    return TaskPoolStrategy(size=size)


def actor_pool(*, least: int, most: int | None) -> Any:
    """Return Ray Data's strategy that runs a stage in actors, with one block at a time in each.

    A second block in an actor's queue could not move to another actor, and would wait for the end
    of the first lease.

    Args:
        least: Number of actors that start at once. Until the last block, Ray Data keeps as many.
        most: Most actors; None for no limit.
    """
    from ray.data import ActorPoolStrategy

    return ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=1)


def scale_by_leases(context: ray.data.DataContext) -> None:
    """Make Ray Data start an actor for each block that waits, and end actors without a block.

    By default, its pools grow only if most actors have a second block in their queue.
    """
    scaling = getattr(context, "autoscaling_config", None)
    if scaling is not None:
        scaling.actor_pool_util_upscaling_threshold = 1.0
        scaling.actor_pool_util_downscaling_threshold = 0.99
    if hasattr(context, "max_consecutive_actor_init_deaths"):
        # By default, the first actor that dies while it starts ends the execution.
        context.max_consecutive_actor_init_deaths = tuning.MAX_DEATHS


class TaskPools:
    """Whether Ray Data runs tasks, as far as this process knows.

    Attributes:
        failed: Whether pipelines run in actors, because Ray Data could not run tasks.
    """

    def __init__(self) -> None:
        self.failed = False

    def check(self) -> bool:
        """Return whether the next pipeline runs in tasks."""
        if not self.failed:
            try:
                task_pool(1)
            except Exception as error:
                self.fail(error)
        return not self.failed

    def fail(self, error: BaseException) -> None:
        """Run later pipelines in actors, and warn."""
        if not self.failed:
            self.failed = True
            logger.warning(
                "Ray Data %s runs no tasks (%s: %s). dpex runs its workers in actors instead: they "
                "start more slowly, and keep their CPUs while they wait",
                ray.__version__,
                type(error).__name__,
                error,
            )

    def actors_failed(self) -> None:
        """Try tasks again: the error was not theirs, because actors have failed too."""
        self.failed = False


class StartWatch:
    """Detects tasks that do not start although they could.

    Args:
        now: The time.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._pending = 0

    def stuck(self, now: float, pending: int, *, room: bool) -> bool:
        """Return whether no pending task has started for ``tuning.TASKS_START_S``.

        Args:
            now: The time.
            pending: Number of pending tasks.
            room: Whether a node has what a task requests.
        """
        if not room or not pending or pending < self._pending:
            self._since = now
        self._pending = pending
        return now - self._since >= tuning.TASKS_START_S


def has_room(options: Mapping[str, Any], free: Mapping[str, float], nodes: int) -> bool:
    """Return whether some node surely has the resources for a worker.

    Ray's public API has only the sum of what is free on all nodes. If that sum is the claim times
    the number of nodes, at least one node has room.

    Args:
        options: Ray options of a worker.
        free: The result of ``ray.available_resources()``.
        nodes: Number of nodes that are alive.
    """
    claims = {"CPU": options.get("num_cpus", 1) or 0, "memory": options.get("memory", 0) or 0}
    if set(options) - {"num_cpus", "memory", "runtime_env"}:
        return False  # the nodes that meet the other options are not known
    return all(free.get(name, 0.0) >= claim * nodes for name, claim in claims.items())
