"""Exit of a fork of this process, which leaves the Ray of this process alone."""

from __future__ import annotations

import atexit
import ctypes
import sys
from typing import TYPE_CHECKING, cast

from dpex.compat.late_calls import disconnect_fork

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["leave_ray_to_parent"]


class _HandlersOfRay:
    """Equal to each function of Ray, so that ``atexit.unregister`` finds Ray's exit handlers."""

    def __eq__(self, other: object) -> bool:
        module = getattr(other, "__module__", None)
        return isinstance(module, str) and module.partition(".")[0] == "ray"

    __hash__ = None  # type: ignore[assignment]


def leave_ray_to_parent(*, connected: bool) -> None:
    """Make this fork of a driver exit without Ray's exit handlers and destructors.

    Args:
        connected: Whether the parent was connected, and not only about to start Ray.
    """
    if connected:
        disconnect_fork()
    # The user's exit handlers still run, because handlers run in the reverse order.
    atexit.register(_forget_ray)


def _forget_ray() -> None:
    """Keep Ray's code from the parent's connection for the rest of this exit.

    Ray's exit handlers write to sockets that the fork shares with its parent. Then both processes
    wait forever for answers. Python's and the C library's end free Ray's objects, whose destructors
    wait for threads that a fork does not have, or crash.
    """
    atexit.unregister(cast("Callable[[], None]", _HandlersOfRay()))
    modules = [module for name, module in list(sys.modules.items()) if _is_kept(name)]
    kept = [list(vars(module).values()) for module in modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # Python frees none of these objects
    library = ctypes.CDLL(None)
    if "ray._raylet" in sys.modules and hasattr(library, "on_exit"):  # in the GNU C library
        # The C library calls both before the destructors, in the reverse order, and `_exit` with
        # the exit status. Python has flushed its streams by then; `fflush(NULL)` flushes C's.
        library.on_exit(library._exit, None)
        library.__cxa_atexit(library.fflush, None, None)


def _is_kept(module: str) -> bool:
    return module.partition(".")[0] in {"ray", "dpex"}
