"""Whether the nodes live that an answer depends on, looked at where it takes long.

Ray marks a node dead that it has not reached for some time. But it may wait for minutes for what
was to come from there, and for ever where that is the node of this process.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from dpex.cluster.embedded import within
from dpex.errors import ClusterError

__all__ = ["Deaths", "answered", "check_own_node"]

_LOOK_S = 5.0
# A head that does not answer is Ray's affair: it ends this process after a minute.
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
    if ray.get_runtime_context().get_node_id() in _dead_nodes():
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
    try:
        nodes = within(_ANSWER_S, ray.nodes)
    except TimeoutError:
        return set()
    return {node["NodeID"] for node in nodes if not node["Alive"]}
