"""Blocks on their way into the trainer: from the actor's references to batches in own memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import ray
import torch
from ray.data.collate_fn import ArrowBatchCollateFn

from dpex.cluster.local.launch import settled
from dpex.compat.data_iterator import DATA_ITERATOR, StoredBlock, data_iterator
from dpex.wire.block_format import BLOCK_LOST, Block, Entry, decode, read_block
from dpex.wire.buffer_pool import MemoryPool

__all__ = ["Arrival", "BlockSource", "Receiver"]

logger = logging.getLogger("dpex")

_FETCHES = 4


@dataclass(frozen=True)
class Arrival:
    """One block, decoded.

    Attributes:
        block: Its header.
        decode_s: Seconds it took to decode it.
        transfer_s: Seconds it took to get it, once it was known that it is there.
        batches: Its batches.
    """

    block: Block
    batches: list[Entry]
    decode_s: float = 0.0
    transfer_s: float = 0.0


class BlockSource(Protocol):
    """The actor that says where the blocks are.

    Attributes:
        actor: Its handle.
    """

    handle: Any

    @property
    def connected(self) -> bool:
        """Whether this process is still connected to the actor's Ray."""


class _Decode(ArrowBatchCollateFn):
    """The collate_fn of ``iter_torch_batches``: one block in, its batches out.

    Attributes:
        failure: Exception that it has raised.
    """

    def __init__(self, run: str, pool: MemoryPool, *, pin_memory: bool, device_index: int) -> None:
        self._run = run
        self._pool = pool
        self._pin_memory = pin_memory
        self._device_index = device_index
        self.failure: BaseException | None = None

    def __call__(self, table: pa.Table) -> Arrival:
        """Copy a block's batches into memory of their own."""
        try:
            return self._decode(table)
        except BaseException as error:
            self.failure = error
            raise

    def _decode(self, table: pa.Table) -> Arrival:
        started = time.perf_counter()
        block = read_block(table)
        if block.run != self._run:  # a chunk of an iteration that was given up
            return Arrival(replace(block, entries=[]), [])
        if self._pin_memory:
            torch.accelerator.set_device_index(self._device_index)
        batches = list(decode(block, self._pool, pin_memory=self._pin_memory))
        # The entries are views of the block, which is to be freed.
        block = replace(block, entries=[])
        return Arrival(block, batches, time.perf_counter() - started)


def _fetched(replies: Iterable[list[StoredBlock]]) -> Iterator[pa.Table]:
    """Fetch the blocks of each reply, some at a time; yields their tables in order."""
    with ThreadPoolExecutor(_FETCHES, "dpex-fetch") as pool:
        for blocks in replies:
            refs = [ref for ref, _ in blocks]
            blocks.clear()
            yield from pool.map(ray.get, refs)
            del refs


class Receiver:
    """Reads one run's blocks in a thread and keeps the decoded batches for the training loop.

    Args:
        host: The pipeline actor.
        pipeline_key: The pipeline that serves the run.
        run: The run.
        pool: Where the batches' memory is from, unless it is page-locked.
        pin_memory: Whether batches go to page-locked memory.
        through_client: Whether this process is a Ray Client.

    Attributes:
        arrived_at: When the last block did, by the monotonic clock.
    """

    def __init__(
        self,
        actor: BlockSource,
        pipeline_key: str,
        run: str,
        pool: MemoryPool,
        *,
        pin_memory: bool,
        through_client: bool,
    ) -> None:
        self._changed = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        self._read = 0
        self._handed = 0
        self._notes: deque[tuple[int, int]] = deque()
        self._quiet_at = 0
        self._errors: list[str] = []
        self._failure: BaseException | None = None
        self._ended = False
        self._all_told = False
        self._stopped = False
        self._through_data = False
        self._known_at = self._last_at = 0.0
        self.arrived_at = 0.0
        self._actor, self._pipeline_key, self._run = actor, pipeline_key, run
        device_index = torch.accelerator.current_device_index() if pin_memory else -1
        self._decode = decode_block = _Decode(
            run, pool, pin_memory=pin_memory, device_index=device_index
        )
        replies = self._replies()

        def arrivals() -> Iterator[Arrival]:
            # Through a client Ray Data does not work; elsewhere it may have other names.
            blocks = None if through_client else data_iterator(replies)
            self._through_data = blocks is not None
            if blocks is None:
                return map(decode_block, _fetched(replies))
            return iter(
                blocks.iter_torch_batches(
                    batch_size=None, prefetch_batches=0, collate_fn=decode_block
                )
            )

        self._thread = threading.Thread(
            target=self._receive, args=(arrivals,), name="dpex-receive", daemon=True
        )
        self._thread.start()

    def _replies(self) -> Iterator[list[StoredBlock]]:
        """Ask the actor for news until there is no more; yields the blocks of each reply."""
        request = self._ask()
        while request is not None:
            reply = ray.get(request)
            # Asked ahead, so that the answer is on its way while these blocks are read.
            request = None if reply.ended else self._ask()
            self._handed += len(reply.blocks)
            self._note(self._handed, reply.quiet_at, reply.errors)
            self._known_at = time.perf_counter()
            stored: list[StoredBlock] = []
            for block, size_bytes in reply.blocks:
                if isinstance(block, ray.ObjectRef):
                    stored.append((block, size_bytes))
                else:
                    self._take_in(self._decode(block))
            ended = reply.ended
            reply = block = None  # whoever waits for the next reply keeps no block
            if not self._may_call:
                return
            yield stored
            self._all_told = ended

    def _ask(self) -> ray.ObjectRef | None:
        """Ask the pipeline actor for the next reply; returns None where Ray may not be called."""
        if not self._may_call:
            return None
        return self._actor.handle.take.remote(self._pipeline_key, self._run)

    @property
    def _may_call(self) -> bool:
        """Whether Ray may be called: once it was shut down, a call would start another one."""
        return not self._stopped and ray.is_initialized()

    def stop(self) -> None:
        """Read nothing more: the run was given up."""
        self._stopped = True

    def join(self, timeout: float) -> None:
        """Wait until the reading thread has ended."""
        self._thread.join(timeout)

    def _receive(self, arrivals: Callable[[], Iterator[Arrival]]) -> None:
        try:
            while True:
                try:
                    for arrival in arrivals():
                        self._take_in(arrival)
                    if self._all_told or not self._may_call:
                        break
                    raise RuntimeError("the blocks ended before the last one")
                except ray.exceptions.ObjectLostError as error:
                    self._lose(error)
                except ray.exceptions.RayError:
                    raise
                except Exception as error:
                    if error is self._decode.failure or not self._through_data:
                        raise
                    if self._stopped or not self._actor.connected:
                        raise  # Ray was shut down, which ends blocks as well
                    DATA_ITERATOR.fail(error)
                    self._lose(error)
        except BaseException as error:
            logger.debug("nothing more can be read", exc_info=True)
            # Its frames hold this object, which would wait for the garbage collector then.
            self._failure = error.with_traceback(None)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _take_in(self, arrival: Arrival) -> None:
        """Keep a block that has arrived for the training loop."""
        settled.set()
        now = time.perf_counter()
        transfer_s = now - max(self._last_at, self._known_at) - arrival.decode_s
        self._last_at = now
        with self._changed:
            self.arrived_at = time.monotonic()
            self._read += 1
            self._arrivals.append(replace(arrival, transfer_s=transfer_s))
            self._settle()
            self._changed.notify_all()

    def _lose(self, error: Exception) -> None:
        """Report the blocks of the last reply as lost: their batches are made again."""
        if self._may_call:
            self._actor.handle.release.remote(self._pipeline_key, self._run)
        with self._changed:
            self._errors.append(f"{BLOCK_LOST}: {type(error).__name__}")
            self._read = self._handed
            self._settle()
            self._changed.notify_all()

    def _note(self, blocks: int, quiet_at: int, errors: list[str]) -> None:
        """Take what the pipeline actor says beside the blocks.

        Args:
            blocks: Number of blocks up to and with this reply.
            quiet_at: Number of chunks that are surely done once those blocks are read.
            errors: What lost something that was in flight.
        """
        with self._changed:
            self._notes.append((blocks, quiet_at))
            self._errors.extend(errors)
            self._settle()
            self._changed.notify_all()

    def _settle(self) -> None:
        while self._notes and self._notes[0][0] <= self._read:
            self._quiet_at = self._notes.popleft()[1]

    def wait(self, timeout: float | None, quiet_above: int) -> bool:
        """Wait for a block, an error, the end, or for more than ``quiet_above`` chunks done."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_news(quiet_above), timeout)

    def _has_news(self, quiet_above: int) -> bool:
        return bool(self._arrivals or self._errors or self._ended or self._quiet_at > quiet_above)

    def take(self) -> Arrival | None:
        """Return the next decoded block, if there is one."""
        with self._changed:
            return self._arrivals.popleft() if self._arrivals else None

    def take_errors(self) -> list[str]:
        """Return what has lost something that was in flight, since the last call."""
        with self._changed:
            errors, self._errors = self._errors, []
            return errors

    @property
    def quiet_at(self) -> int:
        """Number of chunks all of whose blocks have been taken or wait to be."""
        with self._changed:
            return self._quiet_at

    @property
    def failure(self) -> BaseException | None:
        """What ended the reading, if it was an error."""
        return self._failure

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        with self._changed:
            return self._ended and not self._arrivals
