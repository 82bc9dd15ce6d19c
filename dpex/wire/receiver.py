"""The reader of blocks in the training process: from object references to decoded batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa
import ray
from ray.data.collate_fn import ArrowBatchCollateFn

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.cluster.local.launch import settled
from dpex.compat.data_iterator import DATA_ITERATOR, StoredBlock, data_iterator
from dpex.wire.arrivals import Arrival, Arrivals, Decoder
from dpex.wire.block_format import read_block, read_message
from dpex.wire.buffer_pool import MemoryPool
from dpex.wire.loss_causes import Loss, lost_block
from dpex.wire.packing import unpack
from dpex.wire.segments import SegmentsUnreadableError

__all__ = ["BlockSource", "Receiver"]

logger = logging.getLogger("dpex")


class BlockSource(Protocol):
    """The pipeline actor, which hands out references to blocks.

    Attributes:
        handle: Ray's handle of the actor.
    """

    handle: Any

    @property
    def connected(self) -> bool:
        """Whether this process is still connected to the Ray cluster of the actor."""


class _Decode(ArrowBatchCollateFn):
    """The ``collate_fn`` of ``iter_torch_batches``, which decodes one block into its batches.

    Attributes:
        failure: The last exception that it raised; None if it raised none.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.failure: BaseException | None = None

    def __call__(self, block: pa.Table | bytes) -> Arrival:
        """Decode a block: copy its batches to memory that belongs to them."""
        try:
            read = read_message if isinstance(block, bytes) else read_block
            return self._decoder(read(block))
        except BaseException as error:
            self.failure = error
            raise


def _fetched(replies: Iterable[list[StoredBlock]]) -> Iterator[pa.Table]:
    """Fetch the blocks of each reply in several threads, and yield their tables in order."""
    with ThreadPoolExecutor(tuning.FETCHES, "dpex-fetch") as pool:
        for blocks in replies:
            refs = [ref for ref, _ in blocks]
            blocks.clear()
            yield from pool.map(ray.get, refs)
            del refs


class Receiver:
    """A thread that decodes one run's blocks for the training loop.

    Args:
        actor: The pipeline actor.
        pipeline_key: Key of the pipeline that serves the run.
        run: Key of the run.
        arrivals: Gets the decoded blocks.
        pool: Source of the batches' memory, unless it is pinned.
        pin_device: As for ``Decoder``.
        through_client: Whether this process is a Ray Client.

    Attributes:
        replaceable: Whether a new pipeline can continue, because a private name of Ray ended this
            one, or because this process cannot read segments.
    """

    def __init__(
        self,
        actor: BlockSource,
        pipeline_key: str,
        run: str,
        arrivals: Arrivals,
        pool: MemoryPool,
        *,
        pin_device: int | None,
        through_client: bool,
    ) -> None:
        self._arrivals = arrivals
        self._counting = threading.Lock()
        self._read = 0
        self._handed = 0
        self._notes: deque[tuple[int, int]] = deque()
        self._failure: BaseException | None = None
        self.replaceable = False
        self._all_told = False
        self._stopped = False
        self._through_data = False
        self._known_at = self._last_at = 0.0
        self._actor, self._pipeline_key, self._run = actor, pipeline_key, run
        self._decoder = Decoder(run, pool, pin_device)
        self._decode = decode_block = _Decode(self._decoder)
        replies = self._replies()

        def decoded() -> Iterator[Arrival]:
            # Ray Data does not work through a Ray Client. Some versions of Ray lack the private
            # names that data_iterator needs.
            blocks = None if through_client else data_iterator(self._wanted(replies))
            self._through_data = blocks is not None
            if blocks is None:
                return map(decode_block, _fetched(replies))
            return iter(
                blocks.iter_torch_batches(
                    batch_size=None, prefetch_batches=0, collate_fn=decode_block
                )
            )

        self._thread = BackgroundThread(
            target=self._receive, args=(decoded,), name="dpex-receive", daemon=True
        )
        self._thread.start()

    def _replies(self) -> Iterator[list[StoredBlock]]:
        """Request replies from the actor until the run ends, and yield the blocks of each."""
        request = self._ask()
        while request is not None:
            reply = ray.get(request)
            if isinstance(reply, bytes):
                reply = unpack(reply)
            # Request the next reply now, so that it arrives while these blocks are read.
            request = None if reply.ended else self._ask()
            self._handed += len(reply.blocks)
            self._note(self._handed, reply.quiet_at, reply.losses)
            self._known_at = time.perf_counter()
            stored: list[StoredBlock] = []
            for block, size_bytes in reply.blocks:
                if isinstance(block, ray.ObjectRef):
                    stored.append((block, size_bytes))
                else:
                    self._take_in(self._decode(block))
            ended = reply.ended
            self.replaceable = reply.replaceable
            reply = block = None  # while it waits, this frame must keep no block alive
            if not self._may_call:
                return
            yield stored
            self._all_told = ended

    def _wanted(self, replies: Iterator[list[StoredBlock]]) -> Iterator[StoredBlock]:
        """Yield the blocks of the replies until the reading stops.

        A thread of Ray Data takes them, and calls Ray for each. ``_receive`` ends only after that
        thread, so that the thread calls no Ray that has been shut down.
        """
        for blocks in replies:
            while blocks and self._may_call:
                yield blocks.pop(0)

    def _ask(self) -> ray.ObjectRef | None:
        """Request the pipeline actor's next reply, or return None if Ray must not be called."""
        if not self._may_call:
            return None
        return self._actor.handle.take.remote(self._pipeline_key, self._run)

    @property
    def _may_call(self) -> bool:
        """Whether Ray may be called. After a shutdown, a call would start Ray again."""
        return not self._stopped and ray.is_initialized()

    def stop(self) -> None:
        """Stop reading, because the run is finished or cancelled.

        The threads finish the batch that they decode now, and the call of Ray that they are in.
        Then they end. Nothing is added to the arrivals any more.
        """
        self._stopped = True
        self._decoder.close()

    def join(self, timeout: float) -> None:
        """Wait until the reading thread ends, for at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def _receive(self, decoded: Callable[[], Iterator[Arrival]]) -> None:
        try:
            while True:
                try:
                    for arrival in decoded():
                        if not self._stopped:
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
                        raise  # a shutdown of Ray ends the blocks too
                    DATA_ITERATOR.fail(error)
                    self._lose(error)
        except BaseException as error:
            logger.debug("nothing more can be read", exc_info=True)
            self.replaceable |= isinstance(self._decode.failure, SegmentsUnreadableError)
            # Drop the traceback. Its frames refer to this object, and only the garbage collector
            # would free that reference cycle.
            self._failure = error.with_traceback(None)
        finally:
            self._arrivals.end()

    def _take_in(self, arrival: Arrival) -> None:
        """Add a decoded block to the queue of the training loop."""
        settled.set()
        now = time.perf_counter()
        transfer_s = now - max(self._last_at, self._known_at) - arrival.decode_s
        self._last_at = now
        if arrival.lost:
            self._release_tasks()
        self._arrivals.add(replace(arrival, transfer_s=transfer_s))
        with self._counting:
            self._read += 1
            self._settle()

    def _release_tasks(self) -> None:
        if self._may_call:
            self._actor.handle.release.remote(self._pipeline_key, self._run)

    def _lose(self, error: Exception) -> None:
        """Report the blocks of the last reply as lost, so that their batches are recomputed."""
        self._release_tasks()
        self._arrivals.lose([lost_block(type(error).__name__)])
        with self._counting:
            self._read = self._handed
            self._settle()

    def _note(self, blocks: int, quiet_at: int, losses: list[Loss]) -> None:
        """Record the contents of a reply, apart from its blocks.

        Args:
            blocks: Number of blocks up to and including this reply.
            quiet_at: Number of chunks that are finished once all these blocks are read.
            losses: Blocks or chunks in flight that were lost.
        """
        self._arrivals.lose(losses)
        with self._counting:
            self._notes.append((blocks, quiet_at))
            self._settle()

    def _settle(self) -> None:
        while self._notes and self._notes[0][0] <= self._read:
            self._arrivals.set_quiet(self._notes.popleft()[1])

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the reading; None if there was no error."""
        return self._failure
