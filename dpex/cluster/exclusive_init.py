"""Calls of ``ray.init`` by the program and by dpex, which wait for each other.

dpex starts a local Ray in a thread of its own. Meanwhile the program may call ``ray.init``, and Ray
calls it by itself at the first remote call of a process. Two calls at once would start two nodes,
and both calls would fail.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dpex import tuning
from dpex.errors import ClusterError

__all__ = ["exclusive_init", "is_in_init", "rays_init"]

_guard: _Guard | None = None


@contextlib.contextmanager
def exclusive_init() -> Iterator[None]:
    """Wait for a call of ``ray.init`` that has started, and let later calls wait for the context.

    A call without arguments, such as Ray's own, then accepts the Ray that dpex has started. Any
    other call gets Ray's answer to a second call, which is an error by default.

    Raises:
        ClusterError: A call of ``ray.init`` has not returned in time.
    """
    global _guard
    _guard = _Guard()
    try:
        _guard.put_up()
        yield
    finally:
        _guard.remove()
        _guard = None


def rays_init() -> Callable[..., Any]:
    """Return ``ray.init`` for dpex itself, which does not wait for the context to end."""
    import ray

    init: Callable[..., Any] = ray.init
    return init if _guard is None or _guard.rays_init is None else _guard.rays_init


def is_in_init(thread: threading.Thread) -> bool:
    """Return whether a thread is in Ray's own ``ray.init``."""
    init = getattr(sys.modules.get("ray"), "init", None)  # absent while Ray is being imported
    code = getattr(inspect.unwrap(init), "__code__", None) if init is not None else None
    frame = sys._current_frames().get(thread.ident or 0) if code is not None else None
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


class _Guard(MetaPathFinder):
    """Replaces ``ray.init``, now or as soon as a thread has imported Ray.

    Attributes:
        rays_init: Ray's own function; None until it is replaced.
    """

    def __init__(self) -> None:
        self.rays_init: Callable[..., Any] | None = None
        self._lock = threading.Lock()
        self._removed = threading.Event()

    def put_up(self) -> None:
        """Replace ``ray.init``, and wait for a call that another thread has made."""
        sys.meta_path.insert(0, self)
        if "ray" in sys.modules:
            import ray  # another thread may be importing it

            self._replace(ray)
        here = threading.get_ident()
        others = [thread for thread in threading.enumerate() if thread.ident != here]
        deadline = time.monotonic() + tuning.START_S
        while any(is_in_init(thread) for thread in others):
            if time.monotonic() > deadline:
                raise ClusterError(
                    "another thread of this process has called ray.init, which has not returned "
                    f"within {tuning.START_S:g} s. Wait for it, and start the epoch again"
                )
            time.sleep(tuning.LOOK_S)

    def remove(self) -> None:
        """Put Ray's own function back, and let the waiting calls continue."""
        with self._lock:
            self._removed.set()
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            if self.rays_init is not None:
                ray: Any = sys.modules["ray"]
                ray.init = self.rays_init

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find Ray as the other finders do; replace ``init`` before its import ends."""
        if fullname != "ray":
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._replace(module)

        loader.exec_module = exec_module
        return spec

    def _replace(self, ray: Any) -> None:
        rays_init = ray.init

        @functools.wraps(rays_init)
        def init(*args: Any, **options: Any) -> Any:
            self._removed.wait()
            if not (args or options):
                options["ignore_reinit_error"] = True
            return rays_init(*args, **options)

        with self._lock:
            if self.rays_init is None and not self._removed.is_set():
                self.rays_init, ray.init = rays_init, init


def _remove_in_fork() -> None:
    global _guard
    if _guard is not None:
        _guard._lock = threading.Lock()
        _guard.remove()
        _guard = None


os.register_at_fork(after_in_child=_remove_in_fork)
