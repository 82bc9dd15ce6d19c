"""A wait for Ray, for programs that read the memory of its worker processes."""

from __future__ import annotations

from typing import Any


def on_ray(loader: Any) -> Any:
    """Return a loader as soon as one of Ray's worker processes waits for its work."""
    loader.warm_up(wait=True)
    return loader
