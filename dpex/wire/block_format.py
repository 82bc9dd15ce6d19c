"""Batches as one Arrow row, and back.

A frame holds the consecutive batches of one block: small buffers are gathered in one column, a
large one is a column of its own, so that the only copy of a large tensor on this side is the one
into Ray's object store. The reader copies every buffer once, straight into memory that belongs
to the batch: pinned memory where pinning is on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from dpex.compat.torch_names import ExceptionWrapper
from dpex.compat.torch_names import pin_memory as pin
from dpex.wire.buffer_pool import MemoryPool
from dpex.wire.pickling import Pickled, load
from dpex.wire.timings import Costs

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BLOCK_LOST", "Block", "BlockWriter", "Entry", "decode", "read_block"]

BLOCK_LOST = "a block was lost"
"""The beginning of an error's text where a block died with the process that had made it."""


# Below this size a memcpy is cheaper than one more Arrow column.
_OWN_COLUMN_BYTES = 1 << 20
_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """One batch on its way to the training loop.

    Attributes:
        batch: Number of the batch in its epoch.
        value: The batch, or the ``ExceptionWrapper`` in its place; pickled, until it is decoded.
        outcome: Which of these it is; ``"nothing"`` where all samples were left out, ``"end"``
            where a stream has ended before.
        left_out: Samples that could not be read, each as its index and the error.
        samples: How many a stream's batch has.
        state: Where its stream stands after it, packed, if the stream can say so.
    """

    batch: int
    value: Any
    outcome: Literal["batch", "error", "nothing", "end"] = "batch"
    left_out: tuple[tuple[Any, str], ...] = ()
    samples: int = 0
    state: bytes | None = None


@dataclass(frozen=True)
class Block:
    """What one block holds besides its batches.

    Attributes:
        run: Identity of the iteration that the block belongs to.
        chunk: Number of the chunk in its iteration.
        entries: The batches, in order.
        costs: What the batches took in the workers.
        size_bytes: Bytes of the block.
        origin: The task that made it, and the process; empty where nobody asks.
    """

    run: str
    chunk: int
    entries: list[Entry]
    costs: Costs
    size_bytes: int
    origin: tuple[str, str]


def _binary_column(data: Any, size: int) -> pa.Array:
    """Wrap memory as one large_binary value (int64 offsets: no 2 GiB limit), without a copy."""
    import pyarrow as pa

    offsets = np.array([0, size], dtype=np.int64)
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), data])


class BlockWriter:
    """Collects the batches of one block.

    Args:
        run: Identity of the iteration that they belong to.
        chunk: Number of their chunk.
        costs: What they took before.
        origin: The task that makes it, and the process.
    """

    def __init__(
        self,
        run: str,
        chunk: int,
        costs: Costs | None = None,
        *,
        origin: tuple[str, str] = ("", ""),
    ) -> None:
        self._run = run
        self._origin = origin
        self._chunk = chunk
        self._clear()
        self._costs.add(costs or Costs())

    def _clear(self) -> None:
        self._entries: list[Entry] = []
        self._costs = Costs()
        self.size_bytes = 0

    def add(self, entry: Entry, costs: Costs) -> None:
        """Take one batch and what it cost; its buffers stay where they are."""
        self._entries.append(entry)
        self._costs.add(costs)
        self.size_bytes += entry.value.size_bytes

    def table(self) -> pa.Table:
        """Return the block and start the next one.

        Returns:
            A table of one row of large_binary columns: ``head``, ``small`` and one column for
            each large buffer.
        """
        import pyarrow as pa  # a fifth of a second, which `import dpex` does without

        placements: list[list[tuple[int, int, int]]] = []
        columns: dict[str, pa.Array] = {}
        small: list[tuple[int, np.ndarray[Any, Any]]] = []
        end = 0
        for entry in self._entries:
            places: list[tuple[int, int, int]] = []
            for buffer in entry.value.buffers:
                if buffer.nbytes >= _OWN_COLUMN_BYTES:
                    places.append((len(columns), 0, buffer.nbytes))
                    columns[f"buffer{len(columns)}"] = _binary_column(
                        pa.py_buffer(buffer), buffer.nbytes
                    )
                else:
                    places.append((-1, end, buffer.nbytes))
                    small.append((end, buffer))
                    end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
            placements.append(places)
        gathered = np.empty(end, dtype=np.uint8)
        for start, buffer in small:
            gathered[start : start + buffer.nbytes] = buffer
        head = pickle.dumps(
            (
                self._run,
                self._chunk,
                self._origin,
                self._costs.plain(),
                [
                    (replace(e, value=None), e.value.head, e.value.slots, places)
                    for e, places in zip(self._entries, placements, strict=True)
                ],
            ),
            protocol=5,
        )
        self._clear()
        return pa.table(
            {
                "head": _binary_column(pa.py_buffer(head), len(head)),
                "small": _binary_column(pa.py_buffer(gathered), end),
                **columns,
            }
        )


def _view(table: pa.Table, column: int) -> np.ndarray[Any, Any]:
    """Return the bytes of a one-row large_binary column, without a copy."""
    array = table.column(column).chunk(0)
    start, end = np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + 2]
    data = array.buffers()[2]
    if data is None:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(data, dtype=np.uint8)[start:end]


def read_block(table: pa.Table) -> Block:
    """Read a block's header; the batches' buffers remain views of the block.

    Args:
        table: A block as ``FrameWriter.table`` made it.
    """
    run, chunk, origin, costs, rows = pickle.loads(_view(table, 0).tobytes())
    gathered = _view(table, 1)
    entries = []
    for entry, head, slots, places in rows:
        buffers = [
            gathered[start : start + size] if column < 0 else _view(table, column + 2)
            for column, start, size in places
        ]
        entries.append(replace(entry, value=Pickled(head, buffers, *slots)))
    return Block(run, chunk, entries, Costs(*costs), table.nbytes, origin)


def _copy_pinned(buffer: np.ndarray[Any, Any]) -> torch.Tensor:
    own = torch.empty(buffer.nbytes, dtype=torch.uint8, pin_memory=True)
    np.copyto(own.numpy(), buffer)
    return own


def decode(block: Block, pool: MemoryPool, *, pin_memory: bool) -> Iterator[Entry]:
    """Yield the batches, each in memory of its own.

    Args:
        block: What ``read_block`` returned, its block still alive.
        pool: Where the batches' memory is from, unless it is page-locked.
        pin_memory: Put the batches' arrays into page-locked memory.
    """
    for entry in block.entries:
        outcome = entry.outcome
        try:
            if pin_memory and outcome == "batch":
                # What is pinned stays; torch's own pass does small tensors and user classes.
                value = pin(load(entry.value, _copy_pinned))
            else:
                value = load(entry.value, pool.copy)
        except Exception:
            outcome = "error"
            value = ExceptionWrapper(where=f"while batch {entry.batch} was unpacked")
        yield replace(entry, value=value, outcome=outcome)
