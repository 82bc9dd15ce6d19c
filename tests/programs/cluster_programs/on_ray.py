"""A wait for Ray's first worker process."""

from __future__ import annotations

from typing import Any


def on_ray(loader: Any) -> Any:
    """Return a loader as soon as Ray's worker processes make its batches."""
    loader.warm_up(wait=True)
    return loader
