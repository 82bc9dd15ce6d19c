"""One local Ray for several ranks of a machine.

The first rank starts a keeper, a process that runs ``keep`` and listens on a Unix socket. Each rank
holds a connection to the keeper until it ends. The kernel closes that connection however the rank
ends. When the last connection is closed, the keeper shuts Ray down and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.cluster.limits import local_ranks
from dpex.cluster.local.directory import runtime_directory
from dpex.cluster.local.forked_worker import is_own
from dpex.cluster.local.launch import settled, start
from dpex.cluster.local.process_end import hold, start_detached
from dpex.errors import ClusterError
from dpex.worker.environment import differences

__all__ = ["SharedRay", "join_keeper", "keep", "shared_job"]


def shared_job() -> str | None:
    """Return a name that this machine's ranks of one job share; ``None`` for a single process."""
    environ = os.environ
    ranks = local_ranks()
    distributed = sys.modules.get("torch.distributed")
    if ranks is None and (world := environ.get("WORLD_SIZE")):
        ranks = int(world) if world.isdecimal() else 1
    elif ranks is None and distributed and distributed.is_available():
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if ranks is None or ranks < 2:
        return None
    # Ranks without a rendezvous in the environment are children of one process.
    port = environ.get("MASTER_PORT")
    rendezvous = f"{environ.get('MASTER_ADDR')}:{port}" if port else f"parent {os.getppid()}"
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    # Ranks of another Python environment cannot use this process's Ray.
    return "\n".join([rendezvous, run, socket.gethostname(), sys.prefix])


@dataclass(frozen=True)
class SharedRay:
    """The local Ray that this machine's ranks share.

    Attributes:
        address: Its address, ``"ip:port"``.
        token: Environment variables that lead to its token.
        jobs: As in ``StartedRay``.
        environment: The environment of its processes, which is that of the first rank.
    """

    address: str
    token: dict[str, str]
    jobs: str | None
    environment: dict[str, str] = field(repr=False)  # it can contain secrets

    def register(self, job_id: str, server: str | None) -> None:
        """Write the file of this rank's job, which worker processes read; call it before the job.

        Args:
            job_id: Id of the job, in hexadecimal form.
            server: Address of this rank's fork server, if it has one.
        """
        assert self.jobs is not None
        variables = [
            name if value is None else f"{name}={value}"
            for name, value in differences(self.environment)
        ]
        texts = "".join(f"{text}\0" for text in [server or "", *variables])
        Path(self.jobs, job_id).write_bytes(os.fsencode(texts))


def join_keeper(job: str) -> SharedRay:
    """Hold the job's shared Ray until this process ends; the first rank starts it.

    Raises:
        ClusterError: The keeper could not start Ray, with the reason; or the keeper does not
            answer, with the path of its log.
    """
    stem = runtime_directory() / hashlib.sha256(job.encode()).hexdigest()[:16]
    deadline = time.monotonic() + tuning.START_S
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
                    raise ClusterError(
                        f"the ranks of this machine share a Ray that failed: {answer['error']}"
                    )
                life = os.dup(connection.fileno())
                hold(life)
                BackgroundThread(
                    target=_pass_on_settled, args=(life,), name="dpex-settled", daemon=True
                ).start()
                return SharedRay(**answer)
        # The keeper ended meanwhile: its last rank left, or it was killed. Try again.
    raise ClusterError(
        "the process that runs the shared Ray of this machine's ranks does not answer. Its log "
        f"says why: {stem}.log"
    )


def _pass_on_settled(life: int) -> None:
    """Tell the keeper when its deferred processes may start; see ``settled``."""
    settled.wait()
    with contextlib.suppress(OSError):
        os.write(life, b".")


def _reach_keeper(stem: Path, deadline: float) -> socket.socket:
    """Connect to the keeper, and start it if there is none."""
    path = stem.with_suffix(".sock")
    with contextlib.suppress(OSError):
        return _connected(path)
    with _locked(stem, deadline):
        try:
            return _connected(path)
        except OSError:
            # This process listens and the keeper inherits the socket. A rank that connects before
            # the keeper accepts waits in the socket's queue.
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(1024)
                _start_keeper(stem, listener)
            return _connected(path)


def _connected(path: Path) -> socket.socket:
    """Connect to a keeper of this user.

    Raises:
        OSError: No keeper listens, or one of another user.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        if not is_own(connection):
            raise PermissionError(f"the process that listens at {path} is another user's")
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _locked(stem: Path, deadline: float) -> Iterator[None]:
    began = time.monotonic()
    with (stem.parent / "lock").open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now > deadline:
                    raise ClusterError(
                        "another rank on this machine has been starting or ending the shared Ray "
                        f"for {now - began:.0f} s. It may hang: end it and run again (lock: "
                        f"{file.name})"
                    ) from None
                time.sleep(0.02)
        yield


def _start_keeper(stem: Path, listener: socket.socket) -> None:
    # Not -m: dpex may be outside a new interpreter's search path.
    code = (
        "import sys; sys.path.append(sys.argv[1]); "
        "from dpex.cluster.local.shared_by_ranks import keep; keep(sys.argv[2], int(sys.argv[3]))"
    )
    root = str(Path(__file__).parents[3])
    with stem.with_suffix(".log").open("wb") as log:
        start_detached(
            [sys.executable, "-P", "-c", code, root, str(stem), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdout=log,
            stderr=log,
        )


def keep(stem: str, listener_fd: int) -> None:
    """Run Ray, as the keeper, while ranks are connected to the listening socket.

    Args:
        stem: Path of the socket and of the log, without their suffixes.
        listener_fd: File descriptor of the listening socket.
    """
    listener = socket.socket(fileno=listener_fd)
    answer: dict[str, object]
    inherited = dict(os.environ)
    try:
        started = start(for_ranks=True)
        if started.jobs is None:
            settled.set()  # an agent, deferred until then, makes the ranks' runtime_envs
        import ray

        answer = {
            "address": ray.get_runtime_context().gcs_address,
            "token": started.token,
            "jobs": started.jobs and str(started.jobs),
            "environment": inherited,
        }
    except Exception as error:
        answer = {"error": str(error)}
    _serve(Path(stem), listener, json.dumps(answer).encode() + b"\n")
    if "error" in answer:
        sys.exit(str(answer["error"]))
    ray.shutdown()
    Path(stem).with_suffix(".log").unlink(missing_ok=True)


def _serve(stem: Path, listener: socket.socket, answer: bytes) -> None:
    """Answer ranks until the last one disconnects, then remove the socket.

    A later rank finds no socket and starts a new keeper.
    """
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    ranks = 0
    end = time.monotonic() + tuning.FIRST_RANK_S
    while ranks or time.monotonic() < end:
        for key, _ in selector.select(None if ranks else max(0.0, end - time.monotonic())):
            if key.fileobj is listener:
                rank, _address = listener.accept()
                if not is_own(rank):
                    rank.close()
                    continue
                selector.register(rank, selectors.EVENT_READ)
                ranks += 1
                with contextlib.suppress(OSError):
                    rank.sendall(answer)
                continue
            rank = cast(socket.socket, key.fileobj)
            with contextlib.suppress(OSError):
                if rank.recv(1):
                    settled.set()
                    continue
            selector.unregister(rank)
            rank.close()
            ranks -= 1
            end = time.monotonic() + tuning.LAST_RANK_S
    with _locked(stem, time.monotonic() + tuning.FIRST_RANK_S):
        stem.with_suffix(".sock").unlink(missing_ok=True)
    # A rank that has connected meanwhile reads the end of the stream and tries again.
    listener.close()
