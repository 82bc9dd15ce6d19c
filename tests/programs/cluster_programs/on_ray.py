"""A wait for Ray, for programs that test its worker processes and not first workers."""

from __future__ import annotations

from typing import Any

from dpex.training.starting_session import StartingSession


def session_of(loader: Any) -> Any:
    """Return the session of a loader as soon as Ray's worker processes make its batches."""
    session = loader._warmed if loader._cluster is None else loader._cluster.session
    return session.started() if isinstance(session, StartingSession) else session


def on_ray(loader: Any) -> Any:
    """Return a loader as soon as Ray's worker processes make its batches."""
    loader.warm_up(wait=True)
    return loader
