"""The blocks of a run that have arrived in the training process, and their decoding."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dpex.wire.block_format import Block, Entry, decode, places_in
from dpex.wire.buffer_pool import MemoryPool
from dpex.wire.loss_causes import Loss, lost_block
from dpex.wire.segments import SegmentLostError, SegmentReader

__all__ = ["Arrival", "Arrivals", "Decoder"]


@dataclass(frozen=True)
class Arrival:
    """One decoded block.

    Attributes:
        block: The block without its entries.
        batches: Its decoded batches.
        decode_s: Seconds to decode it.
        transfer_s: Seconds to fetch it, from the arrival of its reference or of the block before
            it, whichever is later.
        lost: Why its batches are lost; empty if they are not.
    """

    block: Block
    batches: list[Entry]
    decode_s: float = 0.0
    transfer_s: float = 0.0
    lost: str = ""


class Decoder:
    """Decodes the blocks of one run: copies their batches to memory that belongs to them.

    Args:
        run: Key of the run.
        pool: Source of the batches' memory, unless it is pinned.
        pin_device: Index of the device for which batches are copied to pinned memory; None if they
            are not.
    """

    def __init__(self, run: str, pool: MemoryPool, pin_device: int | None) -> None:
        self._run = run
        self._pool = pool
        self._segments = SegmentReader()
        self._pin_device = pin_device
        self._closed = False

    def __call__(self, block: Block) -> Arrival:
        """Decode a block, while its table, if it has one, is alive.

        After ``close``, the arrival has no batches. If another thread closes the decoder during a
        call, the call ends after its current batch.

        Raises:
            SegmentsUnreadableError: This process cannot open the segments of worker processes.
        """
        started = time.perf_counter()
        unread = Arrival(replace(block, entries=[]), [])
        if not self._reads(block.run):
            return unread
        pin_memory = self._pin_device is not None
        if self._pin_device is not None:  # torch's current device is that of a thread
            torch.accelerator.set_device_index(self._pin_device)
        try:
            batches = []
            for entry in decode(block, self._pool, self._segments, pin_memory=pin_memory):
                if not self._reads(block.run):
                    return unread
                batches.append(entry)
        except SegmentLostError as error:
            self._segments.release(places_in(block))
            return Arrival(replace(block, entries=[]), [], lost=str(error))
        # Drop the entries: they are views that would keep the block in the object store.
        block = replace(block, entries=[])
        return Arrival(block, batches, time.perf_counter() - started)

    def _reads(self, run: str) -> bool:
        """Return whether a run's batches are wanted: another thread may close this decoder."""
        return run == self._run and not self._closed

    def close(self) -> None:
        """Decode no more batches, and unmap the segments that no batch uses."""
        self._closed = True
        self._segments.close()


class Arrivals:
    """The decoded blocks and the losses of a run, which other threads add for the training loop.

    Attributes:
        arrived_at: Time at which the last block arrived, by ``time.monotonic()``; 0 before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        self._losses: list[Loss] = []
        self._done = 0
        self._quiet_at = 0
        self._ended = False
        self.arrived_at = 0.0

    def add(self, arrival: Arrival) -> None:
        """Add a decoded block, or its loss."""
        with self._changed:
            self.arrived_at = time.monotonic()
            if arrival.lost:
                self._losses.append(lost_block(arrival.lost))
            else:
                self._arrivals.append(arrival)
            self._changed.notify_all()

    def lose(self, losses: Sequence[Loss]) -> None:
        """Add losses of blocks or chunks in flight."""
        if losses:
            with self._changed:
                self._losses.extend(losses)
                self._changed.notify_all()

    def set_quiet(self, quiet_at: int) -> None:
        """Record how many chunks the pipeline had when all of them were last done.

        Call it after ``add`` for each of their blocks.
        """
        with self._changed:
            if quiet_at != self._quiet_at:
                self._quiet_at = quiet_at
                self._changed.notify_all()

    def count_done(self) -> None:
        """Count a chunk that a first worker has done, after ``add`` for each of its blocks."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Record that nothing more arrives."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, timeout: float | None, quiet_above: int) -> bool:
        """Wait for a block, a loss, the end, or more than ``quiet_above`` finished chunks.

        Returns:
            Whether there was such an event before the timeout.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._has_news(quiet_above), timeout)

    def _has_news(self, quiet_above: int) -> bool:
        return bool(self._arrivals or self._losses or self._ended or self.quiet_at > quiet_above)

    def take(self) -> Arrival | None:
        """Return the next decoded block, or None if none has arrived."""
        with self._changed:
            return self._arrivals.popleft() if self._arrivals else None

    def take_losses(self) -> list[Loss]:
        """Return the losses since the last call."""
        with self._changed:
            losses, self._losses = self._losses, []
            return losses

    @property
    def quiet_at(self) -> int:
        """Number of finished chunks: each of their blocks has arrived or is lost."""
        with self._changed:
            return self._done + self._quiet_at

    @property
    def ended(self) -> bool:
        """Whether ``take`` can return no more blocks."""
        with self._changed:
            return self._ended and not self._arrivals
