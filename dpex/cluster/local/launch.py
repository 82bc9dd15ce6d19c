"""A Ray of our own: this process's children, gone with it however it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from dpex.cluster.limits import free_memory, usable_cores, usable_memory
from dpex.cluster.local import forked_worker
from dpex.cluster.local.directory import delete_ended, make_directory
from dpex.cluster.local.process_end import end_ray_after_us
from dpex.cluster.tokens import FILE, forget_token, hide_token, require_token, token_variables
from dpex.errors import ClusterError

__all__ = [
    "OUR_MODULES",
    "START_SECONDS",
    "disconnect",
    "embedded_cpus",
    "free_cores",
    "init_ray",
    "load_ray",
    "make_no_errors_of_rays_warnings",
    "quiet_ray",
    "settled",
    "start",
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
OUR_MODULES = r"dpex(\.|$)"
"""Those whose warnings the user is to see, for a filter of warnings."""

settled = threading.Event()
"""Set when the first block of an embedded Ray has arrived, and the cores are free for others; or
when something of what was put off is needed before that."""


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


def start(fork_server: str | None = None) -> dict[str, str]:
    """Start a Ray that is gone with this process, killed or not, and connect this process to it.

    Args:
        fork_server: Where workers are to be had; None if Ray is to start them itself.

    Returns:
        The variables by which other processes of this user find its token.

    Raises:
        ClusterError: Ray did not start; says why.
    """
    settled.clear()
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
    try:
        directory = make_directory()
        token = token_variables(directory)
    except OSError as error:
        raise _not_started(error) from error
    # Ray lets everybody write to the directories of its sockets.
    variables["RAY_TMPDIR"] = str(directory)
    if fork_server is not None:
        variables[forked_worker.SERVER] = fork_server
    program = Path(forked_worker.__file__) if fork_server is not None else None
    require_token(token)
    try:
        load_ray()  # here, for it reads the token's variables
        with _environment(variables):
            context = _start_lean_or_plain(program)
    except BaseException:
        forget_token()
        raise
    hide_token()
    end_ray_after_us(Path(context.address_info["session_dir"]), directory / FILE)
    threading.Thread(target=delete_ended, name="dpex-delete", daemon=True).start()
    return token


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
    import ray

    try:
        address = ray.get_runtime_context().gcs_address
        settled.wait(_SETTLE_SECONDS)
        if ray.is_initialized() and ray.get_runtime_context().gcs_address == address:
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
        TimeoutError: It is still in flight after ``timeout_s``.
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
        warnings.filterwarnings("default", module=OUR_MODULES)


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
