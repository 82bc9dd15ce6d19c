"""The worker processes that hold dataset copies of a pipeline, until they have dropped them.

A dataset copy may hold locks, files and ports. torch's workers end with the iteration, so these are
free after it. dpex's worker processes outlive the iteration, and drop their copies instead.

- ``hold`` records that a process gets work of the present iteration, and so makes a copy.
- ``end`` ends the iteration. Each process waits for that in ``next_end``.
- The next call of ``next_end`` confirms that the process has dropped its copies.
- ``released`` waits until all processes have confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dpex import tuning

__all__ = ["CopyHolders"]


class CopyHolders:
    """The worker processes that hold dataset copies of a pipeline.

    Args:
        may_hold: Returns whether a process that has not answered for some seconds may exist.
    """

    def __init__(self, may_hold: Callable[[str, float], bool]) -> None:
        self._may_hold = may_hold
        self._ends = 0
        # The number of iterations, of the first ones, after which processes kept their copies.
        self._kept = 0
        # Invariant: a process is in `_holding` from its first work of an iteration until it has
        # dropped its copies of that iteration. The value is the number of iterations before it.
        self._holding: dict[str, int] = {}
        self._changed = asyncio.Event()

    def hold(self, process: str) -> None:
        """Record that a process makes batches of the present iteration."""
        self._holding[process] = self._ends

    def end(self, *, keep: bool = False) -> None:
        """End the present iteration.

        Args:
            keep: Whether processes keep their copies, because logical workers are persistent.
        """
        self._ends += 1
        self._kept += keep
        self._wake()

    async def next_end(self, process: str, seen: int) -> int:
        """Wait for the end of an iteration, for a process that has dropped its earlier copies.

        Args:
            process: The process.
            seen: How many ends the process has been told.

        Returns:
            The number of ends by now, which is larger than ``seen``.
        """
        self.drop(process, seen)
        while self._ends <= seen:
            await self._changed.wait()
        return self._ends

    def drop(self, process: str, seen: int) -> None:
        """Record that a process has dropped its copies of the first ``seen`` iterations."""
        if max(self._holding.get(process, seen), self._kept) < seen:
            del self._holding[process]
            self._wake()

    async def released(self, timeout_s: float) -> list[str]:
        """Wait until no process holds copies of an iteration that has ended.

        Args:
            timeout_s: Maximum wait in seconds.

        Returns:
            The processes that hold copies after the timeout.
        """
        began = time.monotonic()
        while held := self._held():
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                for process in held:  # they are named once
                    del self._holding[process]
                return held
            try:
                async with asyncio.timeout(tuning.LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                for process in held:
                    if not self._may_hold(process, waited_s):
                        self._holding.pop(process, None)
        return []

    def _held(self) -> list[str]:
        if self._kept == self._ends:
            return []
        return [process for process, before in self._holding.items() if before < self._ends]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
