"""Which Ray: from ``head_address`` to a connected process.

``"auto"`` takes the Ray this process has, else RAY_ADDRESS, else a live cluster of this user on
this host, else an embedded one. Every wait has a bound, and every refusal says what to do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpex.cluster import versions
from dpex.cluster.client import SCHEME, check_server, join_through_client
from dpex.cluster.local import forkserver, launch, shared_by_ranks
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
from dpex.cluster.tokens import MODE, forget_token, hide_token, require_token
from dpex.errors import ClusterError
from dpex.worker import environment

if TYPE_CHECKING:
    from dpex.wire.pickling import Pickled

__all__ = [
    "Connection",
    "choose",
    "cluster_size",
    "connect",
    "parse_address",
    "report_busy_cpus",
]

logger = logging.getLogger("dpex")

_ANSWER_SECONDS = 15.0
_STALE_SECONDS = 2.0
_JOIN_SECONDS = 30.0

_lock = threading.Lock()
_current: tuple[tuple[str, str], Connection] | None = None
_forked_from_driver = False


@dataclass(frozen=True)
class Connection:
    """This process's Ray.

    Attributes:
        kind: ``"existing"``, connected before dpex came; ``"cluster"``, connected by dpex;
            ``"embedded"``, started by dpex for this process or this host's ranks; ``"client"``,
            through Ray Client.
        address: Where the cluster's head answers, ``"ip:port"``.
        single_host: Whether every node that is alive is on this process's host, and batches can
            be made there.
        runtime_env: What tasks and actors must carry so that nodes can import dpex; ``None``
            where they can.
    """

    kind: Literal["existing", "cluster", "embedded", "client"]
    address: str
    single_host: bool
    runtime_env: dict[str, Any] | None


def connect(head_address: str, *, bequest: Callable[[], Pickled] | None = None) -> Connection:
    """Connect this process to the Ray that ``head_address`` names, unless it is already.

    Args:
        head_address: ``"auto"``, ``"local"``, ``"host:port"`` or ``"ray://host:port"``; see
            ``DpexDataLoader``.
        bequest: Pickles a job that the workers of an embedded Ray inherit, as forks of this
            process; None if they must not be that.

    Raises:
        ClusterError: No such Ray, another one is connected, or its nodes cannot run our tasks.
        ValueError: ``head_address`` has none of the forms.
    """
    global _current
    request = parse_address(head_address, "head_address")
    with _lock, _undivided():
        if _forked_from_driver:
            raise ClusterError(
                "this process was forked from one connected to Ray, and Ray does not survive a "
                "fork: start it with the 'spawn' or 'forkserver' method instead"
            )
        # Not to be imported here: this process may have to be forked before Ray is loaded.
        ray = sys.modules.get("ray")
        connected = ray is not None and ray.is_initialized()
        connection = _existing(request) if connected else _new(request, bequest)
        _current = (_session(), connection)
        return connection


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Put the first Ctrl-C off to the end: a Ray half imported or half started is of no use.

    Who cannot wait for that presses it twice.
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
    """Return an address if it has one of the forms of ``head_address``.

    Args:
        value: The address.
        name: Where it comes from, for the errors.

    Raises:
        ValueError: It has none of the forms.
    """
    if isinstance(value, str):
        if value in {"auto", "local"}:
            return value
        match = HOST_PORT.fullmatch(value.removeprefix(SCHEME))
        if match and 0 < int(match["port"]) < 65536:
            return value
    raise ValueError(
        f"{name} must be 'auto', 'local', 'host:port' or 'ray://host:port' (an IPv6 address in "
        f"brackets, a port in [1, 65535]), {name} was {value!r}"
    )


def _session() -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())


def _existing(request: str) -> Connection:
    """The connection this process has, if it is what is asked for."""
    import ray

    session = _session()
    known = _current[1] if _current is not None and _current[0] == session else None
    address = session[0]
    through_client = ray.util.client.ray.is_connected()
    if request == "local":
        if known is None or known.kind != "embedded":
            raise ClusterError(
                f"head_address='local' asks for an embedded Ray, but this process is connected to "
                f"the Ray at {address}. Pass head_address='auto' to use that one, or call "
                "ray.shutdown() first"
            )
    elif through_client:
        check_server(request)
    elif request != "auto" and not same_endpoint(request, address):
        raise ClusterError(
            f"head_address={request!r}, but this process is connected to the Ray at {address}. "
            "Pass head_address='auto' to use that one, or call ray.shutdown() first"
        )
    if known is not None:
        return known
    return _checked_client(ours=False) if through_client else _checked("existing")


def choose(head_address: str) -> tuple[str, str]:
    """Say which Ray a process that is connected to none will use, and connect to nothing.

    Args:
        head_address: As for ``connect``.

    Returns:
        ``"local"``, ``"host:port"`` or ``"ray://host:port"``; and what names it, for the errors.

    Raises:
        ValueError: ``head_address``, or RAY_ADDRESS, has none of the forms.
    """
    if head_address != "auto":
        return parse_address(head_address, "head_address"), "head_address"
    variable = os.environ.get("RAY_ADDRESS", "").strip()
    if variable and variable != "auto":
        address = parse_address(variable, "RAY_ADDRESS")
        logger.info("using RAY_ADDRESS=%s", address)
        return address, "RAY_ADDRESS"
    return _running_cluster() or "local", "head_address"


def _new(head_address: str, bequest: Callable[[], Pickled] | None) -> Connection:
    request, name = choose(head_address)
    if request == "local":
        return _embedded(bequest)
    forget_token()
    try:
        if request.startswith(SCHEME):
            join_through_client(request, name)
            return _checked_client(ours=True)
        _join(request, name)
        return _checked("cluster")
    except ClusterError:
        launch.disconnect()  # also from a client's server that refused us
        raise


def _checked(kind: Literal["existing", "cluster"]) -> Connection:
    single_host = _is_single_host()
    runtime_env = versions.check_nodes(single_host=single_host)
    return Connection(kind, _session()[0], single_host, runtime_env)


def _checked_client(*, ours: bool) -> Connection:
    """The connection of a Ray Client, whose job must have dpex: its server's process needs it.

    Args:
        ours: Whether dpex was sent along when it was made.
    """
    import ray

    context = ray.get_runtime_context()
    lacking = versions.check_nodes(single_host=False, including=context.get_node_id())
    if lacking is not None and not ours:
        raise ClusterError(
            "this process was connected through Ray Client (ray://) without this dpex, which the "
            "cluster lacks too. Connect with "
            "ray.init('ray://...', runtime_env={'py_modules': "
            f"[{str(versions.PACKAGE)!r}]}}), or call "
            "ray.shutdown() and pass head_address='ray://...'"
        )
    modules = list(context.runtime_env.get("py_modules") or [])
    return Connection("client", _session()[0], False, {"py_modules": modules} if modules else None)


def _embedded(bequest: Callable[[], Pickled] | None) -> Connection:
    job = shared_by_ranks.shared_job()
    environment.remember()
    if job is None:
        launch.start(forkserver.address(bequest))
    else:
        variables = shared_by_ranks.rank_environment()
        keepers, token = shared_by_ranks.join_keeper(job)
        _join(
            keepers,
            "the Ray that this host's ranks share",
            token,
            runtime_env={"env_vars": variables} if variables else None,
        )
    address = _session()[0]
    logger.info("embedded Ray at %s, gone with %s", address, "the ranks" if job else "the process")
    return Connection("embedded", address, single_host=True, runtime_env=None)


def _running_cluster() -> str | None:
    """A live cluster that this user started on this host with ``ray start``, if there is one.

    Source:
        Ray keeps the address of the last ``ray start`` in this file and leaves it there when the
        cluster is gone. ``ray.init`` does not write it, so embedded ones are not found here.
    """
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(temporary) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
        foreign = file.stat().st_uid != os.getuid()
    except OSError:
        return None
    if foreign or not HOST_PORT.fullmatch(address):
        logger.debug("ignoring %s: not this user's", file)
        return None
    raylets = local_raylets()
    if raylets is not None and not node_of(address, raylets):
        logger.debug("ignoring %s: no node of %s runs on this host any more", file, address)
        return None
    try:
        probe(address, _STALE_SECONDS)
    except OSError as error:
        logger.debug("ignoring %s: nobody answers at %s (%s)", file, address, error)
        return None
    logger.info("found a running Ray cluster at %s (head_address='local' ignores it)", address)
    return address


def _join(address: str, name: str, token: dict[str, str] | None = None, **options: Any) -> None:
    """Connect to a running cluster.

    Args:
        address: ``"host:port"``.
        name: Where the address comes from, for the errors.
        token: The variables by which its token is found; None if the user has set them.
        **options: Further arguments of ``ray.init``.
    """
    host, port = split(address)
    command = f"`ray start --address={address} --num-cpus=0`"
    try:
        raylets, node = launch.within(_ANSWER_SECONDS, lambda: _answering(address))
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {name}={address!r} within {_ANSWER_SECONDS:g} s "
            f"({error}). Check the address, or start the cluster: `ray start "
            f"--head --port={port}` on {host}, then {command} on this host if it is another"
        ) from error
    if raylets is not None and node is None:
        others = ", ".join(sorted({raylet.address for raylet in raylets}))
        raise ClusterError(
            f"a cluster answers at {name}={address!r}, but this host runs no node of it"
            + (f" (it runs nodes of {others})" if others else "")
            + f", and a Ray driver needs one on its own host. Start it without CPUs: {command}"
        )
    if token is None and node is not None:
        token = _auth_mode_of(node.pid)
    if token:
        require_token(token)
    try:
        launch.init_ray(_JOIN_SECONDS, address=node.address if node else address, **options)
    except Exception as error:
        launch.disconnect()
        forget_token()
        raise ClusterError(
            f"the Ray cluster at {name}={address!r} answers but cannot be joined: "
            f"{str(error).rstrip('.')}. If it uses token authentication, set RAY_AUTH_MODE=token "
            f"and have its token here; if this host runs no node of it, start one: {command}"
        ) from error
    hide_token()


def _answering(address: str) -> tuple[list[Raylet] | None, Raylet | None]:
    """This host's raylets and the one of this cluster, once the cluster has answered."""
    raylets = local_raylets()
    node = node_of(address, raylets or [])
    # Ray's head listens on the node's own address, so "localhost" is answered by its node's.
    probe(node.address if node else address, _ANSWER_SECONDS)
    return raylets, node


def _auth_mode_of(raylet_pid: int) -> dict[str, str]:
    """Return the mode of authentication that this host's node of the cluster has.

    Ray turns it on by itself only for clusters that it finds by itself. Of another user's node
    nothing can be read, so no token goes to a stranger.
    """
    if MODE not in os.environ:
        with contextlib.suppress(OSError):
            mode = f"{MODE}=token".encode()
            if mode in Path(f"/proc/{raylet_pid}/environ").read_bytes().split(b"\0"):
                return {MODE: "token"}
    return {}


def _is_single_host() -> bool:
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not any(node["Resources"].get("CPU") for node in nodes):
        return False  # batches will be made by nodes that are still to come, on other hosts perhaps
    hosts = {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerHostname"]) for node in nodes
    }
    return all(host == hosts.get(here) for host in hosts.values())


def cluster_size() -> tuple[int, float, float]:
    """Count the nodes that are alive, and the CPUs and GPUs that they have, free or not."""
    import ray

    total = ray.cluster_resources()
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return nodes, total.get("CPU", 0), total.get("GPU", 0)


def report_busy_cpus() -> str:
    """Say who holds the cluster's CPUs, for a log line; needs no dashboard.

    Returns:
        Totals of the cluster, the placement groups that reserve CPUs, and the tasks and actors
        that run on this host, whichever job they belong to.
    """
    import ray

    nodes, total, _ = cluster_size()
    free = ray.available_resources().get("CPU", 0)
    parts = [f"{free:g} of {total:g} CPUs are free on {nodes} node(s)"]
    for group in ray.util.placement_group_table().values():
        cpus = sum(bundle.get("CPU", 0) for bundle in group["bundles"].values())
        if group["state"] == "CREATED" and cpus:
            name = group["name"] or group["placement_group_id"]
            parts.append(f"placement group {name!r} reserves {cpus:g}")
    running = running_here(_session()[0])
    if running:
        busiest = ", ".join(f"{count} x {title}" for title, count in running.most_common(8))
        parts.append(f"on this host run {busiest}")
    return "; ".join(parts)


def _note_fork() -> None:
    global _forked_from_driver, _lock
    _lock = threading.Lock()  # another thread may have held it
    ray = sys.modules.get("ray")
    initialized = getattr(ray, "is_initialized", None)  # not while it is being imported
    _forked_from_driver = bool(initialized and initialized())


os.register_at_fork(after_in_child=_note_fork)
