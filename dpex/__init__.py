"""Feed PyTorch training from a whole cluster's CPUs by changing one line.

    from dpex import DataLoader

With a Ray cluster, the workers of the loader are tasks of a Ray Data pipeline. Without one, they
are processes of this machine. ``import dpex`` imports neither torch nor Ray. The first access to a
public name imports its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpex.log import show_messages

if TYPE_CHECKING:
    from dpex import dataloader
    from dpex.carriers.ray.worker_options import WorkerOptions
    from dpex.dataloader import DataLoader, DpexDataLoader
    from dpex.errors import (
        BatchLostError,
        ChunkLostError,
        ClusterError,
        DatasetTooLargeError,
        DpexError,
        NodeDataError,
        SerializationError,
        TooManySkippedError,
    )
    from dpex.stats import LoaderStats

__version__ = "0.1.0"

__all__ = [
    "BatchLostError",
    "ChunkLostError",
    "ClusterError",
    "DataLoader",
    "DatasetTooLargeError",
    "DpexDataLoader",
    "DpexError",
    "LoaderStats",
    "NodeDataError",
    "SerializationError",
    "TooManySkippedError",
    "WorkerOptions",
    "dataloader",
]

show_messages()


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "dataloader":
        return import_module("dpex.dataloader")
    if name in {"DataLoader", "DpexDataLoader"}:
        return getattr(import_module("dpex.dataloader"), name)
    if name == "LoaderStats":
        return import_module("dpex.stats").LoaderStats
    if name == "WorkerOptions":
        return import_module("dpex.carriers.ray.worker_options").WorkerOptions
    if name in __all__:
        return getattr(import_module("dpex.errors"), name)
    raise AttributeError(f"module 'dpex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
