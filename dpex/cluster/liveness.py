"""Whether the nodes live that an answer depends on, looked at where it takes long.

Ray marks a node dead that it has not reached for some time. But it may wait for minutes for what
was to come from there, and for ever where that is the node of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from dpex.cluster.embedded import within
from dpex.errors import ClusterError

__all__ = ["Deaths", "answered", "check_own_node"]

T = TypeVar("T")

_LOOK_S = 5.0
_ANSWER_S = 5.0


def answered(ref: ray.ObjectRef) -> Any:
    """Return an actor's answer, however long it takes, as long as this process has a node.

    Raises:
        ClusterError: The node has died.
        Exception: What the actor raised, or that it has died.
    """
    while True:
        try:
            return ray.get(ref, timeout=_LOOK_S)
        except ray.exceptions.GetTimeoutError:
            check_own_node()


def check_own_node() -> None:
    """Raise ``ClusterError`` if the node that this process belongs to has died."""
    here = _asked(lambda: ray.get_runtime_context().get_node_id())
    if here in _dead_nodes():
        raise ClusterError(
            "the Ray node of this process has died (its raylet was killed, or the head could not "
            "reach it), so nothing can be read from the cluster any more. Start the process again; "
            "with state_dict() it goes on where it was"
        )


class Deaths:
    """Notes when nodes are found dead that were not before."""

    def __init__(self) -> None:
        self._known = _dead_nodes()
        self._noticed_at = 0.0

    def last(self) -> float:
        """Look again; returns when the last death was noticed, by the monotonic clock."""
        dead = _dead_nodes()
        if not dead <= self._known:
            self._noticed_at = time.monotonic()
            self._known |= dead
        return self._noticed_at


def _dead_nodes() -> set[str]:
    return {node["NodeID"] for node in _asked(ray.nodes) or () if not node["Alive"]}


def _asked(call: Callable[[], T]) -> T | None:
    """Return what the head says; None where it does not answer.

    That is Ray's affair, which ends this process after a while, or a client's connection.
    """
    try:
        return within(_ANSWER_S, call)
    except Exception:
        return None
