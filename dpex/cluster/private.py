"""Ray's private names: all that dpex uses stand in this file, and each has a public fallback.

What they buy is speed and seclusion, never results:

* an executor that passes blocks on between stages at once, and starts no helper actors
  (public: it looks ten times a second, and has two actors beside it);
* stages that are held back by nothing but their number of workers
  (public: also where Ray sees much on its way);
* ``iter_torch_batches`` over blocks that another process refers to
  (public: ``ray.get``);
* dataset copies that share the object store's memory until they write to it
  (public: a copy in every worker process);
* an embedded Ray that is there in a second and takes workers from a fork server
  (public: three seconds, and every worker imports torch anew);
* an embedded Ray that cannot be reached from other hosts
  (public: it listens on all interfaces, for those who have its token);
* an error where workers ask a cluster without an autoscaler for what no node has
  (public: the loader waits on, and says what for).

``DPEX_PUBLIC_RAY_ONLY=1`` forces the fallbacks; the tests run both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import ray

from dpex.cluster import late_agent
from dpex.memory import address_of, spans

if TYPE_CHECKING:
    import ray.data


__all__ = [
    "Block",
    "client_server",
    "data_iterator",
    "lean_start",
    "limit_to_concurrency",
    "on_loopback",
    "private_mappings",
    "random_ids_untouched",
    "reread_environment",
    "starts_no_nodes",
    "tune_host_process",
    "untouched_random_ids",
    "upload_package",
]

Block = tuple[ray.ObjectRef, int]
"""A block's reference and its size in bytes."""

_NODE_POLL_S = 0.01
_NO_LIMIT = 1e15
_NODE_WAIT_S = 20.0
# Without these Ray has no dashboard.
_DASHBOARDS_OWN = ("aiohttp_cors", "opencensus", "prometheus_client")
# What Ray's agents say where they do not listen.
_NO_PORT = -1
# Keeps a port for the agent that is to have it.
_reserved: socket.socket | None = None


@contextlib.contextmanager
def lean_start(worker_program: Path | None) -> Iterator[Callable[[], None]]:
    """Have ``ray.init`` start no more than an embedded Ray needs, and see at once that it is there.

    The autoscaler's monitor and, where there is no dashboard, the reporter of usage statistics are
    processes that do nothing here. The one that brings workers' output to the terminal, and the
    node's agents, can wait until the cores are free. And a new node is asked for every second, by
    default, its head every tenth of one.

    What is started gets process groups of its own: a Jupyter kernel that is to end terminates its
    group first, and then waits, in vain, until it has no children there.

    Args:
        worker_program: What to start in place of Ray's own set-up program for workers, whose path
            it finds in the environment variable ``DPEX_SETUP_WORKER``; None for Ray's own.

    Yields:
        A function that starts, in the end, what was put off.
    """
    try:
        from ray._private import node as nodes
        from ray._private import services, worker
        from ray._private.node import Node
        from ray._private.state import GlobalState

        originals = {
            (owner, name): getattr(owner, name)
            for owner, name in (
                (Node, "start_api_server"),
                (Node, "start_log_monitor"),
                (Node, "start_monitor"),
                (Node, "start_raylet"),
                (services, "ConsolePopen"),
                (services, "get_node"),
                (nodes, "wait_for_persisted_port"),
            )
        }
        options_of, node_table = services._get_gcs_client_options, GlobalState.node_table
    except (ImportError, AttributeError):
        originals = {}
    if not originals or os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1":
        yield lambda: None
        return
    put_off: list[Any] = []

    def start_raylet(node: Any, *args: Any, **kwargs: Any) -> None:
        if worker_program and hasattr(node._ray_params, "setup_worker_path"):
            os.environ["DPEX_SETUP_WORKER"] = node._ray_params.setup_worker_path
            node._ray_params.setup_worker_path = str(worker_program)
        try:
            originals[Node, "start_raylet"](node, *args, **kwargs)
        finally:
            os.environ.pop("DPEX_SETUP_WORKER", None)

    def get_node(gcs_address: str, node_id: str) -> Any:
        state = GlobalState()
        state._initialize_global_state(options_of(gcs_address))
        deadline = time.monotonic() + _NODE_WAIT_S
        while time.monotonic() < deadline and not any(
            node["NodeID"] == node_id and node["Alive"] for node in node_table(state)
        ):
            time.sleep(_NODE_POLL_S)
        return originals[services, "get_node"](gcs_address, node_id)

    own_group = {
        (services, "ConsolePopen"): functools.partial(services.ConsolePopen, process_group=0)
    }

    replacements = {
        (Node, "start_api_server"): lambda node, **_: setattr(node, "_webui_url", ""),
        (Node, "start_log_monitor"): lambda node: put_off.append(node),
        (Node, "start_monitor"): lambda _: None,
        (Node, "start_raylet"): start_raylet,
        (services, "get_node"): get_node,
        (nodes, "wait_for_persisted_port"): functools.partial(
            nodes.wait_for_persisted_port, poll_interval_ms=int(_NODE_POLL_S * 1e3)
        ),
    }
    with _replaced(replacements | own_group), _late_agents() as want_agents:

        def finish() -> None:
            want_agents()
            with _replaced(own_group):
                for node in put_off:
                    if worker._global_node is node:  # still this process's Ray
                        originals[Node, "start_log_monitor"](node)

        yield finish


@contextlib.contextmanager
def _late_agents() -> Iterator[Callable[[], None]]:
    """Have the node that is started meanwhile begin without its agents.

    It would wait until they say where they listen, and that takes half a second of processor time
    for each. One makes runtime environments, which most tasks have none of. The other has nothing
    to do unless Ray is installed with its dashboard.

    Yields:
        A function that has those agents start that there may be something to do for.
    """
    try:
        from ray._private import services, utils
        from ray._private.node import Node

        library: Any = importlib.import_module("ray._raylet")
        start_raylet, start_process = Node.start_raylet, services.start_ray_process
        import_dashboard = utils.get_dashboard_dependency_error
        persist_port, environments_port = library.persist_port, library.RUNTIME_ENV_AGENT_PORT_NAME
        dashboard_ports = (
            library.DASHBOARD_AGENT_LISTEN_PORT_NAME,
            library.METRICS_AGENT_PORT_NAME,
            library.METRICS_EXPORT_PORT_NAME,
        )
    except (ImportError, AttributeError):
        yield lambda: None
        return
    # Ray imports all that a dashboard takes until something is missing.
    missing = [name for name in _DASHBOARDS_OWN if importlib.util.find_spec(name) is None]
    no_dashboard = ImportError(f"not installed: {missing}") if missing else import_dashboard()
    wanted: list[Path] = []

    def start_node(node: Any, *args: Any, **kwargs: Any) -> None:
        ports = {environments_port: _reserve_port(node._node_ip_address)}
        node._ray_params.runtime_env_agent_port = ports[environments_port]
        if no_dashboard:
            ports |= dict.fromkeys(dashboard_ports, _NO_PORT)
        for name, port in ports.items():
            persist_port(node._session_dir, node._node_id, name, port)
        wanted.append(Path(node._session_dir, "agents_wanted"))
        start_raylet(node, *args, **kwargs)

    def start_ray_process(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return start_process([late(option) for option in command], *args, **kwargs)

    def late(option: str) -> str:
        name, _, agent = option.partition("=")
        if name == "--dashboard_agent_command" and no_dashboard:
            agent = ""
        elif name != "--runtime_env_agent_command":
            return option
        program = [sys.executable, "-I", "-S", late_agent.__file__, str(wanted[-1])]
        return f"{name}={subprocess.list2cmdline(program)} {agent}"

    def want() -> None:
        for path in wanted:
            path.touch()

    replacements = {
        (Node, "start_raylet"): start_node,
        (services, "start_ray_process"): start_ray_process,
        (utils, "get_dashboard_dependency_error"): lambda: no_dashboard,
    }
    with _replaced(replacements):
        yield want


def _reserve_port(address: str) -> int:
    """Return a port that nobody gets who does not ask for it by its number."""
    global _reserved
    _reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    # Whoever names it can have it too, as long as nobody listens.
    _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved.bind((address, 0))
    return int(_reserved.getsockname()[1])


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have ``ray.init`` start or join a Ray that listens on the loopback address alone.

    Ray puts another address of the host in its place, and listens on all interfaces then, except
    on systems where it is for single hosts.
    """
    from ray._private import ray_constants

    if not hasattr(ray_constants, "ENABLE_RAY_CLUSTER") or (
        os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1"
    ):
        yield
        return
    with _replaced({(ray_constants, "ENABLE_RAY_CLUSTER"): False}):
        yield


@contextlib.contextmanager
def _replaced(replacements: dict[tuple[Any, str], Any]) -> Iterator[None]:
    originals = {(owner, name): getattr(owner, name) for owner, name in replacements}
    for (owner, name), replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


@contextlib.contextmanager
def untouched_random_ids() -> Iterator[None]:
    """Let modules of Ray load without starting the library's generator of random ids.

    Forks of a process where it has started would all draw the same ids. What starts it is that
    classes of actors get one when they are declared.
    """
    from ray import actor

    if not hasattr(actor, "ActorClassID"):
        yield
        return
    original = actor.ActorClassID

    class FromTheSystem:
        """Stands in for the class of ids."""

        @staticmethod
        def from_random() -> Any:
            """Draw an id from the operating system."""
            return original(os.urandom(len(original.nil().binary())))

    actor.ActorClassID = FromTheSystem
    try:
        yield
    finally:
        actor.ActorClassID = original


def random_ids_untouched() -> bool:
    """Tell whether two forks of this process would draw different random ids."""
    drawn = set()
    for _ in range(2):
        readable, writable = os.pipe()
        if os.fork() == 0:
            os.write(writable, ray.ObjectID.from_random().binary())
            os._exit(0)
        os.close(writable)
        drawn.add(os.read(readable, 64))
        os.close(readable)
    return len(drawn) == 2


@functools.cache
def _data_iterator_class() -> Any:
    """Return the class of what ``data_iterator`` returns, or None where names are missing."""
    if os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1":
        return None
    try:
        from ray.data import DataContext, DataIterator
        from ray.data._internal.execution.interfaces import RefBundle  # noqa: F401
        from ray.data.block import BlockMetadata
    except ImportError:
        return None
    to_bundles = getattr(DataIterator, "_to_ref_bundle_iterator", None)
    if to_bundles is None or not hasattr(DataIterator, "_create_batch_iterator"):
        return None
    # Bundles, no statistics, no executor; before Ray 2.60 also whether the reader owns the blocks.
    parts = len(get_args(inspect.signature(to_bundles).return_annotation))
    beside_bundles = (None, False, None) if parts == 4 else (None, None)

    def bundle_of(ref: ray.ObjectRef, size_bytes: int) -> Any:
        metadata = BlockMetadata(num_rows=1, size_bytes=size_bytes, input_files=[], exec_stats=None)
        return _bundle(ref, metadata, schema=None, owns_blocks=False)

    class BlocksOfReplies(DataIterator):
        """As Ray's own split iterator meets the contract of ``ray.data.DataIterator``."""

        def __init__(self, replies: Iterator[list[Block]]) -> None:
            self._replies = replies

        def _to_ref_bundle_iterator(self) -> tuple[Any, ...]:
            return self._bundles(), *beside_bundles

        def _bundles(self) -> Iterator[Any]:
            for blocks in self._replies:
                while blocks:  # this frame keeps none that has been read
                    yield bundle_of(*blocks.pop(0))

        def _create_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
            iterator = super()._create_batch_iterator(*args, **kwargs)
            # With prefetch_batches=0 its prefetcher has nothing to do, but a thread, which would
            # stay parked for ever, one for each iteration.
            stop = getattr(getattr(iterator, "_prefetcher", None), "stop", None)
            if stop is not None and hasattr(iterator, "_prefetch_blocks"):
                stop()
                iterator._prefetch_blocks = lambda bundles: (
                    ref for bundle in bundles for ref in bundle.block_refs
                )
            return iterator

        def stats(self) -> str:
            """Return nothing: the host's pipeline has no end to sum up."""
            return ""

        def schema(self) -> None:
            """Return nothing: a frame's columns differ from block to block."""

        def get_context(self) -> Any:
            """Return the context that the iteration itself runs under."""
            return DataContext.get_current()

    return BlocksOfReplies


def data_iterator(replies: Iterator[list[Block]]) -> ray.data.DataIterator | None:
    """Return a Ray ``DataIterator`` over blocks that others refer to.

    Args:
        replies: Blocks, some at a time.

    Returns:
        None where this Ray lacks a private name that it takes.
    """
    data_iterator_class = _data_iterator_class()
    return None if data_iterator_class is None else data_iterator_class(replies)


def _bundle(ref: ray.ObjectRef, metadata: Any, **options: Any) -> Any:
    from ray.data._internal.execution.interfaces import RefBundle

    try:
        from ray.data._internal.execution.interfaces.ref_bundle import BlockEntry
    except ImportError:  # older Ray: plain pairs
        return RefBundle([(ref, metadata)], **options)
    return RefBundle([BlockEntry(ref, metadata)], **options)


def tune_host_process() -> None:
    """Fit Ray Data to being alone in this process, for a pipeline that never ends.

    Only the host's own process is changed: the user's Ray Data keeps its defaults.
    """
    import ray.data  # sets its logger up

    # A fork has the user's filters, which may make errors of them. No code of the user's runs here.
    warnings.simplefilter("ignore")
    # Says that an async actor should await; the executor's thread is none of the actor's loop.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    logger = logging.getLogger("ray.data")
    logger.setLevel(logging.ERROR)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = False
    if os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1":
        return
    with contextlib.suppress(ImportError, AttributeError):
        from ray.data._internal.execution import metadata_fetcher

        # A second thread for metadata costs a further pass of the loop for every block.
        if isinstance(metadata_fetcher._PREFETCH_ON_THREAD, bool):
            metadata_fetcher._PREFETCH_ON_THREAD = False
    with contextlib.suppress(ImportError, AttributeError):
        from ray.data._internal.execution import streaming_executor_state

        if streaming_executor_state.ray is ray:
            streaming_executor_state.ray = _WaitForAny()
    with contextlib.suppress(ImportError, AttributeError):
        from ray.data._internal.stats import _StatsManager

        # Statistics go to a detached actor: one more process that starts beside the workers.
        for name in ("register_dataset_to_stats_actor", "update_execution_metrics"):
            if callable(getattr(_StatsManager, name)):
                setattr(_StatsManager, name, staticmethod(lambda *_, **__: None))
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from ray.data._internal.execution import streaming_executor

        autoscaler = _NoAutoscaler()
        if callable(streaming_executor.create_cluster_autoscaler):
            streaming_executor.create_cluster_autoscaler = lambda *_, **__: autoscaler


class _WaitForAny:
    """The ``ray`` module, for Ray Data's executor: its wait ends with the first task that is ready.

    The executor waits until all running tasks have something, or the time is up: it polls. Short
    polls cost a quarter of a core, long ones leave workers idle.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    @staticmethod
    def wait(refs: list[Any], *, num_returns: int, timeout: float, fetch_local: bool) -> Any:
        """Wait for one of the tasks, then return all that are ready."""
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout, fetch_local=fetch_local)
        if not ready:
            return [], refs
        return ray.wait(refs, num_returns=num_returns, timeout=0, fetch_local=fetch_local)


class _NoAutoscaler:
    """Leaves scaling to Ray's own autoscaler, which sees the tasks that wait for a CPU.

    Ray Data's divides the cluster's CPUs between the executions that it knows, equally and in
    whole numbers: four loaders on two CPUs would get none each.
    """

    def __init__(self) -> None:
        # Ray Data divides it, which infinity does not stand.
        self._limits = ray.data.ExecutionResources(
            cpu=_NO_LIMIT, gpu=_NO_LIMIT, object_store_memory=_NO_LIMIT, memory=_NO_LIMIT
        )

    def try_trigger_scaling(self) -> None:
        """Do nothing."""

    def on_executor_shutdown(self) -> None:
        """Do nothing."""

    def get_total_resources(self) -> Any:
        """Return what nothing reaches: tasks wait for CPUs in Ray's scheduler."""
        return self._limits


def limit_to_concurrency(context: ray.data.DataContext) -> None:
    """Have stages held back by their ``concurrency`` alone.

    Ray's own policies also hold back what the reader has asked for, and reserve resources for each
    stage, which takes a second to begin with.
    """
    if os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1":
        return
    try:
        from ray.data._internal.execution.backpressure_policy import BackpressurePolicy
        from ray.data._internal.execution.operators.task_pool_map_operator import (
            TaskPoolMapOperator,
        )
    except ImportError:
        return
    if not hasattr(TaskPoolMapOperator, "get_max_concurrency_limit"):
        return

    class Caps(BackpressurePolicy):
        """No more tasks at once than a stage's concurrency."""

        def can_add_input(self, op: Any) -> bool:
            # In older Ray only such an operator has one.
            capped = hasattr(op, "get_max_concurrency_limit")
            limit = op.get_max_concurrency_limit() if capped else None
            return limit is None or op.num_active_tasks() < limit

    context.set_config("backpressure_policies.enabled", [Caps])


def upload_package(package: Path, kept_seconds: int) -> list[str]:
    """Put a package's directory into the cluster's store, as ``ray.init`` does for a job.

    Args:
        package: The directory.
        kept_seconds: How long Ray must keep it though no job names it.

    Returns:
        URIs for ``py_modules`` of a task's ``runtime_env``.

    Raises:
        ImportError, AttributeError, TypeError: This Ray has not what that needs.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed as upload
    from ray.experimental.internal_kv import _pin_runtime_env_uri as pin

    env: dict[str, Any] = {"py_modules": [str(package)], "excludes": ["**/__pycache__"]}
    with tempfile.TemporaryDirectory(prefix="dpex-") as scratch:
        known = inspect.signature(upload).parameters
        options: dict[str, Any] = {
            "include_gitignore": False,
            "scratch_dir": scratch,
            "logger": logging.getLogger("dpex"),
        }
        uploaded = upload(env, **{k: v for k, v in options.items() if k in known})
    uris = list(uploaded["py_modules"])
    for uri in uris:
        pin(uri, expiration_s=kept_seconds)
    return uris


def client_server() -> str | None:
    """Return ``"host:port"`` of the server that this Ray Client is connected to, if Ray tells."""
    worker = getattr(ray.util.client.ray.get_context(), "client_worker", None)
    address = getattr(worker, "_conn_str", None)
    return address if isinstance(address, str) else None


def starts_no_nodes() -> bool:
    """Whether nodes join this cluster by hand alone; False where that is not known.

    Without an autoscaler, Ray's monitor reports every node as a type of its own, ``node_<id>``.
    """
    if os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1":
        return False
    try:
        from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
        from ray.experimental.internal_kv import _internal_kv_get

        status = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS))
        types = status["autoscaler_report"]["node_type_mapping"]
        return bool(types) and all(name == f"node_{node}" for node, name in types.items())
    except Exception:  # no such name, no such status, or no answer
        return False


def reread_environment() -> None:
    """Have Ray read its settings again, which it does when it is imported.

    Without it a cluster with tokens refuses us, and the error says what to set.
    """
    config = getattr(ray._raylet, "Config", None)
    if config is not None:
        config.initialize("")


# Mapping takes a system call or two and a page fault for every 64 KB.
_MAPPED_BYTES = 1 << 20


def private_mappings(
    views: Sequence[np.ndarray[Any, Any]],
) -> list[np.ndarray[Any, Any] | None]:
    """Map views of one stored object once more, so that their pages are copied when written to.

    Ray's object store is a file in memory without a name, which the node's raylet has open.
    Mapped privately, it costs the memory of what the worker changes in it.

    Args:
        views: Flat uint8 arrays.

    Returns:
        For each the same bytes, writable; None where they are few, or have to be copied.
    """
    large = [view for view in views if view.nbytes >= _MAPPED_BYTES]
    if not large or os.environ.get("DPEX_PUBLIC_RAY_ONLY") == "1":
        return [None] * len(views)
    start = min(map(address_of, large))
    end = max(address_of(view) + view.nbytes for view in large)
    try:
        open_files = Path("/proc", os.environ["RAY_RAYLET_PID"], "fd")
        # One mapping for all: each one keeps a file open.
        copy = _map_again(start, end, open_files)
    except (OSError, ValueError, StopIteration, KeyError):
        return [None] * len(views)
    copy.sources = large
    memory = np.frombuffer(copy, np.uint8)[copy.offset :]
    return [
        memory[address_of(view) - start :][: view.nbytes] if view.nbytes >= _MAPPED_BYTES else None
        for view in views
    ]


class _PrivateMapping(mmap.mmap):
    """Memory of the object store, which stays as it is as long as ``sources`` live.

    Attributes:
        sources: Views of the stored object.
        offset: Where what was asked for begins in the mapping.
    """

    sources: list[np.ndarray[Any, Any]]
    offset: int


def _map_again(start: int, end: int, open_files: Path) -> _PrivateMapping:
    span = next(span for span in spans() if span.start <= start and end <= span.end)
    major, minor = (int(number, 16) for number in span.device.split(":"))
    file = next(
        path
        for path in open_files.iterdir()
        if (status := path.stat()).st_ino == span.inode
        and status.st_dev == os.makedev(major, minor)
    )
    position = span.offset + start - span.start
    page = position - position % mmap.ALLOCATIONGRANULARITY
    descriptor = os.open(file, os.O_RDONLY)
    try:
        mapping = _PrivateMapping(
            descriptor,
            position - page + end - start,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=page,
        )
    finally:
        os.close(descriptor)
    mapping.offset = position - page
    return mapping
