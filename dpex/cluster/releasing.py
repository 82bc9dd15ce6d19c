"""What Ray is told when an object of ours goes: told by a thread of its own.

The garbage collector runs where it likes: also inside of Ray or gRPC while they hold a lock that
the call would need, and then nothing ever goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable

__all__ = ["be_ready", "release_later"]

logger = logging.getLogger("dpex")

_EXIT_WAIT_S = 2.0

# Its put() may interrupt its own get() or put(): the one queue that finalizers may use.
_calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def be_ready() -> None:
    """Have the thread run; a finalizer could not start it."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_work, name="dpex-release", daemon=True)
        _thread.start()


def release_later(call: Callable[[], object]) -> None:
    """Have something called soon; for finalizers, which may call nothing of Ray's themselves."""
    _calls.put(call)


def _work() -> None:
    while (call := _calls.get()) is not None:
        try:
            call()
        except Exception as error:  # Ray has gone, or goes
            logger.debug("releasing failed: %s", error)
        del call


@atexit.register
def _end() -> None:
    """Have the thread not inside Ray when Ray goes."""
    if _thread is not None:
        _calls.put(None)
        _thread.join(_EXIT_WAIT_S)


def _forget_after_fork() -> None:
    global _calls, _thread
    _calls = queue.SimpleQueue()
    _thread = None


os.register_at_fork(after_in_child=_forget_after_fork)
