"""A message when the raylet of this process's node has ended, because Ray may end this process."""

from __future__ import annotations

import logging
import os
import select
import sys

from dpex.background_thread import BackgroundThread
from dpex.cluster.nodes_here import local_raylets

__all__ = ["RAYLET_ENDED", "log_end_of_raylet", "raylet_ended"]

logger = logging.getLogger("dpex")

RAYLET_ENDED = (
    "the Ray node of this process has died: its raylet was killed, or the head could not reach it. "
    "This process can read nothing from the cluster any more. Start it again, and resume from the "
    "last state_dict()"
)
"""Message of the error for the end of the raylet of this process's node."""

# Raylets that a thread of this process watches.
_watched: set[int] = set()
# Ids of nodes whose raylet has ended while this process was connected to it.
_ended: set[str] = set()


def log_end_of_raylet(node_id: str) -> None:
    """Log an error as soon as the raylet of this process's node ends while Ray is connected.

    Ray's head notices the end some seconds later. If this process owns objects in the object store
    of that node, Ray 2.60 then ends it with exit status 1, without an error of Python.

    Args:
        node_id: The id of this process's node. This machine may run other nodes of the cluster too.
    """
    if hasattr(os, "pidfd_open"):
        BackgroundThread(target=_watch, args=(node_id,), name="dpex-raylet", daemon=True).start()


def _watch(node_id: str) -> None:
    raylet = next((raylet for raylet in local_raylets() or () if raylet.node_id == node_id), None)
    if raylet is None or raylet.pid in _watched:
        return
    try:
        process = os.pidfd_open(raylet.pid)
    except OSError:  # it has ended already, or is another user's
        return
    _watched.add(raylet.pid)
    try:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        ended.poll()
    finally:
        os.close(process)
        _watched.discard(raylet.pid)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # else the program has shut Ray down
        _ended.add(node_id)
        logger.error(
            "the raylet of this machine (process %d) has ended. Ray may end this process with exit "
            "status 1, without an error of Python. Start it again, and resume from the last "
            "state_dict(). Ray's raylet.out says why the raylet ended",
            raylet.pid,
        )


def raylet_ended(node_id: str) -> bool:
    """Return whether the raylet of this process's node has ended; ``node_id`` as above."""
    return node_id in _ended
