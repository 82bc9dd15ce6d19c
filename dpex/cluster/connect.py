"""Connection to the Ray that ``head_address`` names.

``"auto"`` and ``"cluster"`` select the first that exists: the Ray that this process is connected
to, RAY_ADDRESS, a live cluster that this user started here. Every wait has a timeout, and every
error message says what to do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dpex import tuning
from dpex.cluster import node_versions
from dpex.cluster.client import SCHEME, join_through_client
from dpex.cluster.forked_exit import leave_ray_to_parent
from dpex.cluster.interrupted_exit import die_by_interrupt
from dpex.cluster.local import launch
from dpex.cluster.machine_share import ranks_here, usable_cores
from dpex.cluster.nodes_here import (
    HOST_PORT,
    Raylet,
    local_raylets,
    node_of,
    probe,
    running_here,
    same_endpoint,
    split,
)
from dpex.cluster.raylet_end import log_end_of_raylet
from dpex.cluster.standard_streams import open_missing_streams
from dpex.cluster.tokens import MODE, forget_token, hide_token, require_token, token_hint
from dpex.compat.late_calls import prepare
from dpex.errors import ClusterError
from dpex.log import announce

__all__ = [
    "Connection",
    "PROCESSES",
    "choose",
    "cluster_size",
    "connect",
    "cpu_users",
    "finds_ray",
    "parse_address",
    "ray_job",
]

logger = logging.getLogger("dpex")

PROCESSES = "processes"
"""The ``head_address`` of a loader whose workers are processes of this machine, without Ray."""

_FORKED = (
    "this process was forked from one connected to Ray, and Ray does not survive a fork: start it "
    "with the 'spawn' or 'forkserver' method instead, or run the loader's workers without Ray: "
    f"head_address={PROCESSES!r}"
)

_lock = threading.Lock()
_current: tuple[tuple[str, str], Connection] | None = None
_forked_from_driver = False


@dataclass(frozen=True)
class Connection:
    """This process's connection to Ray.

    Attributes:
        kind: ``"existing"`` is a connection that dpex did not make. ``"cluster"`` is a cluster
            that dpex connected to. ``"local"`` is a local Ray that dpex started for this
            process. ``"client"`` goes through Ray Client.
        address: Address of the cluster's head, ``"ip:port"``.
        single_host: Whether all live nodes are on this machine and at least one of them has CPUs.
            Always false for Ray Client.
        runtime_env: ``runtime_env`` that tasks and actors must carry so that nodes can import
            dpex; ``None`` if they need none.
        origin: Why this Ray is used, for the log.
        dashboard: ``"host:port"`` of the cluster's dashboard, if it has one and dpex knows it.
        server: ``"ray://host:port"`` of the Ray Client server that dpex connected to; else empty.
    """

    kind: Literal["existing", "cluster", "local", "client"]
    address: str
    single_host: bool
    runtime_env: dict[str, Any] | None
    origin: str = ""
    dashboard: str = ""
    server: str = ""

    def __str__(self) -> str:
        """Return one line that names the Ray and its size."""
        origin = f" ({self.origin})" if self.origin else ""
        if self.kind == "local":
            cores = usable_cores()
            return f"local Ray on {cores} core{'s' * (cores != 1)}{origin}"
        nodes, cpus, gpus = cluster_size()
        size = f"{nodes} node{'s' * (nodes != 1)}, {cpus:g} CPU{'s' * (cpus != 1)}"
        if gpus:
            size += f", {gpus:g} GPU{'s' * (gpus != 1)}"
        return f"Ray at {self.server or self.address}{origin}: {size}"


def connect(head_address: str) -> Connection:
    """Connect this process to the Ray that ``head_address`` names, unless it is connected already.

    Args:
        head_address: ``"auto"``, ``"cluster"``, ``"local"``, ``"host:port"`` or
            ``"ray://host:port"``; see ``DpexDataLoader``.

    Raises:
        ClusterError: This Ray does not exist or does not start, this process is connected to
            another Ray, or the nodes cannot run dpex's tasks. Or this process's interpreter or
            dpex is not a file that Ray can run.
        ValueError: ``head_address`` has none of the forms.
    """
    global _current
    request = parse_address(head_address, "head_address")
    node_versions.check_programs()
    with _lock, _undivided():
        if _forked_from_driver:
            raise ClusterError(_FORKED)
        die_by_interrupt()
        open_missing_streams()
        connection = _existing(request) if _is_connected() else _new(request)
        prepare()
        if _current is None or connection is not _current[1]:
            _announce(connection)
            if connection.kind != "client":
                log_end_of_raylet(_node_here())
        _current = (ray_job(), connection)
        return connection


def finds_ray(head_address: str) -> bool:
    """Return whether there is a Ray for ``head_address`` that dpex need not start.

    Args:
        head_address: As for ``connect``.

    Raises:
        ClusterError: ``head_address`` is ``"cluster"``, and there is none.
        ValueError: ``head_address``, or RAY_ADDRESS, has none of the forms.
    """
    return _forked_from_driver or _is_connected() or choose(head_address)[0] != PROCESSES


def _announce(connection: Connection) -> None:
    """Log which Ray this process uses; of several ranks, only the first does."""
    if os.environ.get("RANK", "0") == "0":
        dashboard = f", dashboard http://{connection.dashboard}" if connection.dashboard else ""
        announce(f"{connection}{dashboard}")


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Defer the first Ctrl-C to the end of the block; a second one takes effect at once.

    A Ray that is only partly imported or started is unusable.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple[int, Any]] = []

    def note(number: int, frame: Any) -> None:
        pressed.append((number, frame))
        if len(pressed) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(pressed) == 1:
            handler(*pressed[0])


def parse_address(value: str, name: str) -> str:
    """Return an address unchanged if it has one of the forms of ``head_address``.

    Args:
        value: The address.
        name: Source of the address, for error messages.

    Raises:
        ValueError: The address has none of the forms.
    """
    # Ray gives RAY_ADDRESS its meaning, and knows no "cluster".
    words = ["auto", "local"] if name == "RAY_ADDRESS" else ["auto", "cluster", "local", PROCESSES]
    if isinstance(value, str):
        if value in words:
            return value
        match = HOST_PORT.fullmatch(value.removeprefix(SCHEME))
        if match and 0 < int(match["port"]) < 65536:
            return value
    raise ValueError(
        f"{name} must be {', '.join(map(repr, words))}, 'host:port' or 'ray://host:port' (an IPv6 "
        f"address in brackets, a port in [1, 65535]), {name} was {value!r}"
    )


def _is_connected() -> bool:
    if "ray" not in sys.modules:
        return False
    import ray  # another thread may still be importing it

    return bool(ray.is_initialized())


def _existing(request: str) -> Connection:
    """Return this process's connection, or raise ``ClusterError`` if another Ray is requested."""
    import ray

    job = ray_job()
    known = _current[1] if _current is not None and _current[0] == job else None
    address = job[0]
    if request == "local":
        if known is None or known.kind != "local":
            raise ClusterError(
                f"head_address='local' asks for a local Ray, but this process is connected to "
                f"the Ray at {address}. Pass head_address='auto' to use that one, or call "
                "ray.shutdown() first"
            )
    elif request == "cluster" and known is not None and known.kind == "local":
        raise ClusterError(
            "head_address='cluster' asks for a cluster, but this process uses a local Ray. Call "
            "ray.shutdown() first, or pass head_address='auto' to use the local Ray"
        )
    elif request not in {"auto", "cluster"} and not _is_same(request, address, known):
        connected = known.server if known is not None and known.server else address
        raise ClusterError(
            f"head_address={request!r}, but this process is connected to the Ray at {connected}. "
            "Pass head_address='auto' to use that one, or call ray.shutdown() first"
        )
    if known is not None:
        return known
    origin = "this process was connected to it"
    if ray.util.client.ray.is_connected():
        return _checked_client(origin)
    return _checked("existing", origin)


def _is_same(request: str, address: str, known: Connection | None) -> bool:
    """Return whether a request can mean the Ray that this process is connected to.

    Args:
        request: ``"host:port"`` or ``"ray://host:port"``.
        address: Address of the head.
        known: The connection, if dpex knows it already.
    """
    import ray

    if not request.startswith(SCHEME):
        return same_endpoint(request, address)
    # Ray does not say which server the program itself has connected to.
    server = known.server if known is not None else ""
    return ray.util.client.ray.is_connected() and server in {"", request}


def choose(head_address: str) -> tuple[str, str]:
    """Choose the Ray for a process that is connected to none, without connecting to it.

    Args:
        head_address: As for ``connect``.

    Returns:
        ``"local"``, ``"host:port"``, ``"ray://host:port"`` or ``"processes"``; and why:
        ``"head_address"``, ``"RAY_ADDRESS"``, ``"found on this machine"``, or
        ``"no cluster found"``.

    Raises:
        ClusterError: ``head_address`` is ``"cluster"``, and there is none.
        ValueError: ``head_address``, or RAY_ADDRESS, has none of the forms.
    """
    if parse_address(head_address, "head_address") not in {"auto", "cluster"}:
        return head_address, "head_address"
    variable = os.environ.get("RAY_ADDRESS", "").strip()
    if variable == "local" and head_address == "cluster":
        raise ClusterError(
            "head_address='cluster' asks for a cluster, but RAY_ADDRESS is 'local'. Set "
            "RAY_ADDRESS to the cluster's address"
        )
    if variable and variable != "auto":
        return parse_address(variable, "RAY_ADDRESS"), "RAY_ADDRESS"
    if (found := _running_cluster()) is not None:
        return found, "found on this machine"
    if head_address == "cluster":
        raise ClusterError(
            "head_address='cluster' found no cluster: RAY_ADDRESS is not set, and no node that "
            f"this user started on this machine has its files in {_temporary_directory()}/ray. Set "
            "RAY_ADDRESS, pass the head's 'host:port', set RAY_TMPDIR as for `ray start`, or start "
            "a node here: `ray start --address=HOST:PORT --num-cpus=0`"
        )
    return PROCESSES, "no cluster found"


def _new(head_address: str) -> Connection:
    request, why = choose(head_address)
    if request == "local":
        return _local()
    if request == PROCESSES:
        raise ClusterError(
            f"head_address={head_address!r} names no Ray to connect to ({why}). Start a cluster, "
            "or pass head_address='local'"
        )
    given = why in {"head_address", "RAY_ADDRESS"}
    where = f"{why}={request!r}" if given else f"{request} ({why})"
    origin = "" if why == "head_address" else why
    forget_token()
    through_client = request.startswith(SCHEME)
    dashboard = ""
    if through_client:
        join_through_client(request, where)
    else:
        dashboard = _join(request, where)
    try:
        if through_client:
            return _checked_client(origin, server=request)
        return replace(_checked("cluster", origin), dashboard=dashboard)
    except ClusterError:
        launch.disconnect()
        raise


def _checked(kind: Literal["existing", "cluster"], origin: str) -> Connection:
    single_host = _is_single_host()
    runtime_env = node_versions.check_nodes(single_host=single_host)
    return Connection(kind, ray_job()[0], single_host, runtime_env, origin)


def _checked_client(origin: str, *, server: str = "") -> Connection:
    """Return the connection through Ray Client, after a check that its job can import dpex.

    The server's process for this client imports dpex.

    Args:
        origin: Why this Ray is used.
        server: The server to which dpex connected and sent its package; empty if the program made
            the connection.

    Raises:
        ClusterError: The nodes cannot run dpex's tasks, or lack dpex and the job does not bring it.
    """
    import ray

    context = ray.get_runtime_context()
    lacking = node_versions.check_nodes(single_host=False, including=context.get_node_id())
    if lacking is not None and not server:
        raise ClusterError(
            "this process was connected through Ray Client (ray://) without this dpex, which the "
            "cluster lacks too. Connect with "
            "ray.init('ray://...', runtime_env={'py_modules': "
            f"[{str(node_versions.PACKAGE)!r}]}}), or call "
            "ray.shutdown() and pass head_address='ray://...'"
        )
    modules = list(context.runtime_env.get("py_modules") or [])
    runtime_env = {"py_modules": modules} if modules else None
    return Connection("client", ray_job()[0], False, runtime_env, origin, server=server)


def _local() -> Connection:
    if (ranks := ranks_here()) > 1:
        raise ClusterError(
            f"a local Ray serves one process, and this is one of {ranks} ranks. Start one Ray for "
            "the ranks of this machine with `ray start --head`, or run the workers without Ray: "
            f"head_address={PROCESSES!r}"
        )
    launch.start()
    return Connection("local", ray_job()[0], single_host=True, runtime_env=None)


def _temporary_directory() -> str:
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def _running_cluster() -> str | None:
    """Return the address of a live cluster that this user started here with ``ray start``, if any.

    Source:
        Ray writes the address of the last ``ray start`` to this file, and leaves it there when the
        cluster has ended. ``ray.init`` does not write it, so the file never names a local Ray.
    """
    file = Path(_temporary_directory()) / "ray" / "ray_current_cluster"
    try:
        # Other users can exchange the file at any time, also for a pipe that nobody writes to.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as opened:  # noqa: PTH123
            foreign = os.fstat(opened.fileno()).st_uid != os.getuid()
            address = "" if foreign else opened.read().strip()
    except OSError:
        return None
    if foreign or not HOST_PORT.fullmatch(address):
        logger.debug("ignoring %s: not this user's", file)
        return None
    raylets = local_raylets()
    if raylets is not None and not node_of(address, raylets):
        logger.debug("ignoring %s: no node of %s runs on this machine any more", file, address)
        return None
    try:
        probe(address, tuning.LOOKUP_S)
    except OSError as error:
        logger.debug("ignoring %s: nobody answers at %s (%s)", file, address, error)
        return None
    return address


def _join(address: str, where: str) -> str:
    """Connect to a running cluster.

    Args:
        address: ``"host:port"``.
        where: The address and its source, for error messages.

    Returns:
        Address of the cluster's dashboard; empty if there is none.

    Raises:
        ClusterError: No cluster answers, this machine runs no node of it, or Ray cannot connect.
    """
    host, port = split(address)
    command = f"`ray start --address={address} --num-cpus=0`"
    try:
        raylets, node = launch.within(tuning.CLUSTER_ANSWER_S, lambda: _answering(address))
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {where} ({error}). Check the address, or start "
            f"the cluster: `ray start --head --port={port}` on {host}, then {command} on this "
            "machine if it is another"
        ) from error
    if raylets is not None and node is None:
        others = ", ".join(sorted({raylet.address for raylet in raylets}))
        raise ClusterError(
            f"a cluster answers at {where}, but this machine runs no node of it"
            + (f" (it runs nodes of {others})" if others else "")
            + f", and a Ray driver needs one on its own machine. Start it without CPUs: {command}"
        )
    if node is not None and (mode := _auth_mode_of(node.pid)):
        require_token(mode)
    try:
        context = launch.init_ray(tuning.JOIN_S, address=node.address if node else address)
    except Exception as error:
        launch.end_failed_init()
        forget_token()
        raise ClusterError(
            f"the Ray cluster at {where} answers but cannot be joined: "
            f"{str(error).rstrip('.')}. {token_hint()}. If this machine runs no node of it, start "
            f"one: {command}"
        ) from error
    hide_token()
    return context.dashboard_url or ""


def _answering(address: str) -> tuple[list[Raylet] | None, Raylet | None]:
    """Return this machine's raylets, and the one in this cluster, once the cluster has answered."""
    raylets = local_raylets()
    node = node_of(address, raylets or [])
    # Ray's head listens on its node's own address, so a probe of "localhost" may fail.
    probe(node.address if node else address, tuning.CLUSTER_ANSWER_S)
    return raylets, node


def _auth_mode_of(raylet_pid: int) -> dict[str, str]:
    """Return the variable that sets the authentication mode of a node on this machine.

    Ray turns authentication on by itself only for clusters that it discovers itself. dpex cannot
    read the environment of another user's node, so by itself it sends no token to that user's
    cluster.

    Args:
        raylet_pid: Process id of the node's raylet.

    Returns:
        RAY_AUTH_MODE with its value; empty if the user has set it or if it is not ``token``.
    """
    if MODE not in os.environ:
        with contextlib.suppress(OSError):
            mode = f"{MODE}=token".encode()
            if mode in Path(f"/proc/{raylet_pid}/environ").read_bytes().split(b"\0"):
                return {MODE: "token"}
    return {}


def ray_job() -> tuple[str, str]:
    """Return the address of the cluster that this process is connected to, and its job's ID."""
    import ray

    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())


def _node_here() -> str:
    """Return the id of this process's node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _is_single_host() -> bool:
    import ray

    here = _node_here()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not any(node["Resources"].get("CPU") for node in nodes):
        return False  # nodes with CPUs have yet to join, perhaps on other machines
    hosts = {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerHostname"]) for node in nodes
    }
    return all(host == hosts.get(here) for host in hosts.values())


def cluster_size() -> tuple[int, float, float]:
    """Return the number of live nodes, and of their CPUs and GPUs, free or in use."""
    import ray

    total = ray.cluster_resources()
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return nodes, total.get("CPU", 0), total.get("GPU", 0)


def cpu_users() -> str:
    """Describe what uses the cluster's CPUs; this needs no dashboard.

    Returns:
        The placement groups that reserve CPUs, and the tasks and actors of all jobs that run on
        this machine; empty if there are none.
    """
    import ray

    parts = []
    for group in ray.util.placement_group_table().values():
        cpus = sum(bundle.get("CPU", 0) for bundle in group["bundles"].values())
        if group["state"] == "CREATED" and cpus:
            name = group["name"] or group["placement_group_id"]
            parts.append(f"placement group {name!r} reserves {cpus:g}")
    running = running_here(ray_job()[0])
    if running:
        busiest = ", ".join(f"{count} x {title}" for title, count in running.most_common(8))
        parts.append(f"on this node run {busiest}")
    return "; ".join(parts)


def _note_fork() -> None:
    global _forked_from_driver, _lock
    # Another thread may have held the lock at the fork, to import and start Ray.
    starts = _lock.locked()
    _lock = threading.Lock()
    ray = sys.modules.get("ray")
    initialized = getattr(ray, "is_initialized", None)  # absent while Ray is being imported
    connected = bool(initialized and initialized())
    _forked_from_driver = starts or connected
    if _forked_from_driver:
        leave_ray_to_parent(connected=connected)


os.register_at_fork(after_in_child=_note_fork)
