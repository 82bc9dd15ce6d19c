"""A process that forks replacements for worker processes that have died.

It is a fork of the training process at ``iter()``, and does nothing else. So a replacement has the
dataset and the settings that its predecessor started with, whatever the training loop has changed
meanwhile. The training process itself may have threads and an accelerator by then, and must not
fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

from dpex.carriers.processes.worker_process import WorkerStart, run_worker

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

__all__ = ["Replacements"]


class Replacements:
    """The process that forks replacements, as the training process sees it.

    Args:
        context: A context whose start method is ``"fork"``.
        start: What each replacement starts with.
    """

    def __init__(self, context: BaseContext, start: WorkerStart) -> None:
        self._connection, theirs = context.Pipe()
        # A context of any start method has Process; the common base class lacks it.
        make: Any = context
        self.process = make.Process(target=_serve, args=(theirs, start), daemon=True)
        self.process.start()
        theirs.close()

    def fork(self, connection: Connection) -> int:
        """Fork a replacement, which uses a connection to this process, and return its process id.

        Raises:
            OSError: The process that forks has ended, or cannot fork.
            EOFError: It has ended.
        """
        self._connection.send(True)
        send_handle(self._connection, connection.fileno(), self.process.pid)
        answer: int | OSError = self._connection.recv()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process; replacements that exist go on."""
        with contextlib.suppress(OSError):
            # An end of the connection would not tell: other forks of this process have it too.
            self._connection.send(False)
        self._connection.close()
        self.process.join()
        with contextlib.suppress(ValueError):  # another thread has just reaped it
            self.process.close()


def _serve(connection: Connection, start: WorkerStart) -> None:
    """Fork a replacement for each connection that comes, until the training process ends this."""
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the replacements
    with contextlib.suppress(ProcessLookupError, EOFError, OSError):
        training = os.pidfd_open(start.training)
        while connection in wait([connection, training]) and connection.recv():
            handle = recv_handle(connection)
            try:
                pid = os.fork()
            except OSError as error:
                connection.send(error)
                os.close(handle)
                continue
            if pid == 0:
                signal.signal(signal.SIGINT, interrupted)
                signal.signal(signal.SIGCHLD, ended)
                connection.close()
                os.close(training)
                _become_worker(Connection(handle), start)
            os.close(handle)
            connection.send(pid)


def _become_worker(connection: Connection, start: WorkerStart) -> None:
    """Do what ``multiprocessing`` does in a process that it starts; never return."""
    code = 1
    try:
        run_worker(connection, start)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
