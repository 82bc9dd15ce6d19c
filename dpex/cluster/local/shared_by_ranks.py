"""One embedded Ray for several ranks of a host.

The first rank starts a keeper, a process of this module that runs Ray and listens on a Unix socket.
A rank holds one connection to it for as long as it lives; the kernel closes it however the rank
ends. When the last is closed, the keeper ends Ray and itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from dpex.cluster.local.directory import runtime_directory
from dpex.cluster.local.launch import START_SECONDS, settled, start
from dpex.cluster.local.process_end import hold, start_detached
from dpex.errors import ClusterError

__all__ = ["join_keeper", "keep", "rank_environment", "shared_job"]

_FIRST_RANK_SECONDS = 30.0
_LAST_RANK_SECONDS = 2.0

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


def join_keeper(job: str) -> tuple[str, dict[str, str]]:
    """Hold the job's shared Ray until this process ends, started by whoever comes first.

    Returns:
        Ray's address, ``"ip:port"``, to connect to; and the variables by which its token is found.

    Raises:
        ClusterError: The keeper could not start Ray; says why and where its log is.
    """
    stem = runtime_directory() / hashlib.sha256(job.encode()).hexdigest()[:16]
    deadline = time.monotonic() + START_SECONDS
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
                hold(os.dup(connection.fileno()))
                return answer["address"], answer["token"]
        # It ended while we came (its last rank left, or it was killed): once more.
    raise ClusterError(
        "the process that should run the shared Ray of this host's ranks does not answer; "
        f"its log: {stem}.log"
    )


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
        "from dpex.cluster.local.shared_by_ranks import keep; keep(sys.argv[2], int(sys.argv[3]))"
    )
    root = str(Path(__file__).parents[3])
    with stem.with_suffix(".log").open("wb") as log:
        start_detached(
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
    answer: dict[str, object]
    try:
        token = start()
        settled.set()  # the ranks' workers have environments of their own, which an agent makes
        import ray

        answer = {"address": ray.get_runtime_context().gcs_address, "token": token}
    except Exception as error:
        answer = {"error": str(error)}
    _serve(Path(stem), listener, json.dumps(answer).encode() + b"\n")
    if "error" in answer:
        sys.exit(str(answer["error"]))
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
