"""Whether the nodes live that an answer depends on, looked at where it takes long.

Ray marks a node dead that it has not reached for some time. But it may wait for minutes for what
was to come from there, and for ever where that is the node of this process.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from dpex.cluster.local.launch import within
from dpex.errors import ClusterError

__all__ = ["Nodes"]

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
# A head that does not answer so soon is Ray's affair: most often it ends this process in the end.
_ANSWER_S = 1.0


class Nodes:
    """The cluster's nodes, as one session knows them.

    Attributes:
        died_at: When it was last noticed that some had died, by the monotonic clock.
    """

    def __init__(self) -> None:
        # Asked now: where Ray has gone meanwhile, the question would start another one.
        self._here = ray.get_runtime_context().get_node_id()
        self._dead: set[str] = set()
        self.look()
        self.died_at = 0.0

    def look(self) -> None:
        """Ask the head who lives.

        Raises:
            ClusterError: The node of this process does not.
        """
        if not ray.is_initialized():
            return
        try:
            nodes = within(_ANSWER_S, ray.nodes)
        except Exception:  # such as gRPC's, where a Ray Client has lost its server
            return
        dead = {node["NodeID"] for node in nodes if not node["Alive"]}
        if self._here in dead:
            raise ClusterError(
                "the Ray node of this process has died (its raylet was killed, or the head could "
                "not reach it), so nothing can be read from the cluster any more. Start the "
                "process again; with state_dict() it goes on where it was"
            )
        if not dead <= self._dead:
            self.died_at = time.monotonic()
            self._dead |= dead

    def answered(self, ref: ray.ObjectRef) -> Any:
        """Return what this process's host answers, however long it takes, while the node lives.

        The wait is logged after 10 s, 20 s, 40 s and so on.

        Raises:
            ClusterError: The node has died.
            Exception: What the pipeline actor raised, or that it has died.
        """
        began = time.monotonic()
        told_s = _LOOK_S
        while True:
            try:
                return ray.get(ref, timeout=_LOOK_S)
            except ray.exceptions.GetTimeoutError:
                self.look()
            waited_s = time.monotonic() - began
            if waited_s >= 2 * told_s:
                told_s = waited_s
                logger.warning(
                    "waiting for the process that runs the pipeline, which Ray starts on this "
                    "node: %.0f s by now. If it does not start, Ray's logs say why: raylet.out, "
                    "and python-core-worker-*.log",
                    waited_s,
                )
