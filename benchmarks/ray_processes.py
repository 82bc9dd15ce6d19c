"""The processor time of a run's Ray processes, and the number of tasks that dpex started."""

from collections import Counter
from typing import Any

import ray

from benchmarks.fresh import own_processes

# By kind of process: a part of its command line.
PROCESSES = {
    "pipeline_actor": "ray::_PipelineActor",
    "head": "/gcs_server ",
    "raylets": "/raylet ",
}


class Scheduler:
    """The scheduler of a loader's pipeline; the loader must have read an epoch.

    Args:
        loader: A ``DpexDataLoader`` with persistent workers.
    """

    def __init__(self, loader: Any) -> None:
        session = loader._cluster.session
        self._actor = getattr(session, "started", lambda: session)()._actor.handle

    @property
    def begun(self) -> int:
        """Number of Ray tasks that have started so far."""
        return int(self._call(lambda scheduler: scheduler._tasks._running))

    @property
    def length_s(self) -> float:
        """Length of a task lease in seconds; with 0.0, each task gets one chunk."""
        return float(self._call(lambda scheduler: scheduler._lease_s))

    @length_s.setter
    def length_s(self, length_s: float) -> None:
        self._call(lambda scheduler: setattr(scheduler, "_lease_s", length_s))

    def _call(self, function: Any) -> Any:
        def call(actor: Any) -> Any:
            (pipeline,) = actor._pipelines.values()
            return function(pipeline.result().scheduler)

        return ray.get(self._actor.__ray_call__.remote(call))


def spent_s() -> Counter[str]:
    """Return the processor seconds of this fresh interpreter's Ray, by kind of process."""
    sums: Counter[str] = Counter()
    for process in own_processes():
        command = " ".join(process.cmdline()) + " "
        times = process.cpu_times()
        for kind, word in PROCESSES.items():
            if word in command:
                sums[kind] += times.user + times.system
    return sums
