"""Calls of ``ray.init`` by the program and by dpex, which wait for each other.

dpex starts a local Ray in a thread of its own. Meanwhile the program may call ``ray.init``, and Ray
calls it by itself at the first remote call of a process. Two calls at once would start two nodes,
and both calls would fail.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dpex import tuning
from dpex.errors import ClusterError

__all__ = [
    "ConnectedMeanwhile",
    "exclusive_init",
    "rays_init",
    "wait_for_program",
    "waits_for_program",
]

logger = logging.getLogger("dpex")

_waits = False


class ConnectedMeanwhile(BaseException):
    """The program has connected this process to Ray while dpex prepared to do so.

    This is no ``Exception``: what handles a failed start must not shut down the program's Ray.
    """


@contextlib.contextmanager
def exclusive_init() -> Iterator[None]:
    """Wait for a call of ``ray.init`` in progress, and let later calls wait for the context.

    A call without an address then accepts the Ray that dpex has started. A call with an address
    gets Ray's answer to a second call, which is an error by default.

    The context has no effect in another such context, and before Ray is imported.

    Raises:
        ConnectedMeanwhile: The program has connected this process.
        ClusterError: As for ``wait_for_program``.
    """
    if "ray" not in sys.modules:
        yield
        return
    import ray  # another thread may still be importing it

    original: Any = ray.init
    if hasattr(original, "rays_init"):
        yield
        return
    ended = threading.Event()
    process, thread = os.getpid(), threading.get_ident()

    @functools.wraps(original)
    def init(*args: Any, **options: Any) -> Any:
        # Nothing would end the wait of this thread, or of a fork of this process.
        if not (ended.is_set() or threading.get_ident() == thread or os.getpid() != process):
            ended.wait()
            if ray.is_initialized() and not (args or options.get("address")):
                _warn_of_options(options)
                options["ignore_reinit_error"] = True
        return original(*args, **options)

    setattr(init, "rays_init", original)  # noqa: B010  # mypy knows no attributes of functions
    ray.init = init
    try:
        wait_for_program()
        if ray.is_initialized():
            raise ConnectedMeanwhile
        yield
    finally:
        if ray.init is init:
            ray.init = original
        ended.set()


def _warn_of_options(options: dict[str, Any]) -> None:
    without_effect = sorted(options.keys() - {"ignore_reinit_error"})
    if without_effect:
        logger.warning(
            "ray.init was called with %s while dpex started a local Ray. The call uses that Ray, "
            "and these arguments have no effect. Call ray.init before iter()",
            ", ".join(without_effect),
        )


def rays_init() -> Callable[..., Any]:
    """Return ``ray.init`` itself, which dpex calls in the context."""
    import ray

    init: Any = ray.init
    original: Callable[..., Any] = getattr(init, "rays_init", init)
    return original


def waits_for_program() -> bool:
    """Return whether dpex waits for the program's call of ``ray.init``."""
    return _waits


def wait_for_program() -> None:
    """Wait until no other thread is in ``ray.init``.

    Raises:
        ClusterError: A call has not returned in time, or Python exits without waiting for it.
    """
    global _waits
    here = threading.get_ident()
    deadline = time.monotonic() + tuning.START_S
    try:
        while callers := [t for t in threading.enumerate() if t.ident != here and _is_in_init(t)]:
            _waits = True
            # At its exit, Python waits for this thread, but not for daemon threads.
            alive = threading.main_thread().is_alive() or not all(t.daemon for t in callers)
            if time.monotonic() > deadline or not alive:
                raise ClusterError(
                    "another thread of this process is still in ray.init, for which dpex waits "
                    f"{tuning.START_S:g} s at most. Wait for it, and start the epoch again"
                )
            time.sleep(tuning.LOOK_S)
    finally:
        _waits = False


def _is_in_init(thread: threading.Thread) -> bool:
    init = getattr(sys.modules.get("ray"), "init", None)  # absent while Ray is being imported
    code = getattr(inspect.unwrap(init), "__code__", None) if init is not None else None
    frame = sys._current_frames().get(thread.ident or 0) if code is not None else None
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
