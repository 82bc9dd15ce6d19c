"""Calls to Ray on behalf of finalizers, from a separate thread.

The garbage collector may run inside Ray or gRPC while they hold a lock that such a call needs. A
call from the finalizer itself would then deadlock.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable

from dpex import tuning
from dpex.background_thread import BackgroundThread

__all__ = ["be_ready", "release_later"]

logger = logging.getLogger("dpex")


# SimpleQueue.put() is reentrant, so finalizers may call it; Queue.put() is not.
_calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def be_ready() -> None:
    """Start the release thread if it does not run; a finalizer could not start it."""
    global _thread
    if _thread is None:
        _thread = BackgroundThread(target=_work, name="dpex-release", daemon=True)
        _thread.start()


def release_later(call: Callable[[], object]) -> None:
    """Call a function soon, in the release thread; finalizers must not call Ray themselves."""
    _calls.put(call)


def _work() -> None:
    while (call := _calls.get()) is not None:
        try:
            call()
        except Exception as error:  # Ray is shutting down or has shut down
            logger.debug("releasing failed: %s", error)
        del call


@atexit.register
def _end() -> None:
    """Stop the thread, so that it is not inside Ray when Ray shuts down."""
    if _thread is not None:
        _calls.put(None)
        _thread.join(tuning.EXIT_S)


def _forget_after_fork() -> None:
    global _calls, _thread
    _calls = queue.SimpleQueue()
    _thread = None


os.register_at_fork(after_in_child=_forget_after_fork)
