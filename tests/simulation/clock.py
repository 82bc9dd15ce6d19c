"""Virtual time: a heap of timers, whose clock jumps to the next one."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["Clock"]


class Clock:
    """A clock that moves only from event to event.

    Args:
        draw: Returns the next random number in [0, 1). It decides the order of simultaneous events.

    Attributes:
        now: The virtual time in seconds.
        events: Number of events so far.
    """

    __slots__ = ("_draw", "_timers", "events", "now")

    def __init__(self, draw: Callable[[], float]) -> None:
        self.now = 0.0
        self.events = 0
        self._draw = draw
        self._timers: list[tuple[float, float, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call a function later; the seed draws the order of calls that are due at once."""
        heappush(self._timers, (self.now + delay_s, self._draw(), act, arguments))

    def step(self) -> bool:
        """Jump to the next event, and let it happen; return False if there is none."""
        if not self._timers:
            return False
        self.now, _, act, arguments = heappop(self._timers)
        self.events += 1
        act(*arguments)
        return True
