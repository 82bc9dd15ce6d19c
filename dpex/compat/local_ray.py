"""A local Ray that only this machine can reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dpex.compat.shortcut import PrivateName, Shortcut, replaced

__all__ = ["LOOPBACK", "on_loopback"]

_SINGLE_HOST = PrivateName(
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    "makes Ray listen on the loopback address",
    check="a test looks at the addresses",
)
LOOPBACK = Shortcut(
    "keep a local Ray on the loopback address",
    "its ports can be reached from other hosts, by those who have its token",
    "ray",
    single_host=_SINGLE_HOST,
)


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make ``ray.init`` start or join a Ray that listens on the loopback address alone.

    By default, Ray replaces the loopback address by another address of the machine, and then
    listens on all interfaces. It keeps the loopback address on systems without Ray clusters, such
    as macOS.
    """
    if LOOPBACK.find() is None:
        yield
        return
    with replaced({_SINGLE_HOST: False}):
        yield
