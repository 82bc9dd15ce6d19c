"""The format of a block, which holds consecutive batches: a pickle, with large buffers apart.

A message carries the pickle of a small block. Ray's object store has any other block as one Arrow
row: one column holds all small buffers, and each large buffer has a separate column. Thus the
writer copies a large tensor only once, into Ray's object store. The reader copies every buffer
once, into memory that belongs to the batch. With ``pin_memory`` this memory is pinned.

If the reader is on the same machine, large tensors are in segments. The writer then copies only
those that are not in a segment yet, and the reader copies none, except to pinned memory.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpex import tuning
from dpex.compat.torch_names import ExceptionWrapper
from dpex.protocol.chunks import Entry, Part
from dpex.wire.pickling import Bytes, Pickled, load, own_copy
from dpex.wire.pinning import pinned
from dpex.wire.segments import Place, SegmentPool, SegmentReader
from dpex.wire.timings import Costs

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Block", "BlockWriter", "decode", "places_in", "read_block"]


@dataclass(frozen=True)
class Block:
    """The content of one block.

    Attributes:
        run: Key of the iteration that the block belongs to.
        chunk: Number of the chunk in its iteration.
        entries: The batches, in order.
        costs: Costs of the batches in the worker processes.
        size_bytes: Size of the block in bytes.
    """

    run: str
    chunk: int
    entries: list[Entry]
    costs: Costs
    size_bytes: int

    @property
    def part(self) -> Part:
        """The batches of the block."""
        return Part(self.run, self.chunk, tuple(entry.batch for entry in self.entries))


def _binary_column(memory: Any) -> pa.Array:
    """Return memory as a column of one large_binary value, without a copy.

    large_binary has int64 offsets, and thus no limit of 2 GiB.
    """
    import pyarrow as pa

    data = pa.py_buffer(memory)
    offsets = np.array([0, data.size], dtype=np.int64)
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), data])


class BlockWriter:
    """Writer of blocks, one after another, for the batches of one chunk.

    Args:
        run: Key of the iteration that the chunk belongs to.
        chunk: Number of the chunk.
        costs: Earlier costs of the batches, which the first block includes.
        segments: Segments for tensors, if the training process reads the blocks.

    Attributes:
        batch_bytes: Size in bytes of the batches in the present block.
        size_bytes: The same without the tensors in segments.
    """

    def __init__(
        self,
        run: str,
        chunk: int,
        costs: Costs | None = None,
        *,
        segments: SegmentPool | None = None,
    ) -> None:
        self._run = run
        self._segments = segments
        self._chunk = chunk
        self._clear()
        self._costs.add(costs or Costs())

    def _clear(self) -> None:
        self._entries: list[Entry] = []
        self._costs = Costs()
        self.batch_bytes = self.size_bytes = 0

    def add(self, entry: Entry, costs: Costs) -> None:
        """Add one batch and its costs to the block, without a copy of its buffers.

        Large tensors that are not in a segment yet are copied to one, if there are segments.
        """
        batch = entry.value
        self.batch_bytes += batch.size_bytes
        if self._segments is not None:
            batch = replace(batch, buffers=list(batch.buffers))
            for slot in _tensors(batch, tuning.SEGMENT_BYTES):
                _place(self._segments, batch.buffers, slot)
        self._entries.append(replace(entry, value=batch))
        self._costs.add(costs)
        self.size_bytes += len(batch.head) + len(entry.state or b"")
        self.size_bytes += sum(b.nbytes for b in batch.buffers if not isinstance(b, Place))

    def _shorten(self) -> None:
        """Copy a few tensors of a block to segments, if a message can then carry the rest."""
        rest, small = self.size_bytes, tuning.SMALL_BYTES - tuning.ENTRY_BYTES * len(self._entries)
        if self._segments is None or rest < small:
            return
        largest = sorted(
            (
                (batch.buffers, slot)
                for batch in (entry.value for entry in self._entries)
                for slot in _tensors(batch, tuning.LEAST_SEGMENT_BYTES)
            ),
            key=lambda found: -found[0][found[1]].nbytes,
        )
        chosen = []
        for buffers, slot in largest[: tuning.SEGMENTS_FOR_BLOCK]:
            chosen.append((buffers, slot))
            rest -= buffers[slot].nbytes
            if rest < small:
                for buffers, slot in chosen:
                    size_bytes = buffers[slot].nbytes
                    _place(self._segments, buffers, slot)
                    if isinstance(buffers[slot], Place):  # else all segments are in use
                        self.size_bytes -= size_bytes
                return

    def _block(self) -> Block:
        return Block(self._run, self._chunk, self._entries, self._costs, self.batch_bytes)

    @property
    def part(self) -> Part:
        """The batches of the present block."""
        return self._block().part

    def block(self) -> Block:
        """Return the block, whose batches are still pickled, and start the next one."""
        block = self._block()
        self._clear()
        return block

    def message(self) -> bytes | None:
        """Return the block for ``read_block`` and start the next one; None if it is not small."""
        self._shorten()
        if self.size_bytes >= tuning.SMALL_BYTES:
            return None
        packed = _packed(self._block())
        if len(packed) >= tuning.SMALL_BYTES:
            return None
        self._clear()
        return packed

    def table(self) -> pa.Table:
        """Return the block as a row of a table and start the next one.

        Returns:
            A table of one row and large_binary columns: the pickle with the sizes of its buffers,
            all small buffers, and each large buffer.
        """
        import pyarrow as pa  # takes 0.2 s, so `import dpex` does not import it

        self._shorten()
        buffers: list[pickle.PickleBuffer] = []
        stream = _packed(self._block(), buffers.append)
        self._clear()
        views = [buffer.raw() for buffer in buffers]
        head = pickle.dumps((stream, [view.nbytes for view in views]), protocol=5)
        small = b"".join(view for view in views if view.nbytes < tuning.LARGE_ARRAY_BYTES)
        large = (view for view in views if view.nbytes >= tuning.LARGE_ARRAY_BYTES)
        columns = map(_binary_column, (head, small, *large))
        return pa.table({f"part{number}": column for number, column in enumerate(columns)})


def _packed(block: Block, take: Callable[[pickle.PickleBuffer], object] | None = None) -> bytes:
    """Return the pickle of a block, without its buffers if ``take`` gets them."""
    # Not as arrays: a pickled array names modules of numpy, which differ between versions.
    return pickle.dumps(_with_buffers(block, pickle.PickleBuffer), 5, buffer_callback=take)


def _place(segments: SegmentPool, buffers: list[Any], slot: int) -> None:
    """Replace a buffer by its place in a segment, if there is a segment for it."""
    buffers[slot] = segments.place(buffers[slot]) or buffers[slot]


def _tensors(batch: Pickled, least_bytes: int) -> list[int]:
    """Return the slots of a batch's tensors of at least this size that are not in a segment.

    Other arrays stay private: a fork of the training process shares its tensors, as in torch.
    """
    return [
        slot
        for slot in sorted(batch.tensor_slots)
        if not isinstance(batch.buffers[slot], Place) and batch.buffers[slot].nbytes >= least_bytes
    ]


def _view(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return the bytes of a one-row large_binary column, read-only and without a copy."""
    array = column.chunk(0)
    start, end = np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + 2]
    view = np.frombuffer(array.buffers()[2] or b"", dtype=np.uint8)[start:end]
    view.flags.writeable = False
    return view


def read_block(block: pa.Table | bytes) -> Block:
    """Return the content of a block that ``BlockWriter.table`` or ``message`` returned.

    The buffers of its batches are read-only views of the table, their own memory, or places in
    segments.
    """
    if isinstance(block, bytes):
        read: Block = pickle.loads(block)
    else:
        head, small, *large = map(_view, block.columns)
        stream, sizes = pickle.loads(head.data)
        read = pickle.loads(stream, buffers=_buffers(sizes, small, iter(large)))
    return _with_buffers(read, functools.partial(np.frombuffer, dtype=np.uint8))


def _buffers(sizes: list[int], small: Bytes, large: Iterator[Bytes]) -> Iterator[Bytes]:
    """Yield the buffers of a block in the order of their sizes."""
    start = 0
    for size in sizes:
        if size >= tuning.LARGE_ARRAY_BYTES:
            yield next(large)
        else:
            yield small[start : start + size]
            start += size


def _with_buffers(block: Block, convert: Callable[[Any], Any]) -> Block:
    """Return a block whose buffers are converted, apart from those in segments."""
    entries = []
    for entry in block.entries:
        buffers = [b if isinstance(b, Place) else convert(b) for b in entry.value.buffers]
        entries.append(replace(entry, value=replace(entry.value, buffers=buffers)))
    return replace(block, entries=entries)


def decode(block: Block, segments: SegmentReader, *, pin_memory: bool) -> Iterator[Entry]:
    """Yield the batches of a block, unpickled into memory that belongs to each batch.

    Args:
        block: The result of ``read_block``, whose table must still be alive, or a block that this
            process has unpickled.
        segments: The segments of worker processes on this machine.
        pin_memory: Whether to copy the batches' arrays to pinned memory.

    Raises:
        SegmentLostError: A worker process has ended, and with it the memory of a batch.
    """
    for entry in block.entries:
        outcome = entry.outcome
        buffers = [segments.view(b) if isinstance(b, Place) else b for b in entry.value.buffers]
        batch = replace(entry.value, buffers=buffers)
        del buffers
        try:
            value = pinned(batch) if pin_memory and outcome == "batch" else load(batch, _owned)
        except Exception:
            outcome = "error"
            value = ExceptionWrapper(where=f"while batch {entry.batch} was unpacked")
        del batch  # the consumer alone decides how long its memory is in use
        yield replace(entry, value=value, outcome=outcome)


def places_in(block: Block) -> list[Place]:
    """Return the places of a block's batches in segments."""
    return [b for entry in block.entries for b in entry.value.buffers if isinstance(b, Place)]


def _owned(buffer: Bytes) -> Bytes:
    """Return a buffer that belongs to the batch: itself, or a copy of a view of a table."""
    return buffer if buffer.flags.writeable else own_copy(buffer)
