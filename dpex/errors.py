"""What dpex raises of its own.

In brackets: what else an error is. All of them can be imported from ``dpex``::

    DpexError
    ├── ChunkLostError        (RuntimeError)           workers died on these indices, every time
    ├── ClusterError          (ConnectionError)        no usable Ray at head_address
    ├── DatasetTooLargeError  (MemoryError)            the dataset does not fit the object store
    ├── NodeDataError         (RuntimeError)           a node has not the files that others have
    ├── SerializationError    (pickle.PicklingError)   something cannot travel to a worker
    └── TooManySkippedError   (RuntimeError)           more samples cannot be read than is allowed

What the user's own code raises in a worker keeps its type, as in torch.
"""

from __future__ import annotations

import pickle

__all__ = [
    "ChunkLostError",
    "ClusterError",
    "DatasetTooLargeError",
    "DpexError",
    "NodeDataError",
    "SerializationError",
    "TooManySkippedError",
]


class DpexError(Exception):
    """Base of every error that dpex raises of its own."""


class ChunkLostError(DpexError, RuntimeError):
    """Worker processes died on the same batch until its tries were used up."""


class ClusterError(DpexError, ConnectionError):
    """No usable Ray cluster at ``head_address``."""


class DatasetTooLargeError(DpexError, MemoryError):
    """The pickled dataset is larger than Ray's object store."""


class NodeDataError(DpexError, RuntimeError):
    """A dataset is not the same on every node, or cannot be built where its length is asked for."""


class SerializationError(DpexError, pickle.PicklingError):
    """An object on its way to a worker cannot be pickled; names the attribute that cannot."""


class TooManySkippedError(DpexError, RuntimeError):
    """With ``on_error="skip"``, more samples of an epoch failed than ``max_skipped`` allows."""
