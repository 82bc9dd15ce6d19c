"""A process that forks replacements for worker processes that have died.

It is a fork of the training process at ``iter()``, through a worker process that has done nothing
yet. It does nothing else. So a replacement has the dataset and the settings that its predecessor
started with, whatever the training loop has changed meanwhile. The training process itself may have
threads and an accelerator by then, and must not fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any, NoReturn

from dpex.carriers.processes.worker_process import WorkerStart, run_worker

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

__all__ = ["Replacements", "run_forked"]


class Replacements:
    """The process that forks replacements, as the training process sees it.

    The first worker process forks it, before the worker runs any code of the user's, and while the
    training process forks the other workers. So ``iter()`` does not wait for this fork.

    Args:
        context: A context whose start method is ``"fork"``.

    Attributes:
        channel: Connection of the worker processes to this object, which each of them closes.
    """

    def __init__(self, context: BaseContext) -> None:
        self._connection, self.channel = context.Pipe()
        self._pidfd = -1

    def fork(self, connection: Connection) -> int:
        """Fork a replacement, which uses a connection to this process, and return its process id.

        Raises:
            OSError: The process that forks has ended, or cannot fork.
            EOFError: It has ended.
        """
        self._connect()
        self._connection.send(True)
        send_handle(self._connection, connection.fileno(), None)
        return self._receive_pid()

    def _connect(self) -> None:
        """Wait until the process runs."""
        if self._pidfd < 0:
            self._pidfd = os.pidfd_open(self._receive_pid())

    def _receive_pid(self) -> int:
        answer: int | OSError = self._connection.recv()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, after the worker processes; replacements that exist go on."""
        self.channel.close()  # without any process that has it, a wait for the process ends
        with contextlib.suppress(OSError, EOFError):
            # An end of the connection would not tell: other forks of this process have it too.
            self._connection.send(False)
            self._connect()
            # The system reaps the process, unless this process adopts it (as process 1 does).
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


def run_forked(
    channel: Connection, first: bool, connection: Connection, start: WorkerStart
) -> None:
    """Run a worker process that the training process has forked.

    Args:
        channel: ``Replacements.channel``.
        first: Whether the process forks the process that forks replacements.
        connection: As for ``run_worker``.
        start: As for ``run_worker``.
    """
    if first:
        try:
            pid = os.fork()
        except OSError as error:  # this worker can run all the same
            channel.send(error)
        else:
            if pid == 0:
                connection.close()
                _exit_after(_serve, channel, start)
    channel.close()
    run_worker(connection, start)


def _serve(connection: Connection, start: WorkerStart) -> None:
    """Fork a replacement for each connection that comes, until the training process ends this."""
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the replacements
    with contextlib.suppress(ProcessLookupError, EOFError, OSError):
        training = os.pidfd_open(start.training)
        connection.send(os.getpid())
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
                _exit_after(run_worker, Connection(handle), start)
            os.close(handle)
            connection.send(pid)


def _exit_after(run: Callable[[Connection, WorkerStart], None], *arguments: Any) -> NoReturn:
    """Do what ``multiprocessing`` does in a process that it starts."""
    code = 1
    try:
        run(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
