"""A Ray ``DataIterator`` over block references, for ``iter_torch_batches``."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import ray

from dpex.compat.private_names import PrivateName, Shortcut

if TYPE_CHECKING:
    import ray.data

__all__ = ["DATA_ITERATOR", "StoredBlock", "data_iterator"]

StoredBlock = tuple[ray.ObjectRef, int]
"""A block's reference and its size in bytes."""

_INTERFACES = "ray.data._internal.execution.interfaces"

DATA_ITERATOR = Shortcut(
    "read blocks with iter_torch_batches",
    "dpex fetches blocks with ray.get",
    "ray",
    to_bundles=PrivateName(
        "ray.data:DataIterator._to_ref_bundle_iterator",
        "gives Ray Data the blocks",
        check="the number of values that it returns, by its annotation",
    ),
    create=PrivateName(
        "ray.data:DataIterator._create_batch_iterator", "ends a thread that has nothing to do"
    ),
    bundle=PrivateName(_INTERFACES + ":RefBundle", "gives Ray Data the blocks"),
    entry=PrivateName(_INTERFACES + ".ref_bundle:BlockEntry", "gives Ray Data the blocks"),
)
PREFETCHER = Shortcut(
    "end the thread of Ray Data's that prefetches nothing",
    "each epoch leaves a thread",
    "ray",
    prefetcher=PrivateName(
        "ray.data._internal.block_batching.iter_batches:BatchIterator._prefetcher",
        "is the thread",
        of_instances=True,
    ),
)


@functools.cache
def _data_iterator_class() -> Any:
    """Return the class that ``data_iterator`` uses, or None if Ray lacks a private name."""
    found = DATA_ITERATOR.find()
    if found is None:
        return None
    from ray.data import DataContext, DataIterator
    from ray.data.block import BlockMetadata

    # The tuple holds the bundles, statistics (None) and the executor (None). Before Ray 2.60, it
    # also holds whether the reader owns the blocks (False).
    parts = len(get_args(inspect.signature(found["to_bundles"]).return_annotation))
    beside_bundles = (None, False, None) if parts == 4 else (None, None)

    def bundle_of(ref: ray.ObjectRef, size_bytes: int) -> Any:
        metadata = BlockMetadata(num_rows=1, size_bytes=size_bytes, input_files=[], exec_stats=None)
        block = found["entry"](ref, metadata)
        return found["bundle"]([block], schema=None, owns_blocks=False)

    class StoredBlocks(DataIterator):
        """A ``ray.data.DataIterator`` over blocks in the object store.

        It implements the same methods as Ray's own ``StreamSplitDataIterator``.
        """

        def __init__(self, blocks: Iterator[StoredBlock]) -> None:
            self._blocks = blocks

        def _to_ref_bundle_iterator(self) -> tuple[Any, ...]:
            # Not a generator, whose frame would refer to a block that has been read.
            return itertools.starmap(bundle_of, self._blocks), *beside_bundles

        def _create_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
            iterator: Any = super()._create_batch_iterator(*args, **kwargs)
            # With prefetch_batches=0 the prefetcher has nothing to do, but it holds a thread. Every
            # iteration would leave one idle thread.
            if PREFETCHER.find() is not None:
                with PREFETCHER.attempt():
                    if not isinstance(iterator, PREFETCHER.names["prefetcher"].owner()):
                        return iterator
                    iterator._prefetcher.stop()
            return iterator

        def stats(self) -> str:
            """Return an empty string: the pipeline runs in the pipeline actor."""
            return ""

        def schema(self) -> None:
            """Return None: the columns differ from block to block."""

        def get_context(self) -> Any:
            """Return the ``DataContext`` of the current thread."""
            return DataContext.get_current()

    return StoredBlocks


def data_iterator(blocks: Iterator[StoredBlock]) -> ray.data.DataIterator | None:
    """Return a Ray ``DataIterator`` over blocks in the object store.

    Args:
        blocks: The blocks, to which the iterator keeps no reference.

    Returns:
        The iterator, or None if this Ray lacks a private name that it needs.
    """
    if DATA_ITERATOR.usable:
        with DATA_ITERATOR.attempt():
            data_iterator_class = _data_iterator_class()
            return None if data_iterator_class is None else data_iterator_class(blocks)
    return None
