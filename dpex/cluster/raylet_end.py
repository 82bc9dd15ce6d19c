"""A message when the raylet of this process's node has ended, because Ray may end this process."""

from __future__ import annotations

import logging
import os
import select
import sys

from dpex.background_thread import BackgroundThread
from dpex.cluster.nodes_here import local_raylets, node_of

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
# Addresses of clusters whose raylet on this machine has ended while this process used it.
_ended: set[str] = set()


def log_end_of_raylet(address: str) -> None:
    """Log an error as soon as the raylet of this process's node ends while Ray is connected.

    Ray's head notices the end some seconds later. If this process owns objects in the object store
    of that node, Ray 2.60 then ends it with exit status 1, without an error of Python.

    Args:
        address: Address of the cluster.
    """
    _ended.discard(address)  # of an earlier Ray that had the same port
    if hasattr(os, "pidfd_open"):
        BackgroundThread(target=_watch, args=(address,), name="dpex-raylet", daemon=True).start()


def _watch(address: str) -> None:
    raylet = node_of(address, local_raylets() or [])
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
        _ended.add(address)
        logger.error(
            "the raylet of this machine (process %d) has ended. Ray may end this process with exit "
            "status 1, without an error of Python. Start it again, and resume from the last "
            "state_dict(). Ray's raylet.out says why the raylet ended",
            raylet.pid,
        )


def raylet_ended(address: str) -> bool:
    """Return whether the raylet of this process's node has ended; ``address`` as above."""
    return address in _ended
