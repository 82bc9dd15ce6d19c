"""How the trainers on one cluster come to even shares of its CPUs: their hosts make rounds.

Where tasks wait Ray serves those of different kinds in an order of its own, in which some may come
last every time; and tasks of several trainers are of several kinds, for how deep a call is nested
and what it asks for are part of that. So where tasks of others wait a trainer
starts none until all of these have begun: in a round each trainer has one.

One of the hosts, the same for all, notes whose tasks wait.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import ray

from dpex.pipeline.scheduler import OtherJobs
from dpex.worker.actor_calls import NAMESPACE

__all__ = ["ACTOR_PREFIX", "POLL_S", "FairShare", "ask_others"]

ACTOR_PREFIX = "dpex-host-"
"""What the names of hosts begin with."""
POLL_S = 0.25
"""How often a pipeline actor asks, if there are few."""

# The actor that notes answers this many calls a second at most, however many hosts there are.
_CALLS_PER_S = 64
# A actor that has not asked for so many of its pauses, or seconds, has no work, or is dead.
_GONE_PAUSES = 3
_GONE_S = 3.0
# After so long in which nobody waited all may have a task that does: an autoscaler sees it.
_CALM_S = 5.0
_ANSWER_S = 2.0
# How often to look which host notes.
_LOOK_S = 5.0


class FairShare:
    """Whose tasks wait, as one host notes it for all.

    Args:
        free_cpus: Tells how many of the cluster's CPUs are free; may block.
    """

    def __init__(self, free_cpus: Callable[[], float]) -> None:
        self._free_cpus = free_cpus
        # Whose CPU another task takes while its own waits for an answer has it back in a moment:
        # free is what was free twice.
        self._free: deque[float] = deque([0.0], maxlen=2)
        self._looked_at = 0.0
        self._hosts: dict[str, tuple[float, bool]] = {}
        self._waited_at = 0.0

    @property
    def pause_s(self) -> float:
        """How long a pipeline actor waits before it asks again."""
        return max(POLL_S, len(self._hosts) / _CALLS_PER_S)

    async def others(self, name: str, waits: bool) -> tuple[OtherJobs | None, float]:
        """Note a pipeline actor, and tell it about the others.

        Args:
            name: The pipeline actor.
            waits: Whether a task of its own has not begun yet.

        Returns:
            The others, or None if no other has work; and how many seconds later to ask again.
        """
        now = time.monotonic()
        self._hosts[name] = (now, waits)
        gone_s = max(_GONE_S, _GONE_PAUSES * self.pause_s)
        self._hosts = {n: host for n, host in self._hosts.items() if now - host[0] < gone_s}
        if waits:
            self._waited_at = now
        if len(self._hosts) == 1:
            return None, self.pause_s
        if now - self._looked_at >= POLL_S:
            self._looked_at = now
            loop = asyncio.get_running_loop()
            self._free.append(await loop.run_in_executor(None, self._free_cpus))
        others_wait = any(waits for n, (_, waits) in self._hosts.items() if n != name)
        free = int(min(self._free))
        calm = now - self._waited_at >= _CALM_S
        room = max(1, free // len(self._hosts)) if free else int(calm)
        return OtherJobs(others_wait, room), self.pause_s


def free_cpus() -> float:
    """Return how many of the cluster's CPUs no task has."""
    return float(ray.available_resources().get("CPU", 0.0))


def ask_others(name: str, waits: bool) -> tuple[OtherJobs | None, float]:
    """Ask the pipeline actor that notes; see ``FairShare.others``. None also where that fails."""
    try:
        notes = _who_notes(int(time.monotonic() / _LOOK_S))
        answer = ray.get(notes.others.remote(name, waits), timeout=_ANSWER_S)
        others, pause_s = cast("tuple[OtherJobs | None, float]", answer)
    except Exception:  # it has gone, say, or is another version's: sharing must not stop work
        _who_notes.cache_clear()
        return None, POLL_S
    return others, pause_s


@functools.lru_cache(maxsize=1)
def _who_notes(_: int) -> Any:
    """Return the first host by name."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return ray.get_actor(min(n for n in names if n.startswith(ACTOR_PREFIX)), namespace=NAMESPACE)
