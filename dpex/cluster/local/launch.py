"""Start of the local Ray, whose processes end with this process however it ends."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.cluster.exclusive_init import ConnectedMeanwhile, exclusive_init, rays_init
from dpex.cluster.limits import free_memory, usable_cores, usable_memory
from dpex.cluster.local import forked_worker
from dpex.cluster.local.directory import delete_ended, make_directory, runtime_directory
from dpex.cluster.local.process_end import end_ray_after_us
from dpex.cluster.standard_streams import stderr_for_ray
from dpex.cluster.tokens import FILE, forget_token, hide_token, require_token, token_variables
from dpex.errors import ClusterError

__all__ = [
    "OUR_MODULES",
    "StartedRay",
    "check_settings",
    "disconnect",
    "init_ray",
    "load_ray",
    "local_cpus",
    "make_no_errors_of_rays_warnings",
    "quiet_ray",
    "settled",
    "start",
    "within",
]

logger = logging.getLogger("dpex")

T = TypeVar("T")

_GIB = 1 << 30
_STORE_VARIABLE = "DPEX_OBJECT_STORE_MEMORY"
# Python's variable for the function that breakpoint() calls.
_BREAKPOINT = "PYTHONBREAKPOINT"
# Modules whose warnings do not concern the user.
_NOT_THE_USERS = r"(google|grpc|pyarrow|ray|tqdm)(\.|$)"
OUR_MODULES = r"dpex(\.|$)"
"""Modules whose warnings the user must see, as a pattern for warning filters."""

settled = threading.Event()
"""Set when the deferred processes of a local Ray may start.

That is when the first block has arrived, so that cores are free, or when something needs one of
these processes earlier."""


def local_cpus() -> int:
    """Return the logical CPUs of a local Ray: 64, or the number of usable cores if it is higher.

    The loader itself decides how many tasks run at once. With fewer logical CPUs, Ray would end
    the idle worker processes beyond that number, and their caches would be lost.
    """
    return max(64, usable_cores())


@dataclass(frozen=True)
class StartedRay:
    """A local Ray that this process has started.

    Attributes:
        token: Environment variables that lead other processes of this user to its token.
        jobs: Directory for the file of each rank's job, see ``forked_worker.SERVER``. None if the
            Ray is for this process alone, or if it starts its worker processes itself.
    """

    token: dict[str, str]
    jobs: Path | None


def check_settings() -> None:
    """Check what the user has set for a local Ray, before anything starts.

    Raises:
        ClusterError: DPEX_OBJECT_STORE_MEMORY is no size that Ray accepts, or dpex cannot write
            Ray's files.
    """
    _store_setting()
    with _writing_files():
        runtime_directory()


def start(fork_server: str | None = None, *, for_ranks: bool = False) -> StartedRay:
    """Start a local Ray, and connect this process to it.

    The local Ray ends with this process, even if this process is killed.

    Args:
        fork_server: Address of the fork server; None if Ray starts its worker processes itself.
        for_ranks: Whether ranks share the Ray, each with its own fork server.

    Raises:
        ClusterError: Ray did not start. The message gives the reason.
        ConnectedMeanwhile: The program has connected this process.
    """
    store_bytes = _object_store_bytes()
    settled.clear()
    variables = {
        # By default Ray starts one idle worker process per logical CPU at once.
        "RAY_prestart_worker_first_driver": "0",
        # Strings hash alike in all worker processes that Ray starts itself, as they do in forks.
        "PYTHONHASHSEED": "0",
        # Ray prints a warning at 4 times this many worker processes. The default is the number of
        # cores, so on two cores ten waiting worker processes already exceed the limit.
        "RAY_worker_maximum_startup_concurrency": str(max(16, usable_cores())),
        # By default a node that does not find its object store yet retries only after a second.
        "RAY_raylet_client_connect_timeout_milliseconds": "20",
        "RAY_raylet_client_num_connect_attempts": "500",
        # The head of a local Ray never restarts, so a longer wait for it is useless.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        # Nothing reads the list of tasks in Ray's head. By default Ray reports every call to the
        # head, which keeps 100,000 calls in 130 MB.
        "RAY_task_events_report_interval_ms": "0",
        # By default Ray's workers yield to other processes (nice 15); torch's workers do not.
        "RAY_worker_niceness": "0",
    }
    # The variable may name the fork server of an outer training process, which has another Ray.
    os.environ.pop(forked_worker.SERVER, None)
    with _writing_files():
        directory = make_directory()
    end_ray_after_us(directory, directory / FILE)
    with _writing_files():
        token = token_variables(directory)
    # Ray makes its socket directories writable for all users, so they need a private parent.
    private = {"RAY_TMPDIR": str(directory)}
    if for_ranks:
        fork_server = str(directory / "jobs")
        Path(fork_server).mkdir(mode=0o700)
    if fork_server is not None:
        variables[forked_worker.SERVER] = fork_server
    program = Path(forked_worker.__file__) if fork_server is not None else None
    try:
        with exclusive_init():
            require_token(token)
            load_ray()  # after require_token: the import reads the token's variables
            with exclusive_init(), _environment(variables, private):
                try:
                    _start_lean_or_plain(program, store_bytes)
                except Exception as error:
                    raise _not_started(error, directory) from error
    except ConnectedMeanwhile:  # the program's Ray may have the token
        raise
    except BaseException:
        forget_token()
        raise
    hide_token()
    BackgroundThread(target=delete_ended, name="dpex-delete", daemon=True).start()
    return StartedRay(token, directory / "jobs" if for_ranks and _is_lean() else None)


@contextlib.contextmanager
def _writing_files() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(
            f"a local Ray did not start, because dpex cannot write its files: {error}. Set TMPDIR, "
            "or RAY_TMPDIR if it is set, to a writable directory with free space"
        ) from error


def _is_lean() -> bool:
    """Return whether the local Ray starts our program in place of its worker processes."""
    from dpex.compat.local_ray import LEAN_START

    return LEAN_START.usable


def _start_lean_or_plain(program: Path | None, store_bytes: int) -> Any:
    """Start Ray with ``lean_start``, or without it if that fails.

    Args:
        program: See ``lean_start``.
        store_bytes: Size of the object store.

    Returns:
        Result of ``ray.init``.

    Raises:
        TimeoutError: A start timed out.
        Exception: Ray did not start either way.
    """
    from dpex.compat.local_ray import LEAN_START, lean_start

    try:
        return _init_local(lean_start(program), store_bytes)
    except TimeoutError:  # the attempt is still running
        raise
    except Exception as error:
        disconnect()
        if not LEAN_START.usable:
            raise
        lean_error = error
    context = _init_local(contextlib.nullcontext(lambda: None), store_bytes)
    LEAN_START.fail(lean_error)
    return context


def disconnect() -> None:
    """Shut down this process's Ray, whatever its state, and ignore errors."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


def _init_local(way: AbstractContextManager[Callable[[], None]], store_bytes: int) -> Any:
    """Call ``ray.init`` in a context that yields a function to call afterwards."""
    with way as finish:
        return init_ray(
            tuning.START_S,
            afterwards=lambda: _finish_and_stay(finish),
            address="local",
            num_cpus=local_cpus(),
            object_store_memory=store_bytes,
            include_dashboard=False,
        )


def _not_started(error: Exception, directory: Path) -> ClusterError:
    """Return the error to raise if ``ray.init`` failed.

    Args:
        error: The error of ``ray.init``.
        directory: Directory of the local Ray.
    """
    text = f"a local Ray did not start: {str(error).rstrip('.')}"
    logs = directory / "ray" / "session_latest" / "logs"
    if logs.exists():
        text += f". Ray's logs: {logs}"
    return ClusterError(text)


def _finish_and_stay(finish: Callable[[], None]) -> None:
    """Start the deferred processes, and block this thread forever.

    When a thread ends, the kernel kills the processes that it started, because Ray sets
    PR_SET_PDEATHSIG for them.
    """
    import ray

    try:
        address = ray.get_runtime_context().gcs_address
        settled.wait(tuning.SETTLE_S)
        if ray.is_initialized() and ray.get_runtime_context().gcs_address == address:
            finish()
    except Exception as error:  # this thread must not end
        logger.warning("the output of workers is only in Ray's logs, not here: %s", error)
    threading.Event().wait()


def init_ray(
    timeout_s: float, *, afterwards: Callable[[], None] | None = None, **options: Any
) -> Any:
    """Call ``ray.init`` without its messages, in a new thread and with a timeout.

    Ray replaces the process's SIGTERM handler in the main thread only.

    Args:
        timeout_s: Timeout in seconds.
        afterwards: Function that the new thread calls after ``ray.init``.
        **options: Arguments of ``ray.init``.

    Returns:
        Result of ``ray.init``.

    Raises:
        ConnectedMeanwhile: The program has connected this process.
        TimeoutError: ``ray.init`` has not returned after ``timeout_s``.
        Exception: Any exception of ``ray.init``.
    """
    load_ray()

    from dpex.compat.local_ray import on_loopback
    from dpex.compat.random_draws import draw_elsewhere

    draw_elsewhere()
    # Ray would replace the program's print() when a worker process first prints.
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    # Other machines must not reach a local Ray.
    ours = options["address"] == "local" or options["address"].startswith("127.0.0.1:")

    def call() -> Any:
        with (
            quiet_ray(),
            stderr_for_ray(),
            on_loopback() if ours else contextlib.nullcontext(),
        ):
            breakpoint_hook = os.environ.get(_BREAKPOINT)
            context = rays_init()(logging_level=logging.ERROR, **options)
            # Ray leads breakpoint() of this process to its own debugger.
            if breakpoint_hook is None:
                os.environ.pop(_BREAKPOINT, None)
            else:
                os.environ[_BREAKPOINT] = breakpoint_hook
            return context

    with exclusive_init():
        return within(timeout_s, call, afterwards=afterwards)


def load_ray() -> None:
    """Import Ray without its notebook message that ipywidgets is missing; dpex has no widgets."""
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    make_no_errors_of_rays_warnings()
    _ignore_rays_warnings()
    import ray  # noqa: F401


@functools.cache
def _ignore_rays_warnings() -> None:
    """Hide what Ray's import and start warn of.

    The filters stay, because another thread may change and restore the filters meanwhile.
    """
    warnings.filterwarnings("ignore", "IProgress not found")  # by tqdm, which Ray imports
    warnings.filterwarnings("ignore", "", FutureWarning, r"ray(\.|$)")  # by Ray < 2.60


def make_no_errors_of_rays_warnings() -> None:
    """Exempt Ray's and dpex's warnings from user filters that turn warnings into errors.

    Such an error would interrupt dpex's work. dpex's warnings are still shown, Ray's are not.
    """
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.filterwarnings("ignore", module=_NOT_THE_USERS)
        warnings.filterwarnings("default", module=OUR_MODULES)


@contextlib.contextmanager
def quiet_ray() -> Iterator[None]:
    """Suppress Ray's own log messages below ERROR."""
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
    """Call a function in a new thread, and wait for its result with a timeout.

    Args:
        timeout_s: Timeout in seconds.
        call: Function to call. If it returns after the timeout, its result is lost.
        afterwards: Function that the new thread calls when ``call`` has returned.

    Raises:
        TimeoutError: ``call`` has not returned after ``timeout_s``.
        Exception: Any exception of ``call``.
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

    BackgroundThread(target=run, name="dpex-connect", daemon=True).start()
    wait([outcome], timeout_s)
    if not outcome.done():
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return outcome.result()


def _object_store_bytes() -> int:
    """Return DPEX_OBJECT_STORE_MEMORY, or 30 % of the usable memory within two limits.

    The limits are half of the free memory, and /dev/shm. By default Ray ignores a /dev/shm below
    10 GB, as in most containers, and uses the disk.

    Raises:
        ClusterError: As for ``_store_setting``.
    """
    if (given := _store_setting()) is not None:
        return given
    wanted = max(_GIB // 8, min(int(0.3 * usable_memory()), free_memory() // 2, 200 * _GIB))
    if not sys.platform.startswith("linux"):
        return min(wanted, 2 * _GIB)
    shm = int(0.9 * shutil.disk_usage("/dev/shm").free)
    if shm >= min(wanted, _GIB // 2):
        return min(wanted, shm)
    logger.warning(
        "/dev/shm has only %d MiB free, so Ray's object store is on disk, which is slower. Give "
        "/dev/shm more space: docker run --shm-size=%dg",
        shm >> 20,
        max(1, wanted // _GIB),
    )
    return min(wanted, 2 * _GIB)


def _store_setting() -> int | None:
    """Return DPEX_OBJECT_STORE_MEMORY, or None if it is not set.

    Raises:
        ClusterError: The variable is not a number of bytes, or less than Ray accepts.
    """
    given = os.environ.get(_STORE_VARIABLE)
    if not given:
        return None
    if not given.isdecimal() or int(given) < tuning.LEAST_STORE_BYTES:
        raise ClusterError(
            f"{_STORE_VARIABLE}={given!r} must be the size of the local Ray's object store in "
            f"bytes, at least {tuning.LEAST_STORE_BYTES:,}"
        )
    return int(given)


@contextlib.contextmanager
def _environment(defaults: dict[str, str], fixed: dict[str, str]) -> Iterator[None]:
    """Set variables for processes that start in the block.

    Args:
        defaults: Variables to set unless the user has set them.
        fixed: Variables to set whatever their values are.
    """
    added = {n: value for n, value in defaults.items() if n not in os.environ} | fixed
    users = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in users.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
