"""A local Ray that starts in a second, with few processes, for this machine alone."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dpex import tuning
from dpex.compat import late_agent
from dpex.compat.shortcut import PrivateName, Shortcut, replaced

__all__ = ["LEAN_START", "lean_start", "on_loopback"]

_NODE = "ray._private.node:Node."
_SERVICES = "ray._private.services:"

_START_API_SERVER = PrivateName(_NODE + "start_api_server", "starts no dashboard")
_START_LOG_MONITOR = PrivateName(
    _NODE + "start_log_monitor", "starts what forwards workers' output after the first batch"
)
_START_MONITOR = PrivateName(_NODE + "start_monitor", "starts no autoscaler")
_START_RAYLET = PrivateName(_NODE + "start_raylet", "starts the raylet with our worker program")
_CONSOLE_POPEN = PrivateName(
    _SERVICES + "ConsolePopen", "gives Ray's processes process groups of their own"
)
_GET_NODE = PrivateName(_SERVICES + "get_node", "asks for the node a hundred times a second")
_WAIT_FOR_PORT = PrivateName(
    "ray._private.node:wait_for_persisted_port", "looks for the port file a hundred times a second"
)

LEAN_START = Shortcut(
    "start a local Ray in a second",
    "the local Ray starts some seconds later, and its workers import torch themselves",
    "ray",
    start_api_server=_START_API_SERVER,
    start_log_monitor=_START_LOG_MONITOR,
    start_monitor=_START_MONITOR,
    start_raylet=_START_RAYLET,
    console_popen=_CONSOLE_POPEN,
    get_node=_GET_NODE,
    wait_for_port=_WAIT_FOR_PORT,
    options_of=PrivateName(_SERVICES + "_get_gcs_client_options", "connects to the node's head"),
    global_state=PrivateName("ray._private.state:GlobalState", "lists the nodes of the head"),
    initialize_state=PrivateName(
        "ray._private.state:GlobalState._initialize_global_state", "connects to the node's head"
    ),
    node_table=PrivateName(
        "ray._private.state:GlobalState.node_table", "lists the nodes of the head"
    ),
    ray_params=PrivateName(_NODE + "_ray_params", "sets the worker program", of_instances=True),
    setup_worker_path=PrivateName(
        "ray._private.parameter:RayParams.setup_worker_path",
        "sets the worker program",
        of_instances=True,
    ),
    webui_url=PrivateName(
        _NODE + "_webui_url", "says that there is no dashboard", of_instances=True
    ),
)

_START_PROCESS = PrivateName(
    _SERVICES + "start_ray_process", "puts a program that waits in an agent's place"
)
_DASHBOARD_ERROR = PrivateName(
    "ray._private.utils:get_dashboard_dependency_error", "says that there is no dashboard"
)
LATE_AGENTS = Shortcut(
    "start a local Ray's agents after the first batch",
    "the local Ray starts half a second later",
    "ray",
    start_raylet=_START_RAYLET,
    start_process=_START_PROCESS,
    dashboard_error=_DASHBOARD_ERROR,
    persist_port=PrivateName("ray._raylet:persist_port", "writes the agents' ports down"),
    environments_port=PrivateName(
        "ray._raylet:RUNTIME_ENV_AGENT_PORT_NAME", "names the file with an agent's port"
    ),
    dashboard_agent_port=PrivateName(
        "ray._raylet:DASHBOARD_AGENT_LISTEN_PORT_NAME", "names the file with an agent's port"
    ),
    metrics_agent_port=PrivateName(
        "ray._raylet:METRICS_AGENT_PORT_NAME", "names the file with an agent's port"
    ),
    metrics_export_port=PrivateName(
        "ray._raylet:METRICS_EXPORT_PORT_NAME", "names the file with an agent's port"
    ),
    node_address=PrivateName(
        _NODE + "_node_ip_address", "reserves the agent's port", of_instances=True
    ),
    session_directory=PrivateName(
        _NODE + "_session_dir", "writes the agents' ports down", of_instances=True
    ),
    node_id=PrivateName(_NODE + "_node_id", "writes the agents' ports down", of_instances=True),
    agent_port=PrivateName(
        "ray._private.parameter:RayParams.runtime_env_agent_port",
        "tells the agent its port",
        of_instances=True,
    ),
)

_SINGLE_HOST = PrivateName(
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    "makes Ray listen on the loopback address",
    check="a test looks at the addresses",
)
LOOPBACK = Shortcut(
    "keep a local Ray on the loopback address",
    "its ports can be reached from other hosts, by those who have its token",
    "ray",
    single_host=_SINGLE_HOST,
)

# Without these Ray has no dashboard.
_DASHBOARDS_OWN = ("aiohttp_cors", "opencensus", "prometheus_client")
# The port that Ray's agents publish if they do not listen.
_NO_PORT = -1
# Reserves the agent's port until the agent listens. No other user may get the port, because the
# raylet sends its token there.
_reserved: socket.socket | None = None


@contextlib.contextmanager
def lean_start(worker_program: Path | None) -> Iterator[Callable[[], None]]:
    """Make ``ray.init`` start only the processes that a local Ray needs, and return sooner.

    ``ray.init`` does not start the autoscaler's monitor, which has nothing to do in a local Ray. It
    does not start the API server: without a dashboard, that process only reports usage statistics.
    The log monitor, which forwards the workers' output, and the node's agents start later, when the
    cores are free. By default, Ray polls for a new node once a second, and for the port file of its
    head ten times a second. dpex polls for both a hundred times a second.

    Every process gets its own process group. A Jupyter kernel that shuts down terminates its group
    and waits until it has no children in the group. If Ray's processes were in that group, this
    wait would not end. Every process gets the token that the environment names when the context
    begins.

    Args:
        worker_program: Program to start in place of Ray's own set-up program for workers. It finds
            the path of Ray's program in the environment variable ``DPEX_SETUP_WORKER``. None for
            Ray's own program.

    Yields:
        A function that starts the delayed processes. Call it while that Ray is running.
    """
    found = LEAN_START.find()
    if found is None:
        yield lambda: None
        return
    put_off: list[Any] = []

    def start_raylet(node: Any, *args: Any, **kwargs: Any) -> None:
        if worker_program:
            os.environ["DPEX_SETUP_WORKER"] = node._ray_params.setup_worker_path
            node._ray_params.setup_worker_path = str(worker_program)
        try:
            found["start_raylet"](node, *args, **kwargs)
        finally:
            os.environ.pop("DPEX_SETUP_WORKER", None)

    def wait_for_node(gcs_address: str, node_id: str) -> None:
        state = found["global_state"]()
        found["initialize_state"](state, found["options_of"](gcs_address))
        deadline = time.monotonic() + tuning.NODE_START_S
        while not any(
            node["NodeID"] == node_id and node["Alive"] for node in found["node_table"](state)
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no node has registered in {tuning.NODE_START_S:.0f} s")
            time.sleep(tuning.NODE_POLL_S)

    def get_node(gcs_address: str, node_id: str) -> Any:
        try:
            wait_for_node(gcs_address, node_id)
        except Exception as error:  # Ray retries for 30 s after a RuntimeError
            raise LookupError(f"{type(error).__name__}: {error}") from error
        return found["get_node"](gcs_address, node_id)

    token = {n: value for n, value in os.environ.items() if n.startswith("RAY_AUTH_")}

    def start_process(*args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> Any:
        inherited = os.environ if env is None else env
        return found["console_popen"](*args, env={**inherited, **token}, process_group=0, **kwargs)

    own_group = {_CONSOLE_POPEN: start_process}
    replacements = {
        _START_API_SERVER: lambda node, **_: setattr(node, "_webui_url", ""),
        _START_LOG_MONITOR: lambda node: put_off.append(node),
        _START_MONITOR: lambda _: None,
        _START_RAYLET: start_raylet,
        _GET_NODE: get_node,
        _WAIT_FOR_PORT: functools.partial(
            found["wait_for_port"], poll_interval_ms=int(tuning.NODE_POLL_S * 1e3)
        ),
    }
    with replaced(replacements | own_group), _late_agents() as want_agents:

        def finish() -> None:
            want_agents()
            with replaced(own_group):
                for node in put_off:
                    found["start_log_monitor"](node)

        yield finish


@contextlib.contextmanager
def _late_agents() -> Iterator[Callable[[], None]]:
    """Make a node that starts inside the context start without its agents.

    The node would wait until both agents have published their ports, which takes half a second of
    processor time for each. One agent sets up runtime environments, which few tasks have. The other
    agent has nothing to do unless Ray is installed with its dashboard.

    Yields:
        A function that starts the agents, except an agent that has nothing to do.
    """
    found = LATE_AGENTS.find()
    if found is None:
        yield lambda: None
        return
    dashboard_ports = [
        found[name]
        for name in ("dashboard_agent_port", "metrics_agent_port", "metrics_export_port")
    ]
    # Ray would import the dashboard's modules until one is missing, which takes time.
    missing = [name for name in _DASHBOARDS_OWN if importlib.util.find_spec(name) is None]
    no_dashboard = (
        ImportError(f"not installed: {missing}") if missing else found["dashboard_error"]()
    )
    wanted: list[Path] = []

    def start_node(node: Any, *args: Any, **kwargs: Any) -> None:
        ports = {found["environments_port"]: _reserve_port(node._node_ip_address)}
        node._ray_params.runtime_env_agent_port = ports[found["environments_port"]]
        if no_dashboard:
            ports |= dict.fromkeys(dashboard_ports, _NO_PORT)
        for name, port in ports.items():
            found["persist_port"](node._session_dir, node._node_id, name, port)
        wanted.append(Path(node._session_dir, "agents_wanted"))
        found["start_raylet"](node, *args, **kwargs)  # ``lean_start`` has replaced it

    def start_ray_process(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return found["start_process"]([late(option) for option in command], *args, **kwargs)

    def late(option: str) -> str:
        name, _, agent = option.partition("=")
        if name == "--dashboard_agent_command" and no_dashboard:
            agent = ""
        elif name != "--runtime_env_agent_command":
            return option
        elif ".py " not in agent and _reserved is not None:  # it would not share the port
            _reserved.close()
            return option
        program = [sys.executable, "-I", "-S", late_agent.__file__, str(wanted[-1])]
        return f"{name}={subprocess.list2cmdline(program)} {agent}"

    def want() -> None:
        for path in wanted:
            path.touch()

    replacements = {
        _START_RAYLET: start_node,
        _START_PROCESS: start_ray_process,
        _DASHBOARD_ERROR: lambda: no_dashboard,
    }
    with replaced(replacements):
        yield want


def _reserve_port(address: str) -> int:
    """Reserve a port that only processes of this user can share, and return its number."""
    global _reserved
    _reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    _reserved.bind((address, 0))
    return int(_reserved.getsockname()[1])


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make ``ray.init`` start or join a Ray that listens on the loopback address alone.

    By default, Ray replaces the loopback address by another address of the machine, and then
    listens on all interfaces. It keeps the loopback address on systems without Ray clusters, such
    as macOS.
    """
    if LOOPBACK.find() is None:
        yield
        return
    with replaced({_SINGLE_HOST: False}):
        yield
