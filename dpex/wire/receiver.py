"""The reader of blocks in the training process: from object references to decoded batches."""

from __future__ import annotations

import itertools
import logging
import pickle
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
from dpex.compat.data_iterator import DATA_ITERATOR, StoredBlock, data_iterator
from dpex.errors import ClusterError
from dpex.protocol.chunks import Part
from dpex.protocol.loss_causes import Loss, joined, lost_block
from dpex.wire.arrivals import Arrival, Arrivals, Decoder
from dpex.wire.block_format import read_block
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

    def __call__(self, block: pa.Table | bytes) -> Arrival | Loss:
        """Decode a block: copy its batches to memory that belongs to them."""
        try:
            return self._decoder(read_block(block))
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
        pin_device: As for ``Decoder``.
        through_client: Whether this process is a Ray Client.

    Attributes:
        failure: The error that ended the reading, or that says why the pipeline is replaceable;
            None if there was no error.
        replaceable: Whether a new pipeline can continue, because a private name of Ray ended this
            one, or because this process cannot read segments.
    """

    def __init__(
        self,
        actor: BlockSource,
        pipeline_key: str,
        run: str,
        arrivals: Arrivals,
        *,
        pin_device: int | None,
        through_client: bool,
    ) -> None:
        self._arrivals = arrivals
        # The stored blocks that are not read yet, and the losses that were reported after them. A
        # block that is lost has its loss in its place.
        self._unread: deque[tuple[StoredBlock, Part] | Loss] = deque()
        self._changing = threading.Lock()
        self.failure: BaseException | None = None
        self.replaceable = False
        self._all_told = False
        self._stopped = False
        self._through_data = False
        self._known_at = self._last_at = 0.0
        self._actor, self._pipeline_key, self._run = actor, pipeline_key, run
        self._decoder = Decoder(run, pin_device)
        self._decode = decode_block = _Decode(self._decoder)
        replies = self._replies()

        def decoded() -> Iterator[Arrival | Loss]:
            # Ray Data does not work through a Ray Client. Some versions of Ray lack the private
            # names that data_iterator needs.
            blocks = None if through_client else data_iterator(self._wanted(self._stored(replies)))
            self._through_data = blocks is not None
            if blocks is None:
                return map(decode_block, _fetched(self._stored(replies)))
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
                reply = pickle.loads(reply)
            # Request the next reply now, so that it arrives while these blocks are read.
            request = None if reply.ended else self._ask()
            self._known_at = time.perf_counter()
            stored: list[tuple[StoredBlock, Part]] = []
            for block, size_bytes, part in reply.blocks:
                if isinstance(block, ray.ObjectRef):
                    stored.append(((block, size_bytes), part))
                else:
                    self._take_in(self._decode(block))
            with self._changing:
                self._unread.extend(stored)
                self._unread.extend(reply.losses)
            self._report_losses()
            ended = reply.ended
            if reply.replaceable:
                self.replaceable = True
                self.failure = ClusterError(joined(reply.losses))
            blocks = [entry[0] for entry in stored]
            # While it waits, this frame must keep no block alive. The caller empties ``blocks``.
            reply = block = None
            stored.clear()
            if not self._may_call:
                return
            yield blocks
            self._all_told = ended

    def _stored(self, replies: Iterator[list[StoredBlock]]) -> Iterator[list[StoredBlock]]:
        """Return the blocks that an earlier reader was given and has not read, and then the others.

        The caller empties each list, because the iterator keeps it.
        """
        with self._changing:
            unread = [entry[0] for entry in self._unread if not isinstance(entry, Loss)]
        # Unlike a generator, it does not close ``replies`` when the reader drops it.
        return itertools.chain([unread], replies)

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

    def _receive(self, decoded: Callable[[], Iterator[Arrival | Loss]]) -> None:
        try:
            while True:
                try:
                    for arrival in decoded():
                        if not self._stopped:
                            self._take_in(arrival)
                        self._report_losses(read=1)
                    if self._all_told or not self._may_call:
                        break
                    raise RuntimeError("the blocks ended before the last one")
                except ray.exceptions.ObjectLostError as error:
                    if not self._lose(error):
                        raise
                except ray.exceptions.RayError:
                    raise
                except Exception as error:
                    if error is self._decode.failure or not self._through_data:
                        raise
                    if self._stopped or not self._actor.connected:
                        raise  # a shutdown of Ray ends the blocks too
                    DATA_ITERATOR.fail(error)
        except BaseException as error:
            logger.debug("nothing more can be read", exc_info=True)
            self.replaceable |= isinstance(self._decode.failure, SegmentsUnreadableError)
            # Drop the traceback. Its frames refer to this object, and only the garbage collector
            # would free that reference cycle.
            self.failure = error.with_traceback(None)
        finally:
            self._unread.clear()
            self._arrivals.end()

    def _take_in(self, news: Arrival | Loss) -> None:
        """Add a decoded block, or its loss, to the queue of the training loop."""
        now = time.perf_counter()
        if isinstance(news, Arrival):
            transfer_s = now - max(self._last_at, self._known_at) - news.decode_s
            news = replace(news, transfer_s=transfer_s)
        self._last_at = now
        self._arrivals.add(news)

    def _lose(self, error: ray.exceptions.ObjectLostError) -> bool:
        """Put a loss in the place of the block that Ray has lost; return whether it is a block.

        The next reader gets the other blocks that have not been read.
        """
        with self._changing:
            for place, entry in enumerate(self._unread):
                if not isinstance(entry, Loss) and entry[0][0].hex() == error.object_ref_hex:
                    self._unread[place] = lost_block(type(error).__name__, entry[1])
                    break
            else:
                return False
        self._report_losses()
        return True

    def _report_losses(self, read: int = 0) -> None:
        """Report the losses before which no block is left to be read.

        Args:
            read: Number of blocks that have been read since the last call.
        """
        with self._changing:
            for _ in range(read):
                self._unread.popleft()
            while self._unread and isinstance(loss := self._unread[0], Loss):
                self._unread.popleft()
                self._arrivals.add(loss)
