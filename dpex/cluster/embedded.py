"""A Ray of our own, gone with the process, or the processes, that it serves.

A process alone runs Ray as its own children. Several ranks of one host share one: the first starts
a keeper, a process of this module that runs Ray and listens on a Unix socket. A rank holds one
connection to it for as long as it lives; the kernel closes it however the rank ends. When the last
is closed, the keeper ends Ray and itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar, cast

from dpex.errors import ClusterError

__all__ = [
    "embedded_cpus",
    "free_cores",
    "init_ray",
    "join_keeper",
    "quiet_ray",
    "rank_environment",
    "shared_job",
    "start",
    "within",
]

logger = logging.getLogger("dpex")

T = TypeVar("T")

_START_SECONDS = 120.0
_FIRST_RANK_SECONDS = 30.0
_LAST_RANK_SECONDS = 2.0
_GIB = 1 << 30

# What tells one rank from another. A keeper inherits the first rank's; tasks must see their own's.
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
)

# File descriptors by whose end others see that this process has ended.
_held: list[int] = []


def embedded_cpus() -> int:
    """Logical CPUs of an embedded Ray: 64, or the cores where there are more.

    The loader itself decides how many tasks run at once; with fewer logical CPUs Ray would throw
    away idle workers beyond their number, and the caches in them.
    """
    return max(64, _cores())


def free_cores() -> int:
    """This process's share of the host's cores: what it may use, divided among local ranks."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, _cores() // max(1, int(ranks) if ranks.isdecimal() else 1))


def _cores() -> int:
    """Cores that affinity and the container's quota leave to this process."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def start() -> None:
    """Start a Ray that is gone with this process, killed or not, and connect this process to it.

    Raises:
        ClusterError: Ray did not start; says why.
    """
    with _environment(
        # One idle worker per logical CPU would be started at once.
        RAY_prestart_worker_first_driver="0",
        # Ray prints a warning at 4 times this many workers; by default it is the number of cores,
        # which ten waiting workers on two cores already exceed.
        RAY_worker_maximum_startup_concurrency=str(max(16, _cores())),
    ):
        try:
            context = init_ray(
                _START_SECONDS,
                address="local",
                num_cpus=embedded_cpus(),
                object_store_memory=_object_store_bytes(),
                include_dashboard=False,
            )
        except Exception as error:
            raise ClusterError(
                f"an embedded Ray did not start: {str(error).rstrip('.')}. Its files lie under "
                "RAY_TMPDIR (else TMPDIR, else /tmp), which must be writable and shorter than 38 "
                "characters; its token lies in ~/.ray (unless RAY_AUTH_MODE=disabled)"
            ) from error
    _reap_after_us(context.address_info["session_dir"])


def init_ray(timeout_s: float, **options: Any) -> Any:
    """Call ``ray.init`` without its messages, and wait no longer than given for it.

    The thread that starts Ray never ends: the kernel kills what a thread started when that thread
    ends (Ray asks for PR_SET_PDEATHSIG), so it must not be the caller's. And only in the main
    thread would Ray replace the process's SIGTERM handler.

    Returns:
        What ``ray.init`` returned.

    Raises:
        TimeoutError: It is still under way after ``timeout_s``.
        Exception: Whatever ``ray.init`` raised.
    """
    import ray

    def call() -> Any:
        with quiet_ray(), warnings.catch_warnings():
            # Tips on its own future (Ray < 2.60).
            warnings.simplefilter("ignore", FutureWarning)
            return ray.init(logging_level=logging.ERROR, **options)

    return within(timeout_s, call, keep_thread=options.get("address") == "local")


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


def within(timeout_s: float, call: Callable[[], T], *, keep_thread: bool = False) -> T:
    """Call in a thread of its own and give up waiting after the given time.

    Args:
        timeout_s: How long to wait.
        call: What to call; after the time is over its outcome is lost.
        keep_thread: Whether the thread stays when the call has returned.

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
            if keep_thread:
                threading.Event().wait()

    threading.Thread(target=run, name="dpex-connect", daemon=True).start()
    wait([outcome], timeout_s)
    if not outcome.done():
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return outcome.result()


def _object_store_bytes() -> int:
    """30 % of the memory this process may use, but no more than /dev/shm has.

    Ray's own default ignores a /dev/shm below 10 GB, as most containers have, and goes to disk.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().splitlines()
        groups += [f"/sys/fs/cgroup{line[3:]}/memory.max" for line in own if line[:3] == "0::"]
    for group in groups:
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            limits.append(int(Path(group).read_text()))
    wanted = max(_GIB // 8, min(int(0.3 * min(limits)), 200 * _GIB))
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
def _environment(**variables: str) -> Iterator[None]:
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
    _start_detached(
        [sys.executable, "-I", "-S", "-c", _REAPER, "dpex-reaper", str(os.getpid()), session_dir],
        stdin=read_end,
    )
    os.close(read_end)
    _held.append(write_end)


def _start_detached(command: list[str], **options: Any) -> None:
    """Start a process that is not waited for and that no signal to our group or terminal meets."""
    quiet = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    process = subprocess.Popen(command, start_new_session=True, **{**quiet, **options})
    process.returncode = 0  # else Python warns that it still runs when the object goes


def shared_job() -> str | None:
    """A name that this host's ranks of one job have in common; ``None`` in a process alone."""
    environ = os.environ
    ranks = environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE") or ""
    several = ranks.isdecimal() and int(ranks) > 1
    distributed = sys.modules.get("torch.distributed")
    if not ranks and distributed and distributed.is_available() and distributed.is_initialized():
        several = distributed.get_world_size() > 1
    if not several:
        return None
    # Without a rendezvous in the environment, ranks were started by one parent.
    port = environ.get("MASTER_PORT")
    rendezvous = f"{environ.get('MASTER_ADDR')}:{port}" if port else f"parent {os.getppid()}"
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    # Another interpreter could not use the Ray of this one.
    return "\n".join([rendezvous, run, socket.gethostname(), sys.prefix])


def rank_environment() -> dict[str, str]:
    """The variables in which this rank differs from the one that started the keeper."""
    return {name: os.environ[name] for name in _RANK_VARIABLES if name in os.environ}


def join_keeper(job: str) -> str:
    """Hold the job's shared Ray until this process ends, started by whoever comes first.

    Returns:
        Ray's address, ``"ip:port"``, to connect to.

    Raises:
        ClusterError: The keeper could not start Ray; says why and where its log is.
    """
    stem = _runtime_directory() / hashlib.sha256(job.encode()).hexdigest()[:16]
    deadline = time.monotonic() + _START_SECONDS
    for _ in range(3):
        with contextlib.closing(_reach_keeper(stem, deadline)) as connection:
            connection.settimeout(max(1.0, deadline - time.monotonic()))
            try:
                reply = connection.makefile("rb").readline()
            except TimeoutError:
                break
            except OSError:
                reply = b""
            if reply:
                answer = json.loads(reply)
                if "error" in answer:
                    raise ClusterError(f"the shared Ray of this host's ranks: {answer['error']}")
                _held.append(os.dup(connection.fileno()))
                return str(answer["address"])
        # It ended while we came (its last rank left, or it was killed): once more.
    raise ClusterError(
        "the process that should run the shared Ray of this host's ranks does not answer; "
        f"its log: {stem}.log"
    )


def _runtime_directory() -> Path:
    """A directory of this user alone, with a name short enough for the path of a socket."""
    base = tempfile.gettempdir()
    directory = Path(base if len(base) < 60 else "/tmp") / f"dpex-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
        raise ClusterError(f"{directory} must be a directory that only this user can access")
    return directory


def _reach_keeper(stem: Path, deadline: float) -> socket.socket:
    """Connect to the keeper; start it if there is none."""
    path = stem.with_suffix(".sock")
    connection = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        connection.connect(str(path))
        return connection
    with _locked(stem, deadline):
        try:
            connection.connect(str(path))
        except OSError:
            # We listen and the keeper inherits: whoever connects from here on waits in the queue.
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(1024)
                _start_keeper(stem, listener)
            connection.connect(str(path))
    return connection


@contextlib.contextmanager
def _locked(stem: Path, deadline: float) -> Iterator[None]:
    import fcntl

    with (stem.parent / "lock").open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(f"{file.name} stays locked by another process") from None
                time.sleep(0.02)
        yield


def _start_keeper(stem: Path, listener: socket.socket) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    # Not -m: dpex need not be where a fresh interpreter would look for it.
    code = (
        "import sys; sys.path.append(sys.argv[1]); "
        "from dpex.cluster.embedded import keep; keep(sys.argv[2], int(sys.argv[3]))"
    )
    root = str(Path(__file__).parents[2])
    with stem.with_suffix(".log").open("wb") as log:
        _start_detached(
            [sys.executable, "-P", "-c", code, root, str(stem), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=environ,
            stdout=log,
            stderr=log,
        )


def keep(stem: str, listener_fd: int) -> None:
    """Be the keeper: run Ray while ranks are connected to the listening socket.

    Args:
        stem: Path of the socket and of the log, without their suffixes.
        listener_fd: File descriptor of the listening socket.
    """
    listener = socket.socket(fileno=listener_fd)
    try:
        start()
        import ray

        answer = {"address": ray.get_runtime_context().gcs_address}
    except Exception as error:
        answer = {"error": str(error)}
    _serve(Path(stem), listener, json.dumps(answer).encode() + b"\n")
    if "error" in answer:
        sys.exit(answer["error"])
    ray.shutdown()
    Path(stem).with_suffix(".log").unlink(missing_ok=True)


def _serve(stem: Path, listener: socket.socket, answer: bytes) -> None:
    """Answer ranks until the last is gone; then give up the socket so that none comes too late."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    ranks = 0
    end = time.monotonic() + _FIRST_RANK_SECONDS
    while ranks or time.monotonic() < end:
        for key, _ in selector.select(None if ranks else max(0.0, end - time.monotonic())):
            if key.fileobj is listener:
                rank, _address = listener.accept()
                selector.register(rank, selectors.EVENT_READ)
                ranks += 1
                with contextlib.suppress(OSError):
                    rank.sendall(answer)
                continue
            rank = cast(socket.socket, key.fileobj)
            with contextlib.suppress(OSError):
                if rank.recv(1):
                    continue
            selector.unregister(rank)
            rank.close()
            ranks -= 1
            end = time.monotonic() + _LAST_RANK_SECONDS
    with _locked(stem, time.monotonic() + _FIRST_RANK_SECONDS):
        stem.with_suffix(".sock").unlink(missing_ok=True)
    # Who connected in the meantime reads the end of the file and tries again.
    listener.close()


def _let_go_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_let_go_in_child)
