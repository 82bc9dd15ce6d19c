"""Nodes, their worker processes, the dataset copies in these, and the blocks that nodes store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpex.protocol.chunks import Entry, Part
from simulation.network import Link

if TYPE_CHECKING:
    from simulation.attempts import Attempt

__all__ = ["SHARED", "Copy", "Node", "StoredBlock", "WorkerProcess"]

SHARED = -1
"""Stands for all logical workers in the slot of a copy."""


class Copy:
    """A worker process's copy of the dataset.

    Args:
        watched: Whether its batches are compared with it.

    Attributes:
        pipeline: Number of the pipeline that used it last.
        restarted: Whether all its batches report that their logical worker's state starts again.
        reported: Whether one of them has been made.
        changed: How many batches have changed it.
        read: For a stream, the number of batches that have been read.
        epoch: For a stream, the epoch that it reads.
        last: Iteration and number of the last batch that has changed it, unless dpex had resent
            that batch.
        rewound: For a stream, whether it was read again for a batch that dpex had resent.
    """

    __slots__ = (
        "changed",
        "epoch",
        "last",
        "pipeline",
        "read",
        "reported",
        "restarted",
        "rewound",
        "watched",
    )

    def __init__(self, *, watched: bool) -> None:
        self.watched = watched
        self.last: tuple[int, int] | None = None
        self.reported = self.restarted = self.rewound = False
        self.pipeline = -1
        self.changed = 0
        self.read = 0
        self.epoch: Any = None


class StoredBlock:
    """A block of batches, in a message or in the object store of a node.

    Attributes:
        block: Its batches, by number.
        batches: Its batches, or the outcomes in their place.
        seconds: The time to make it.
        node: The node that stores it; None if a message carries it.
        lost: Whether its node has lost it.
    """

    __slots__ = ("batches", "block", "lost", "node", "seconds")

    def __init__(self, part: Part, entries: list[Entry], seconds: float) -> None:
        self.block = part
        self.batches = entries
        self.seconds = seconds
        self.node: Node | None = None
        self.lost = False

    @property
    def numbers(self) -> set[int]:
        """The numbers of its batches in the epoch, also after a resume in another order."""
        return {e.batch if e.samples or e.value is None else e.value[0] for e in self.batches}


class Node:
    """A node of the cluster.

    Attributes:
        number: Its number.
        alive: Whether it runs.
        link: Its link to the machine of the training process.
        processes: Its worker processes.
        stored: The blocks that it stores and that nobody has read, oldest first.
        full: How many of the next blocks it cannot store.
    """

    __slots__ = ("alive", "full", "link", "number", "processes", "stored")

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.link = Link()
        self.processes: list[WorkerProcess] = []
        self.stored: dict[StoredBlock, None] = {}
        self.full = 0


class WorkerProcess:
    """A worker process, which runs one task after another.

    Attributes:
        name: Its name.
        node: Its node.
        alive: Whether it runs.
        link: Its link to the machine of the training process.
        loses: Whether messages that it had sent may be lost, because it has died.
        replaced: Whether Ray has taken it for dead.
        silent_until: The time until which it does nothing.
        attempt: The attempt of a task that it runs.
        copies: Its dataset copies, by dataset version and logical worker.
        ended: For each pipeline, how many iterations have ended as far as the process knows.
        at_end: Called when it dies.
    """

    __slots__ = (
        "alive",
        "at_end",
        "attempt",
        "copies",
        "ended",
        "link",
        "loses",
        "name",
        "node",
        "replaced",
        "silent_until",
    )

    def __init__(self, name: str, node: Node) -> None:
        self.name = name
        self.node = node
        self.link = node.link
        self.alive = True
        self.loses = self.replaced = False
        self.silent_until = 0.0
        self.attempt: Attempt | None = None
        self.copies: dict[tuple[Any, int], Copy] = {}
        self.ended: dict[int, int] = {}
        self.at_end: list[Callable[[], None]] = []

    def drop_copies(
        self, pipeline: int, version: int | None = None, *, other_than: int | None = None
    ) -> None:
        """Drop the copies of a pipeline.

        Args:
            pipeline: Number of the pipeline.
            version: Their dataset version; None for all versions.
            other_than: A dataset version whose copies stay.
        """
        for slot, copy in list(self.copies.items()):
            if copy.pipeline == pipeline and version in (None, slot[0]) and slot[0] != other_than:
                del self.copies[slot]

    def die(self) -> None:
        """End the process."""
        self.alive = False
        self.node.processes.remove(self)
        waiting, self.at_end = self.at_end, []
        for call in waiting:
            call()
