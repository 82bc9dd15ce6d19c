"""Fork server: forks the worker processes of a local Ray, as torch forks its workers.

A worker process that Ray starts itself imports Ray, torch and the user's modules. That takes three
seconds of processor time per worker process, and torch's forked workers need none. Therefore dpex
forks the training process once, before it loads any part of Ray. That fork is the server, and it
waits for requests. In place of a worker process, Ray starts ``cluster/local/forked_worker.py``,
which asks the server for a fork and ends. The new fork has all modules loaded, and becomes the
worker process.

The server is a new process if dpex must not fork the training process (start method ``"spawn"`` or
``"forkserver"``), or if Ray is loaded already. A new process has loaded Ray and torch, but none of
the user's modules.

Ray sees no difference, because a forked worker process runs Ray's own worker program. If no fork is
possible, Ray starts the worker process itself.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import math
import multiprocessing
import os
import pickle
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dpex import tuning
from dpex.cluster.local.directory import make_directory
from dpex.cluster.local.forked_worker import is_own
from dpex.cluster.local.launch import OUR_MODULES, load_ray, make_no_errors_of_rays_warnings
from dpex.cluster.local.process_end import hold, start_detached
from dpex.cluster.standard_streams import no_stream
from dpex.compat.shortcut import private_ray_allowed
from dpex.wire import classes_by_value, local_modules
from dpex.worker import module_settings
from dpex.worker.inherited_job import Bequest, inheritance

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = [
    "FIRST_JOB",
    "address",
    "can_fork_now",
    "fork_parent",
    "forked_from_here",
    "forks_server",
    "is_inherited",
    "record_job",
    "serve",
    "show_script_arguments",
    "take_first_workers",
    "unused_job_id",
]

logger = logging.getLogger("dpex")

# Modules for the pipeline actor and the worker processes; the training process may lack them.
_PRELOADED = (
    "ray.data",
    "pyarrow",
    "dpex.pipeline.actor",
    "dpex.worker.map_style",
    "dpex.wire.block_format",
)
_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 23
_PR_SET_PDEATHSIG = 1
FIRST_JOB = "01000000"
"""Id of the first job of a Ray, as in the environment of its worker processes."""

# Environment variable with the descriptors and job of a server that is a new process.
_SERVE = "DPEX_SERVE"
_SOCKET = "fork_server"


script_arguments: list[str] = []
"""In a forked worker process: the script's ``sys.argv``; empty in other processes."""

forks_server = False
"""Whether this process is just forking its server."""

_address: str | None = None
_first_workers: list[Connection] = []
_job_id: str | None = None
# Ids of the jobs of this process, in any Ray. Every local Ray of a single process has the first.
_job_ids: set[str] = {FIRST_JOB}
_pid: int | None = None
_bequeathed: str | None = None


def address(
    bequest: Callable[[], Bequest] | None,
    job_id: str,
    *,
    first_workers: int = 0,
    at_once: int = 0,
) -> str | None:
    """Return the server's address; the first call in a process starts the server.

    Args:
        bequest: Function that returns the job that the forks inherit. None if dpex must not fork
            the training process.
        job_id: Id that Ray will give this process. A server forks for one id only, because Ray's
            library reads the id when it is loaded.
        first_workers: Number of first workers that the forked server forks;
            ``take_first_workers`` returns the connections to them.
        at_once: How many of them it forks at once. It forks the others ``HEAD_START_S`` later, so
            that the first batches do not wait for that.

    Returns:
        Path of the server's socket, in a directory that only this user can access. None if there
        is no server for this job, so that Ray starts its worker processes itself.
    """
    global _address, _job_id
    if _address is None and _can_serve():
        job = bequest() if bequest is not None and _can_fork() else None
        try:
            path = str(make_directory() / _SOCKET)
            with _listener(path) as listener:
                _fork_or_start(job, listener, job_id, first_workers, at_once)
        except OSError as error:
            logger.info("no fork server, so Ray starts the worker processes: %s", error)
            return None
        _address, _job_id = path, job_id
    return _address if _job_id == job_id else None


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _fork_or_start(
    job: Bequest | None, listener: socket.socket, job_id: str, first_workers: int, at_once: int
) -> None:
    """Fork the server from this process, or start it as a new process."""
    our_life, alive_end = os.pipe()
    hold(alive_end)
    try:
        if job is None or not _fork(job, listener, our_life, job_id, first_workers, at_once):
            _start(listener, our_life, job_id)
    finally:
        os.close(our_life)


def unused_job_id() -> str | None:
    """Return the job id of the server, or None without a server or if a job has had the id."""
    return None if _job_id in _job_ids else _job_id


def record_job(job_id: str) -> None:
    """Record the id of a job of this process, which no later job can have."""
    _job_ids.add(job_id)


def take_first_workers() -> list[Connection]:
    """Return the connections to the server's first workers, once."""
    global _first_workers
    taken, _first_workers = _first_workers, []
    return taken


def _fork(
    job: Bequest,
    listener: socket.socket,
    our_life: int,
    job_id: str,
    first_workers: int,
    at_once: int,
) -> bool:
    """Fork the server from this process, and return whether that was possible."""
    global _bequeathed, _first_workers, _pid, forks_server
    # Before the fork: afterwards each page that they read is copied.
    module_settings.remember()
    local_modules.remember()
    classes_by_value.remember()
    digest = job.pickled.digest
    pipes = [multiprocessing.Pipe() for _ in range(first_workers)]
    try:
        forks_server = True
        pid = os.fork()
    except OSError as error:  # for example a limit on overcommitted memory
        logger.info("worker processes cannot be forks of this process: %s", error)
        return False
    finally:
        forks_server = False
    if pid == 0:
        inheritance[digest] = job
        for ours, _ in pipes:
            ours.close()
        _serve(listener, our_life, job_id, [theirs for _, theirs in pipes], at_once)
    for _, theirs in pipes:
        theirs.close()
    _first_workers = [ours for ours, _ in pipes]
    _pid, _bequeathed = pid, digest
    return True


def _start(listener: socket.socket, our_life: int, job_id: str) -> None:
    """Start the server as a new process."""
    code = (
        "import sys; sys.path.append(sys.argv.pop(1)); "
        "from dpex.cluster.local.forkserver import serve; serve()"
    )
    descriptors = [listener.fileno(), our_life]
    environ = {"PYTHONHASHSEED": "0", **os.environ}  # as in workers that Ray starts
    environ[_SERVE] = " ".join(map(str, [*descriptors, job_id]))
    # multiprocessing starts its own fork server with the same flags.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    start_detached(
        [sys.executable, *flags, "-P", "-c", code, str(Path(__file__).parents[3]), *sys.argv],
        pass_fds=descriptors,
        env=environ,
        stdout=None,
        stderr=None,
        start_new_session=False,
    )


def serve() -> NoReturn:
    """Run the server in this process, which is not a fork of the training process."""
    listener, our_life, job_id = os.environ.pop(_SERVE).split()
    del sys.argv[0]  # the rest is the script's argv, as in workers that torch spawns
    _serve(socket.socket(fileno=int(listener)), int(our_life), job_id)


def forked_from_here() -> bool:
    """Return whether the server, and so every worker that it forks, is a fork of this process."""
    return _pid is not None


def is_inherited(job_key: str, job_id: str) -> bool:
    """Return whether worker processes should inherit a job; they do not if the server has died.

    Args:
        job_key: Digest of the job.
        job_id: Id that Ray has given this process.
    """
    return (_bequeathed, _job_id) == (job_key, job_id)


def fork_parent() -> int | None:
    """Return the pid of the forked server, or of this process if it can still fork the server.

    Returns:
        The pid; None if worker processes are not forks of this process.
    """
    return _pid or (os.getpid() if _can_fork() else None)


def can_fork_now() -> bool:
    """Return whether the server does not exist, and can be a fork of this process."""
    return _address is None and _can_fork()


def _can_serve() -> bool:
    """Return whether this process can have a server, either a fork or a new process."""
    return hasattr(os, "pidfd_open") and private_ray_allowed()


def _can_fork() -> bool:
    """Return whether the server can be a fork: a fork of a process with Ray lacks Ray's threads."""
    return "ray" not in sys.modules and _can_serve()


def _forget_in_child() -> None:
    global _address, _bequeathed, _first_workers, _job_id, _pid
    _address = _bequeathed = _job_id = _pid = None
    _first_workers = []


os.register_at_fork(after_in_child=_forget_in_child)


def _serve(
    listener: socket.socket,
    parents_life: int,
    job_id: str,
    first_workers: Sequence[Connection] = (),
    at_once: int = 0,
) -> NoReturn:
    """Fork worker processes until the training process ends."""
    try:
        # A garbage collection, here or in a fork, would write to shared pages and so copy them.
        gc.disable()
        gc.freeze()
        _leave_training_process()
        _end_with(parents_life)
        if first_workers:
            _fork_first_workers(first_workers[:at_once], first_workers, listener)
            time.sleep(tuning.HEAD_START_S)
            deadline = time.monotonic() + tuning.MORE_FORKS_S
            _fork_first_workers(first_workers[at_once:], first_workers, listener, deadline)
        # Ray's library reads these variables when it is loaded. A worker process ends when the
        # process in RAY_RAYLET_PID ends. The raylet does not exist yet, so the variable names this
        # server, and the server kills the worker processes of a raylet that has ended.
        os.environ.update(RAY_JOB_ID=job_id, RAY_RAYLET_PID=str(os.getpid()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's filters may turn them into errors
            load_ray()
            from dpex.compat.authentication import reread
            from dpex.compat.forked_workers import (
                FORKED_IDS,
                random_ids_untouched,
                untouched_random_ids,
            )

            workers_have_token = reread()  # if not, the training process reports it
            warnings.filterwarnings("default", module=OUR_MODULES)
            with untouched_random_ids():
                for module in _PRELOADED:
                    importlib.import_module(module)
        if not random_ids_untouched():
            FORKED_IDS.fail(RuntimeError("an import has drawn ids"))
        elif workers_have_token:
            gc.freeze()
            _Server(listener, parents_life, job_id).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _fork_first_workers(
    connections: Sequence[Connection],
    all_connections: Sequence[Connection],
    listener: socket.socket,
    deadline: float = math.inf,
) -> None:
    """Fork a first worker for each connection, before this process has anything of Ray.

    A first worker whose connection is closed gets no chunk.
    """
    for connection in connections:
        if connection.poll() or time.monotonic() > deadline:
            continue  # it is not needed any more, or would delay Ray
        try:
            pid = os.fork()
        except OSError as error:
            logger.info("a first worker cannot be forked: %s", error)
            continue
        if pid == 0:
            listener.close()
            for other in all_connections:
                if other is not connection:
                    other.close()
            _work_first(connection)
    for connection in connections:
        connection.close()


def _work_first(connection: Connection) -> NoReturn:
    """Turn this fork into a first worker."""
    try:
        _behave_as_worker()
        from dpex.worker.first_worker import make_chunks

        # A broken connection means that the training process has ended.
        with contextlib.suppress(ConnectionError):
            make_chunks(connection, next(iter(inheritance)))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(0)


def _behave_as_worker() -> None:
    """Undo in a fork what only the server needs, and end the fork with the server."""
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    make_no_errors_of_rays_warnings()


def _end_with(life: int) -> None:
    """Make the kernel end this process when the other end of a pipe closes.

    The server's loop also sees the closed pipe, but an import before the loop may hang forever.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it closed before SIGIO was enabled
        os._exit(0)


class _Server:
    """Event loop of the server process."""

    def __init__(self, listener: socket.socket, parents_life: int, job_id: str) -> None:
        self._listener = listener
        self._job_id = job_id
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(parents_life, selectors.EVENT_READ, self._stop)
        # Pid descriptors, which become readable when the process ends: of raylets, by pid; and of
        # worker processes, with the pid of the worker's raylet.
        self._nodes: dict[int, int] = {}
        self._workers: dict[int, int] = {}
        self._running = True

    def run(self) -> None:
        """Serve until the training process ends; the remaining workers end with this process."""
        while self._running:
            for key, _ in self._selector.select():
                key.data(key.fd)

    def _stop(self, _: int) -> None:
        self._running = False

    def _accept(self, _: int) -> None:
        connection, _sender = self._listener.accept()
        # An invalid request gets no answer, and no error in a request ends the server.
        with connection, contextlib.suppress(Exception):
            if is_own(connection):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + tuning.FORK_REQUEST_S
        connection.settimeout(tuning.FORK_REQUEST_S)
        message, streams, _flags, _sender = socket.recv_fds(connection, _READ_BYTES, 3)
        try:
            while more := connection.recv(_READ_BYTES):
                message += more
                if len(message) > _MOST_BYTES or time.monotonic() > deadline:
                    return
            request = pickle.loads(message)
            # Another driver that uses this Ray gets no forks: Ray starts its workers itself.
            # A requester that has hung up has already become the worker process itself.
            if request["environment"].get("RAY_JOB_ID") == self._job_id and not _hung_up(
                connection
            ):
                self._fork(request, streams, connection)
                connection.sendall(b"forked")
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(self, request: dict[str, Any], streams: list[int], connection: socket.socket) -> None:
        node_pid = int(request["environment"]["RAY_RAYLET_PID"])
        if node_pid not in self._nodes:
            self._nodes[node_pid] = os.pidfd_open(node_pid)
            self._selector.register(
                self._nodes[node_pid], selectors.EVENT_READ, lambda _: self._end_node(node_pid)
            )
        pid = os.fork()
        if pid == 0:
            self._close()
            connection.close()
            _work(request, streams)
        # Invariant: the fork joins the group before the answer. Then the requester, the group's
        # leader, ends.
        _join_group(pid, request["group"])
        with contextlib.suppress(OSError):  # the fork has ended already
            worker = os.pidfd_open(pid)
            self._workers[worker] = node_pid
            self._selector.register(worker, selectors.EVENT_READ, self._end_worker)

    def _close(self) -> None:
        """Close the server's descriptors in a fork."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _end_worker(self, worker: int) -> None:
        del self._workers[worker]
        self._selector.unregister(worker)
        os.close(worker)

    def _end_node(self, node_pid: int) -> None:
        node = self._nodes.pop(node_pid)
        self._selector.unregister(node)
        os.close(node)
        for worker, its_node in self._workers.items():
            if its_node == node_pid:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker, signal.SIGKILL)


def _work(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Turn this fork into the worker process that Ray requested."""
    try:
        _behave_as_worker()
        _join_group(0, request["group"])
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        with contextlib.suppress(OSError, ValueError):  # Ray may have raised the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        script_arguments[:], sys.argv = sys.argv, request["arguments"]
        from dpex.compat.authentication import reread

        if not reread():  # without the token, the raylet would refuse it
            _become(request["instead"], request["environment"])
        _run(Path(sys.argv[0]))
    except SystemExit as ending:
        os._exit(ending.code if isinstance(ending.code, int) else 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        # Ray still waits for a worker process, so this one runs the program that Ray would have
        # started. If this process has registered already, Ray does not accept it a second time.
        _become(request["instead"], request["environment"])
    finally:
        os._exit(1)


def _become(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process with the program that Ray would have started itself."""
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def _run(program: Path) -> None:
    """Run a program, but keep the script as the module that ``import __main__`` returns."""
    code = compile(program.read_bytes(), str(program), "exec")
    exec(code, {"__name__": "__main__", "__file__": str(program), "__builtins__": builtins})


def show_script_arguments() -> None:
    """Set ``sys.argv`` to the script's in a fork; call it only after Ray has read its own."""
    if script_arguments:
        sys.argv = script_arguments


def _join_group(pid: int, group: int) -> None:
    """Put a worker process into the process group that Ray made for it.

    Ray kills that group to end the worker process and its children. Invariant: the worker process
    does not stay in the server's group, or Ray would kill the server with it.
    """
    try:
        os.setpgid(pid, group)
    except OSError:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)


def _hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _leave_training_process() -> None:
    """Detach the server from the training process's terminal, signals, traces and exit handlers."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    atexit._clear()
    sys.settrace(None)
    sys.setprofile(None)
    # A notebook's streams need threads that a fork does not have.
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - as long as the process
    # Without a stream at the start of Python, its descriptor may be that of another file.
    sys.stdout, sys.stderr = (
        no_stream() if stream is None else os.fdopen(number, "w", buffering=1, closefd=False)
        for number, stream in enumerate((sys.__stdout__, sys.__stderr__), 1)
    )
