"""What a run's Ray processes have spent, and how many tasks they have started for dpex."""

from collections import Counter
from typing import Any

import ray

from benchmarks.fresh import own_processes

# A word of its command line, by what the process is.
PROCESSES = {"host": "ray::_PipelineActor", "head": "/gcs_server ", "raylets": "/raylet "}


class Scheduler:
    """The turns that tasks of a loader take, of which it has read an epoch.

    Args:
        loader: A ``DpexDataLoader`` with persistent workers.
    """

    def __init__(self, loader: Any) -> None:
        self._actor = loader._cluster.session._actor.handle

    @property
    def begun(self) -> int:
        """How many there were so far; each is a task of Ray's."""
        return int(self._call(lambda turns: turns._begun))

    @property
    def length_s(self) -> float:
        """For how long a task takes further chunks; with 0.0 each takes one."""
        return float(self._call(lambda turns: turns._lease_s))

    @length_s.setter
    def length_s(self, length_s: float) -> None:
        self._call(lambda turns: setattr(turns, "_lease_s", length_s))

    def _call(self, function: Any) -> Any:
        def call(host: Any) -> Any:
            (lane,) = host._pipelines.values()
            return function(lane.result().scheduler)

        return ray.get(self._actor.__ray_call__.remote(call))


def spent_s() -> Counter[str]:
    """Return the processor seconds so far of a fresh interpreter's Ray, by kind of process."""
    sums: Counter[str] = Counter()
    for process in own_processes():
        command = " ".join(process.cmdline()) + " "
        times = process.cpu_times()
        for kind, word in PROCESSES.items():
            if word in command:
                sums[kind] += times.user + times.system
    return sums
