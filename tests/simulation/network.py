"""Messages between processes: links delay, reorder, repeat and drop them, and can be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation.clock import Clock

__all__ = ["Link", "Network"]

# How long a sender waits before it repeats a message that was lost.
RESEND_S = 0.5
LEAST_DELAY_S = 0.0002
USUAL_DELAY_S = 0.001
# One message in ten meets a queue, so later messages overtake it.
QUEUED_SHARE = 0.1
QUEUED_S = 0.03
SLOW_S = 1.0


class Link:
    """The link between a node and the machine of the training process.

    Attributes:
        cut_until: The time until which no message passes. A message that is sent earlier arrives
            later, because its sender repeats it.
        slow_until: The time until which messages are slow.
    """

    __slots__ = ("cut_until", "slow_until")

    def __init__(self) -> None:
        self.cut_until = 0.0
        self.slow_until = 0.0


class Network:
    """All links.

    Args:
        clock: The clock.
        draw: Returns the next random number in [0, 1).

    Attributes:
        drops: How many of the next messages are lost, and repeated later.
        repeats: How many of the next requests are repeated, and blocks arrive twice.
    """

    __slots__ = ("_clock", "_draw", "drops", "repeats")

    def __init__(self, clock: Clock, draw: Callable[[], float]) -> None:
        self._clock = clock
        self._draw = draw
        self.drops = 0
        self.repeats = 0

    def send(self, link: Link | None, receive: Callable[..., None], *message: Any) -> None:
        """Send a message: call ``receive`` after a delay.

        Args:
            link: The link; None within the machine of the training process.
            receive: Called with the message.
            *message: The message.
        """
        delay_s = self._delay_s(link)
        if self.drops and link is not None:
            self.drops -= 1
            delay_s += RESEND_S
        self._clock.after(delay_s, receive, *message)

    def _delay_s(self, link: Link | None) -> float:
        draw = self._draw()
        delay_s = LEAST_DELAY_S + USUAL_DELAY_S * draw
        if draw > 1 - QUEUED_SHARE:
            delay_s += QUEUED_S * self._draw()
        if link is not None:
            now = self._clock.now
            if link.cut_until > now:
                delay_s += link.cut_until - now
            if link.slow_until > now:
                delay_s += SLOW_S * self._draw()
        return delay_s
