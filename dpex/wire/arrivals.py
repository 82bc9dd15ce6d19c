"""The blocks of a run that have arrived in the training process, and their decoding."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import torch

from dpex.protocol.chunks import Entry
from dpex.protocol.loss_causes import Loss, lost_block
from dpex.wire.block_format import Block, decode, places_in
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
    """

    block: Block
    batches: list[Entry]
    decode_s: float = 0.0
    transfer_s: float = 0.0


class Decoder:
    """Decodes the blocks of one run: copies their batches to memory that belongs to them.

    Args:
        run: Key of the run.
        pin_device: Index of the device for which batches are copied to pinned memory; None if they
            are not.
    """

    def __init__(self, run: str, pin_device: int | None) -> None:
        self._run = run
        self._segments = SegmentReader()
        self._pin_device = pin_device
        self._closed = False

    def __call__(self, block: Block) -> Arrival | Loss:
        """Decode a block, while its table, if it has one, is alive; return its loss if it is lost.

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
            for entry in decode(block, self._segments, pin_memory=pin_memory):
                if not self._reads(block.run):
                    return unread
                batches.append(entry)
        except SegmentLostError as error:
            self._segments.release(places_in(block))
            return lost_block(str(error), block.part)
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
        arrived_at: Time at which the last block or loss arrived, by ``time.monotonic()``; 0 before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._news: deque[Arrival | Loss] = deque()
        self._ended = False
        self.arrived_at = 0.0

    def add(self, news: Arrival | Loss) -> None:
        """Add a decoded block, or the loss of batches in flight."""
        with self._changed:
            self.arrived_at = time.monotonic()
            self._news.append(news)
            self._changed.notify_all()

    def end(self) -> None:
        """Record that nothing more arrives."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait for a block, a loss or the end; return whether there is one before the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._news or self._ended), timeout)

    def take(self) -> Arrival | Loss | None:
        """Return the next decoded block or loss, or None if none has arrived."""
        with self._changed:
            return self._news.popleft() if self._news else None

    @property
    def ended(self) -> bool:
        """Whether ``take`` can return nothing more."""
        with self._changed:
            return self._ended and not self._news
