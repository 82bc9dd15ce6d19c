"""Start of the local Ray, whose processes end with this process however it ends."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.cluster.local.directory import delete_ended, make_directory
from dpex.cluster.machine_share import free_memory, usable_cores, usable_memory
from dpex.cluster.standard_streams import stderr_for_ray
from dpex.cluster.tokens import forget_token, hide_token, require_token, token_variables
from dpex.errors import ClusterError

__all__ = [
    "disconnect",
    "end_failed_init",
    "init_ray",
    "local_cpus",
    "make_no_errors_of_rays_warnings",
    "quiet_ray",
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
# Modules whose warnings the user must see.
_OUR_MODULES = r"dpex(\.|$)"


def local_cpus() -> int:
    """Return the logical CPUs of a local Ray: 64, or the number of usable cores if it is higher.

    The loader itself decides how many tasks run at once. With fewer logical CPUs, Ray would end
    the idle worker processes beyond that number, and their caches would be lost.
    """
    return max(64, usable_cores())


def start() -> None:
    """Start a local Ray, and connect this process to it.

    The local Ray ends with this process, even if this process is killed.

    Raises:
        ClusterError: Ray did not start. The message gives the reason.
    """
    store_bytes = _object_store_bytes()
    variables = {
        # By default Ray starts one idle worker process per logical CPU at once.
        "RAY_prestart_worker_first_driver": "0",
        # Strings hash alike in all worker processes, as they do in forks.
        "PYTHONHASHSEED": "0",
        # Ray prints a warning at 4 times this many worker processes. The default is the number of
        # cores, so on two cores ten waiting worker processes already exceed the limit.
        "RAY_worker_maximum_startup_concurrency": str(max(16, usable_cores())),
        # The head of a local Ray never restarts, so a longer wait for it is useless.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        # Nothing reads the list of tasks in Ray's head. By default Ray reports every call to the
        # head, which keeps 100,000 calls in 130 MB.
        "RAY_task_events_report_interval_ms": "0",
        # By default Ray's workers yield to other processes (nice 15); torch's workers do not.
        "RAY_worker_niceness": "0",
    }
    with _writing_files():
        directory = make_directory()
        token = token_variables(directory)
    # Ray makes its socket directories writable for all users, so they need a private parent.
    private = {"RAY_TMPDIR": str(directory)}
    try:
        require_token(token)
        _load_ray()  # after require_token: the import reads the token's variables
        with _environment(variables, private):
            try:
                init_ray(
                    tuning.START_S,
                    stays=True,
                    address="local",
                    num_cpus=local_cpus(),
                    object_store_memory=store_bytes,
                    include_dashboard=False,
                )
            except Exception as error:
                end_failed_init()
                raise _not_started(error, directory) from error
    except BaseException:
        forget_token()
        raise
    hide_token()
    BackgroundThread(target=delete_ended, name="dpex-delete", daemon=True).start()


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


def disconnect() -> None:
    """Shut down this process's Ray, whatever its state, and ignore errors."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


def end_failed_init() -> None:
    """Shut down what a failed ``ray.init`` has left.

    If the process is connected all the same, another thread of the program has started that Ray.
    """
    import ray

    if not ray.is_initialized():
        disconnect()


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


def init_ray(timeout_s: float, *, stays: bool = False, **options: Any) -> Any:
    """Call ``ray.init`` without its messages, in a new thread and with a timeout.

    Ray replaces the process's SIGTERM handler in the main thread only.

    Args:
        timeout_s: Timeout in seconds.
        stays: Whether the thread lives as long as this process. When a thread ends, the kernel
            kills the processes of Ray that it started, because Ray sets PR_SET_PDEATHSIG for them.
        **options: Arguments of ``ray.init``.

    Returns:
        Result of ``ray.init``.

    Raises:
        TimeoutError: ``ray.init`` has not returned after ``timeout_s``.
        Exception: Any exception of ``ray.init``.
    """
    _load_ray()
    import ray

    from dpex.compat.local_ray import in_own_groups, on_loopback

    # Ray would replace the program's print() when a worker process first prints.
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    # Other machines must not reach a local Ray, and Ray would replace a loopback address.
    loopback = options["address"] == "local" or options["address"].startswith("127.0.0.1:")

    def call() -> Any:
        with (
            quiet_ray(),
            stderr_for_ray(),
            on_loopback() if loopback else contextlib.nullcontext(),
            in_own_groups(),
        ):
            breakpoint_hook = os.environ.get(_BREAKPOINT)
            context = ray.init(logging_level=logging.ERROR, **options)
            # Ray leads breakpoint() of this process to its own debugger.
            if breakpoint_hook is None:
                os.environ.pop(_BREAKPOINT, None)
            else:
                os.environ[_BREAKPOINT] = breakpoint_hook
            return context

    # Ray draws from Python's global generator, from which torch's loader draws nothing.
    state = random.getstate()
    try:
        return within(timeout_s, call, afterwards=threading.Event().wait if stays else None)
    finally:
        random.setstate(state)


def _load_ray() -> None:
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
        warnings.filterwarnings("default", module=_OUR_MODULES)


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
    timeout_s: float, call: Callable[[], T], *, afterwards: Callable[[], object] | None = None
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
