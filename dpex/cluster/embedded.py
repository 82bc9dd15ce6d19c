"""A Ray of our own: this process's children, gone with it however it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from dpex.cluster import forked_worker
from dpex.cluster.limits import free_memory, usable_cores, usable_memory
from dpex.cluster.tokens import require_token, runtime_directory
from dpex.errors import ClusterError

__all__ = [
    "START_SECONDS",
    "disconnect",
    "embedded_cpus",
    "free_cores",
    "hold",
    "init_ray",
    "load_ray",
    "make_no_errors_of_rays_warnings",
    "quiet_ray",
    "settled",
    "start",
    "start_detached",
    "within",
]

logger = logging.getLogger("dpex")

T = TypeVar("T")

START_SECONDS = 120.0
# What an embedded Ray does not need at once starts now, or when the first block has arrived.
_SETTLE_SECONDS = 5.0
_GIB = 1 << 30
# Modules whose warnings are no matter of the user's.
_NOT_THE_USERS = r"(google|grpc|pyarrow|ray)(\.|$)"
_OURS = r"dpex(\.|$)"

settled = threading.Event()
"""Set when the first block of an embedded Ray has arrived, and the cores are free for others; or
when something of what was put off is needed before that."""

# File descriptors by whose end others see that this process has ended.
_held: list[int] = []


def embedded_cpus() -> int:
    """Logical CPUs of an embedded Ray: 64, or the cores where there are more.

    The loader itself decides how many tasks run at once; with fewer logical CPUs Ray would throw
    away idle workers beyond their number, and the caches in them.
    """
    return max(64, usable_cores())


def free_cores() -> int:
    """This process's share of the host's cores: what it may use, divided among local ranks."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, usable_cores() // max(1, int(ranks) if ranks.isdecimal() else 1))


def start(fork_server: str | None = None) -> None:
    """Start a Ray that is gone with this process, killed or not, and connect this process to it.

    Args:
        fork_server: Where workers are to be had; None if Ray is to start them itself.

    Raises:
        ClusterError: Ray did not start; says why.
    """
    from dpex.cluster.session_files import delete_ended, mark_alive

    load_ray()
    settled.clear()
    require_token()
    variables = {
        # One idle worker per logical CPU would be started at once.
        "RAY_prestart_worker_first_driver": "0",
        # Strings hash alike in all workers that Ray starts itself, as they do in forked ones.
        "PYTHONHASHSEED": "0",
        # Ray prints a warning at 4 times this many workers; by default it is the number of cores,
        # which ten waiting workers on two cores already exceed.
        "RAY_worker_maximum_startup_concurrency": str(max(16, usable_cores())),
        # A node that looks for its own store before it is there would look again a second later.
        "RAY_raylet_client_connect_timeout_milliseconds": "20",
        "RAY_raylet_client_num_connect_attempts": "500",
        # Its head does not come back.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        # Nobody looks at the list of tasks, for which every call is reported to the head: it keeps
        # 100,000 of them, 130 MB.
        "RAY_task_events_report_interval_ms": "0",
        # Ray's workers give way to whatever else runs (nice 15); torch's do not.
        "RAY_worker_niceness": "0",
    }
    # Of an outer trainer, whose worker this process may be, nothing is to be had.
    os.environ.pop(forked_worker.SERVER, None)
    if "RAY_TMPDIR" not in os.environ:
        # Ray lets everybody write to the directories of its sockets.
        variables["RAY_TMPDIR"] = str(runtime_directory())
    if fork_server is not None:
        variables[forked_worker.SERVER] = fork_server
    program = Path(forked_worker.__file__) if fork_server is not None else None
    with _environment(variables):
        context = _start_lean_or_plain(program)
    session = Path(context.address_info["session_dir"])
    mark_alive(session)
    _reap_after_us(str(session))
    if "RAY_TMPDIR" in variables:  # others' sessions are not in our own directory
        threading.Thread(
            target=delete_ended, args=(session.parent,), name="dpex-delete", daemon=True
        ).start()


def _start_lean_or_plain(program: Path | None) -> Any:
    """Start Ray lean, or plainly where that fails.

    Args:
        program: See ``lean_start``.

    Returns:
        What ``ray.init`` returned.

    Raises:
        ClusterError: Neither has started Ray.
    """
    from dpex.compat.local_ray import LEAN_START, lean_start

    try:
        return _init_local(lean_start(program))
    except TimeoutError as error:  # the attempt still goes on
        raise _not_started(error) from error
    except Exception as error:
        disconnect()
        if not LEAN_START.usable:
            raise _not_started(error) from error
        lean_error = error
    try:
        context = _init_local(contextlib.nullcontext(lambda: None))
    except Exception as error:
        raise _not_started(error) from error
    LEAN_START.fail(lean_error)
    return context


def disconnect() -> None:
    """Shut this process's Ray down, whatever state it is in."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


def _init_local(way: AbstractContextManager[Callable[[], None]]) -> Any:
    """Call ``ray.init`` in a context that yields the function to call after it."""
    with way as finish:
        return init_ray(
            START_SECONDS,
            afterwards=lambda: _finish_and_stay(finish),
            address="local",
            num_cpus=embedded_cpus(),
            object_store_memory=_object_store_bytes(),
            include_dashboard=False,
        )


def _not_started(error: Exception) -> ClusterError:
    return ClusterError(
        f"an embedded Ray did not start: {str(error).rstrip('.')}. Its files lie under "
        "RAY_TMPDIR, which must be writable and shorter than 38 characters (if it is not "
        "set: in a directory of this user alone in TMPDIR or /tmp)"
    )


def _finish_and_stay(finish: Callable[[], None]) -> None:
    """Start what was put off, and be the thread that never ends.

    The kernel kills what a thread started when that thread ends (Ray asks for PR_SET_PDEATHSIG).
    """
    settled.wait(_SETTLE_SECONDS)
    try:
        finish()
    except Exception as error:  # this thread must not end
        logger.warning("what workers print is not to be seen here: %s", error)
    threading.Event().wait()


def init_ray(
    timeout_s: float, *, afterwards: Callable[[], None] | None = None, **options: Any
) -> Any:
    """Call ``ray.init`` without its messages, and wait no longer than given for it.

    It runs in a thread of its own: only in the main thread would Ray replace the process's
    SIGTERM handler.

    Args:
        timeout_s: How long to wait.
        afterwards: What that thread does when it has started Ray.
        **options: Arguments of ``ray.init``.

    Returns:
        What ``ray.init`` returned.

    Raises:
        TimeoutError: It is still under way after ``timeout_s``.
        Exception: Whatever ``ray.init`` raised.
    """
    load_ray()
    import ray

    from dpex.compat.local_ray import on_loopback

    # Whoever is not on this host has nothing to do with an embedded Ray.
    ours = options["address"] == "local" or options["address"].startswith("127.0.0.1:")

    def call() -> Any:
        with (
            quiet_ray(),
            warnings.catch_warnings(),
            on_loopback() if ours else contextlib.nullcontext(),
        ):
            # Tips on its own future (Ray < 2.60).
            warnings.simplefilter("ignore", FutureWarning)
            return ray.init(logging_level=logging.ERROR, **options)

    return within(timeout_s, call, afterwards=afterwards)


def load_ray() -> None:
    """Import Ray without what it says in a notebook that has no ipywidgets; we show none."""
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tqdm's, say, which Ray imports
        import ray  # noqa: F401


def make_no_errors_of_rays_warnings() -> None:
    """Leave Ray's and our own warnings out of the user's filters that make errors of warnings.

    An error would end dpex's work halfway. dpex's warnings are shown instead.
    """
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.filterwarnings("ignore", module=_NOT_THE_USERS)
        warnings.filterwarnings("default", module=_OURS)


@contextlib.contextmanager
def quiet_ray() -> Iterator[None]:
    """Let Ray's own messages through only from ERROR on."""
    messages = logging.getLogger("ray")
    level = messages.level
    messages.setLevel(logging.ERROR)
    try:
        yield
    finally:
        messages.setLevel(level)


def within(
    timeout_s: float, call: Callable[[], T], *, afterwards: Callable[[], None] | None = None
) -> T:
    """Call in a thread of its own and give up waiting after the given time.

    Args:
        timeout_s: How long to wait.
        call: What to call; after the time is over its outcome is lost.
        afterwards: What to call in the other thread when ``call`` has returned.

    Raises:
        TimeoutError: The call has not returned.
        Exception: What the call raised.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
        else:
            if afterwards is not None:
                afterwards()

    threading.Thread(target=run, name="dpex-connect", daemon=True).start()
    wait([outcome], timeout_s)
    if not outcome.done():
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return outcome.result()


def _object_store_bytes() -> int:
    """30 % of the memory this process may use, within /dev/shm and half of what is free.

    Ray's own default ignores a /dev/shm below 10 GB, as most containers have, and goes to disk.
    """
    wanted = max(_GIB // 8, min(int(0.3 * usable_memory()), free_memory() // 2, 200 * _GIB))
    if not sys.platform.startswith("linux"):
        return min(wanted, 2 * _GIB)
    shm = int(0.9 * shutil.disk_usage("/dev/shm").free)
    if shm >= min(wanted, _GIB // 2):
        return min(wanted, shm)
    logger.warning(
        "/dev/shm has only %d MiB free, so Ray's object store lies on disk, which is slower; "
        "give it more (docker run --shm-size=%dg)",
        shm >> 20,
        max(1, wanted // _GIB),
    )
    return min(wanted, 2 * _GIB)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set what the user has not set, for the processes that are started meanwhile."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


# For a bare interpreter. When its standard input ends, its owner is about to; then it has a new
# parent, the same as all that the owner's raylet leaves behind. What it kills is younger than the
# owner, of its session and titled as Ray's (the title hides the command line); a worker or an agent
# of a living raylet has that as its parent.
_REAPER = """
import os, signal, sys, time

def parent_session_and_start(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[3]), int(fields[19])

owner, files = int(sys.argv[2]), os.fsencode(sys.argv[3])
_, session, start = parent_session_and_start(owner)
sys.stdin.buffer.read()
while os.getppid() == owner:
    time.sleep(0.05)
for pause in (0, 0.5, 1):
    time.sleep(pause)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            its_parent, its_session, its_start = parent_session_and_start(pid)
            if (its_parent, its_session) != (os.getppid(), session) or its_start < start:
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            if command.startswith(b"ray::") or files in command:
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
"""


def _reap_after_us(session_dir: str) -> None:
    """See to it that all of Ray ends when this process is killed.

    The kernel then kills what we started, and workers end with their raylet. But the raylet's two
    agents first report its death to the head, which is gone, for 100 seconds, and workers that
    are just starting try to reach it for 25 (Ray 2.60). A process that waits for our end kills
    both. Where there is no /proc, they take their time.
    """
    if not sys.platform.startswith("linux"):
        return
    read_end, write_end = os.pipe()
    start_detached(
        [sys.executable, "-I", "-S", "-c", _REAPER, "dpex-reaper", str(os.getpid()), session_dir],
        stdin=read_end,
    )
    os.close(read_end)
    hold(write_end)


def hold(descriptor: int) -> None:
    """Keep a file descriptor open until this process, and not its forks, ends."""
    _held.append(descriptor)


def start_detached(command: list[str], **options: Any) -> None:
    """Start a process that is not waited for and that no signal to our group or terminal meets."""
    quiet = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    process = subprocess.Popen(command, start_new_session=True, **{**quiet, **options})
    process.returncode = 0  # else Python warns that it still runs when the object goes


def _let_go_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
