"""The threads of dpex in the training process."""

from __future__ import annotations

import signal
import threading

__all__ = ["BackgroundThread"]


class BackgroundThread(threading.Thread):
    """A thread that leaves SIGINT (Ctrl-C) to the main thread.

    A thread that starts a thread or a process may receive a signal that the kernel has sent to the
    main thread. Python then notes the signal, but the main thread does not wake up: if it waits
    without a timeout, it is not interrupted. What this thread starts inherits its signal mask.
    """

    def run(self) -> None:
        """Block SIGINT, and call the thread's function."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        super().run()
