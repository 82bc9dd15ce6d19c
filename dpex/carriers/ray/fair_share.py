"""Fair share of a cluster's CPUs between training jobs.

Ray chooses the order of waiting tasks of different kinds, and some kinds may always come last. A
task's kind includes its nesting depth and its resource request. So tasks of different training jobs
are of different kinds.

While no CPU is free, a training job starts no task if another job's task waits. So the jobs take
turns.

All pipeline actors report to one of them, the recorder, which records whose tasks wait.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import ray

from dpex import tuning
from dpex.protocol.scheduler import OtherJobs
from dpex.worker.actor_calls import NAMESPACE

__all__ = ["ACTOR_PREFIX", "FairShare", "ask_others", "free_cpus"]

ACTOR_PREFIX = "dpex-pipeline-"
"""Prefix of the names of pipeline actors."""


class FairShare:
    """The record of whose tasks wait, which the recorder keeps for all pipeline actors.

    Args:
        free_cpus: Returns how many of the cluster's CPUs are free; may block.
    """

    def __init__(self, free_cpus: Callable[[], float]) -> None:
        self._free_cpus = free_cpus
        # A task that waits for an answer frees its CPU for a moment only. So the lower of the last
        # two counts is taken.
        self._free: deque[float] = deque([0.0], maxlen=2)
        self._looked_at = 0.0
        self._reports: dict[str, tuple[float, bool]] = {}
        self._waited_at = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds that a pipeline actor waits before it reports again."""
        return max(tuning.POLL_S, len(self._reports) / tuning.REPORTS_PER_S)

    async def others(self, name: str, waits: bool) -> tuple[OtherJobs | None, float]:
        """Record a pipeline actor's report, and return the state of the other training jobs.

        Args:
            name: Name of the pipeline actor.
            waits: Whether any of its tasks has not started yet.

        Returns:
            The other jobs, or None if no other job has work; and the seconds until the next report.
        """
        now = time.monotonic()
        self._reports[name] = (now, waits)
        gone_s = max(tuning.GONE_S, tuning.GONE_PAUSES * self.pause_s)
        self._reports = {n: (at, w) for n, (at, w) in self._reports.items() if now - at < gone_s}
        if waits:
            self._waited_at = now
        if len(self._reports) == 1:
            return None, self.pause_s
        if now - self._looked_at >= tuning.POLL_S:
            self._looked_at = now
            loop = asyncio.get_running_loop()
            self._free.append(await loop.run_in_executor(None, self._free_cpus))
        others_wait = any(waits for n, (_, waits) in self._reports.items() if n != name)
        free = int(min(self._free))
        calm = now - self._waited_at >= tuning.CALM_S
        may_wait = max(1, free // len(self._reports)) if free else int(calm)
        return OtherJobs(others_wait, may_wait), self.pause_s


def free_cpus() -> float:
    """Return how many of the cluster's CPUs are free."""
    return float(ray.available_resources().get("CPU", 0.0))


def ask_others(name: str, waits: bool) -> tuple[OtherJobs | None, float]:
    """Report to the recorder, and return its answer; see ``FairShare.others``.

    If the recorder does not answer, the other jobs are None.
    """
    try:
        recorder = _recorder(int(time.monotonic() / tuning.CLUSTER_LOOK_S))
        answer = ray.get(recorder.others.remote(name, waits), timeout=tuning.RECORDER_ANSWER_S)
        others, pause_s = cast("tuple[OtherJobs | None, float]", answer)
    except Exception:  # it has died, or has another dpex version: sharing must not stop work
        _recorder.cache_clear()
        return None, tuning.POLL_S
    return others, pause_s


@functools.lru_cache(maxsize=1)
def _recorder(_: int) -> Any:
    """Return the recorder: the pipeline actor whose name sorts first."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return ray.get_actor(min(n for n in names if n.startswith(ACTOR_PREFIX)), namespace=NAMESPACE)
