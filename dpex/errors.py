"""The exceptions that dpex defines.

All of them can be imported from ``dpex``. The brackets name the built-in base class::

    DpexError
    ├── BatchLostError        (RuntimeError)           worker processes died, or the pipeline ended
    ├── ClusterError          (ConnectionError)        no usable Ray at head_address
    ├── DatasetTooLargeError  (MemoryError)            the dataset does not fit the object store
    ├── NodeDataError         (RuntimeError)           a dataset differs between nodes
    ├── SerializationError    (pickle.PicklingError)   an object cannot be sent to a worker process
    └── TooManySkippedError   (RuntimeError)           more samples failed than max_skipped

An exception that user code raises in a worker process keeps its type, as in torch.
"""

from __future__ import annotations

import pickle

__all__ = [
    "BatchLostError",
    "ChunkLostError",
    "ClusterError",
    "DatasetTooLargeError",
    "DpexError",
    "NodeDataError",
    "SerializationError",
    "TooManySkippedError",
]


class DpexError(Exception):
    """Base class of the exceptions that dpex defines."""


class BatchLostError(DpexError, RuntimeError):
    """A batch that dpex cannot deliver: its worker processes died, or its pipeline ended.

    dpex first recomputes a lost batch. Iteration raises this error at the batch if every worker
    process that computes it dies. Iteration also raises it if the pipeline ends early, the loader
    is closed, or Ray is shut down or lost. torch too raises a ``RuntimeError`` if a worker dies.
    """


ChunkLostError = BatchLostError
"""The old name of ``BatchLostError``."""


class ClusterError(DpexError, ConnectionError):
    """No usable Ray at ``head_address``.

    No cluster answers, or a local Ray does not start. Or the nodes cannot run the workers: they
    have another version of Python or Ray, or lack a resource that a worker requests. Or Ray cannot
    run this process's interpreter or dpex, because the program is frozen or dpex is in an archive.
    """


class DatasetTooLargeError(DpexError, MemoryError):
    """The pickled dataset is larger than Ray's object store on this node."""


class NodeDataError(DpexError, RuntimeError):
    """A dataset differs between nodes, or cannot be built in the training process.

    A dataset of ``on_node`` has another length on a node, or its length is unknown because the
    training process cannot build it. Or a node lacks a file that the dataset maps into memory.
    """


class SerializationError(DpexError, pickle.PicklingError):
    """An object that dpex cannot send to another process.

    The object cannot be pickled, or other nodes cannot share its memory. The message names the
    attribute, for example ``loader.dataset.lock``.
    """


class TooManySkippedError(DpexError, RuntimeError):
    """More samples of an epoch failed than ``max_skipped`` allows, with ``on_error="skip"``."""
