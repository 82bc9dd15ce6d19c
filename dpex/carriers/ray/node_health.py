"""Node health, which dpex checks while it waits for a late answer.

Ray marks a node as dead after it has not reached the node for some time. Even then, Ray may wait
for minutes for results from that node. If it is this process's own node, Ray may wait for ever.
"""

from __future__ import annotations

import logging
import time
from typing import Any, ClassVar

import ray

from dpex import tuning
from dpex.cluster.local.launch import within
from dpex.cluster.raylet_end import RAYLET_ENDED, raylet_ended
from dpex.errors import ClusterError
from dpex.log import waits

__all__ = ["Nodes"]

logger = logging.getLogger("dpex")


class Nodes:
    """The cluster's nodes, as one ``Session`` knows them.

    Attributes:
        died_at: When ``look`` last found newly dead nodes, by the monotonic clock.
    """

    # Nodes whose death is logged, for all loaders of this process.
    _named: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        # Read the ID now: after a shutdown of Ray, this call would start a new Ray.
        self._here = ray.get_runtime_context().get_node_id()
        self._dead: set[str] = set()
        self.look(log=False)
        self.died_at = 0.0

    def look(self, *, log: bool = True) -> None:
        """Ask the head which nodes are alive, and log which nodes have died since the last call.

        Args:
            log: Whether to log them.

        Raises:
            ClusterError: The node of this process is dead.
        """
        if not ray.is_initialized():
            return
        if raylet_ended(self._here):  # the head notices it seconds later
            raise ClusterError(RAYLET_ENDED)
        try:
            nodes = within(tuning.HEAD_ANSWER_S, ray.nodes)
        except Exception:  # such as gRPC's, if a Ray Client has lost its server
            return
        dead = {node["NodeID"]: node for node in nodes if not node["Alive"]}
        if self._here in dead:
            raise ClusterError(RAYLET_ENDED)
        new = dead.keys() - self._dead
        if new:
            self.died_at = time.monotonic()
            self._dead |= new
        for number in new - self._named if log else ():
            self._named.add(number)
            logger.warning(
                "node %s (%s) has died. dpex recomputes the batches that it had",
                dead[number]["NodeManagerAddress"],
                dead[number]["NodeManagerHostname"],
            )

    def wait_for_answer(self, ref: ray.ObjectRef, reason: str) -> Any:
        """Return the pipeline actor's answer, however late, while this process's node is alive.

        dpex logs the wait after 10 s, 20 s, 40 s and so on.

        Args:
            ref: Reference to the answer.
            reason: The likely reason of a wait, as a text with a place for the seconds.

        Raises:
            ClusterError: This process's node has died.
            Exception: The pipeline actor raised it, or the actor has died.
        """
        began = time.monotonic()
        logged_s = tuning.CLUSTER_LOOK_S
        while True:
            try:
                return ray.get(ref, timeout=tuning.CLUSTER_LOOK_S)
            except ray.exceptions.GetTimeoutError:
                self.look()
            waited_s = time.monotonic() - began
            if waited_s >= 2 * logged_s:
                logged_s = waited_s
                waits.warning(reason, waited_s)
