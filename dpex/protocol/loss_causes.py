"""What was lost in flight, and why."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from dpex.protocol.chunks import Part

__all__ = ["Loss", "LossCause", "joined", "lost_block"]


class LossCause(enum.Enum):
    """The kind of a loss, which decides how dpex recovers it."""

    TASK = "a task failed, most often because its worker process died"
    BLOCK = "a finished block was lost with its worker process or node"
    STORE_FULL = "Ray could not store a block: the object store and its disk are full"


@dataclass(frozen=True)
class Loss:
    """A loss that the pipeline reports.

    Attributes:
        cause: The kind of the loss.
        text: The reason, for error messages.
        part: The batches that are lost; None if the pipeline ended, and all in flight are lost.
    """

    cause: LossCause
    text: str
    part: Part | None = None


def lost_block(reason: str, part: Part) -> Loss:
    """Return the loss of a finished block that has these batches."""
    return Loss(LossCause.BLOCK, f"a block was lost: {reason}", part)


def joined(losses: Iterable[Loss]) -> str:
    """Return the reasons of losses as one text, each reason once."""
    return "; ".join(dict.fromkeys(loss.text for loss in losses))
