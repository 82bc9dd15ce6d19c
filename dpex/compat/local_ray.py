"""A local Ray that only this machine can reach, and that ends with dpex alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from dpex.compat.private_names import PrivateName, Shortcut, replaced

__all__ = ["LOOPBACK", "OWN_GROUPS", "in_own_groups", "on_loopback"]

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
_POPEN = PrivateName(
    "ray._private.services:ConsolePopen",
    "gives Ray's processes process groups of their own",
    check="it can be called, and a test looks at the groups",
)
OWN_GROUPS = Shortcut(
    "keep Jupyter from ending a local Ray before the program",
    "a kernel that is shut down ends some seconds later, and its exit handlers do not run",
    "ray",
    popen=_POPEN,
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


@contextlib.contextmanager
def in_own_groups() -> Iterator[None]:
    """Make ``ray.init`` start Ray's processes in process groups of their own.

    A kernel of Jupyter that shuts down first ends the processes of its own group, and waits for
    them. Ray ends this process as soon as the raylet has ended, so no exit handler would run.
    """
    found = OWN_GROUPS.find_checked(popen=callable)
    if found is None:
        yield
        return
    with replaced({_POPEN: functools.partial(found["popen"], process_group=0)}):
        yield
