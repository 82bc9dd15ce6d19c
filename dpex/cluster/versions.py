"""Do the nodes run what this process runs? Asks each of them, and sends dpex where it lacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from dpex.cluster.local.launch import quiet_ray
from dpex.errors import ClusterError

__all__ = ["PACKAGE", "check_nodes"]

PACKAGE = Path(__file__).parents[1]
"""The directory of this dpex, which is sent where it lacks."""

logger = logging.getLogger("dpex")

_ANSWER_SECONDS = 10.0
# A cluster's nodes come from a handful of images: this many of them show what there is.
_MAX_NODES_ASKED = 64
# Ray forgets an uploaded package that no job names; ours is named by tasks only, and a node that
# joins weeks into a training must still find it.
_PACKAGE_KEPT_SECONDS = 60 * 86_400

Versions = dict[str, str | None]


def check_nodes(*, single_host: bool, including: str = "") -> dict[str, Any] | None:
    """Compare Python, Ray, torch and dpex of the cluster's nodes with this process's.

    Every node with CPUs is asked by a task that claims none. A node that does not answer in time
    is left out: it is busy, which is no fault.

    Args:
        single_host: Whether all nodes are on this host; where no node answers at all, dpex is
            taken to be missing on others, but not on this host.
        including: Id of a node that is asked even if it has no CPUs.

    Returns:
        The ``runtime_env`` that tasks must carry so that every node imports this dpex, or
        ``None`` where the nodes have it.

    Raises:
        ClusterError: Python's minor version or Ray's version differ, torch is missing on a node,
            or dpex is missing and cannot be sent. Names the nodes and what to do.
    """
    probe = _make_probe()
    here = probe()
    answers = _ask_nodes(probe, including)
    faults = [fault for node, there in answers for fault in _faults(node, there, here)]
    if faults:
        raise ClusterError("The cluster cannot run this process's tasks: " + " ".join(faults))
    for node, there in answers:
        if "unknown" not in {there["torch"], here["torch"]} and (
            _minor(there["torch"]) != _minor(here["torch"])
        ):
            logger.warning(
                "node %s has torch %s, this process %s: tensors travel, but samples and "
                "transforms may come out differently there",
                node,
                there["torch"],
                here["torch"],
            )
    lacking = [node for node, there in answers if there["dpex"] != here["dpex"]]
    if lacking or not (answers or single_host):
        nodes = ", ".join(lacking) or "no node that answered"
        logger.info("sending dpex along with the tasks (missing or another version: %s)", nodes)
        return _send_dpex(nodes)
    return None


def _make_probe() -> Callable[[], Versions]:
    # Nested, and using nothing of this module: cloudpickle then sends the function by value, so
    # that it runs on a node without dpex.
    def versions() -> Versions:
        import hashlib
        import importlib.metadata
        import importlib.util
        import pathlib
        import platform

        import ray

        def torch_version() -> str | None:
            try:
                return importlib.metadata.version("torch")
            except importlib.metadata.PackageNotFoundError:
                # Built from source, it may come without metadata; importing it takes seconds.
                spec = importlib.util.find_spec("torch")
                return "unknown" if spec and spec.origin else None

        def dpex_digest() -> str | None:
            spec = importlib.util.find_spec("dpex")
            roots = list(spec.submodule_search_locations or []) if spec else []
            digest = hashlib.sha256()
            files = sorted(pathlib.Path(roots[0]).rglob("*.py")) if roots else []
            for path in files:
                digest.update(path.relative_to(roots[0]).as_posix().encode() + b"\0")
                digest.update(path.read_bytes() + b"\0")
            return digest.hexdigest() if files else None

        return {
            "python": platform.python_version(),
            "ray": ray.__version__,
            "torch": torch_version(),
            "dpex": dpex_digest(),
        }

    return versions


def _ask_nodes(probe: Callable[[], Versions], including: str) -> list[tuple[str, Versions]]:
    """Pairs of a node's address and what it answered; nodes that did not are left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    deadline = time.monotonic() + _ANSWER_SECONDS
    nodes = [
        node
        for node in ray.nodes()
        if node["Alive"] and (node["Resources"].get("CPU", 0) > 0 or node["NodeID"] == including)
    ]
    if len(nodes) > _MAX_NODES_ASKED:
        logger.debug("asking %d of %d nodes for their versions", _MAX_NODES_ASKED, len(nodes))
    task = ray.remote(probe)
    asked = {
        task.options(
            name="dpex.versions",
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(): str(node["NodeManagerAddress"])
        for node in nodes[:_MAX_NODES_ASKED]
    }
    answers = []
    refs = list(asked)
    done, late = (
        ray.wait(refs, num_returns=len(refs), timeout=max(0.0, deadline - time.monotonic()))
        if refs
        else ([], [])
    )
    for ref in done:
        try:
            answer = ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))
        except Exception as error:
            # What ails a node will show, with its own error, in the first task that needs it.
            logger.debug("node %s did not tell its versions: %s", asked[ref], error)
        else:
            answers.append((asked[ref], cast(Versions, answer)))
    for ref in late:
        # Left to its end: cancelled while it imports numpy, it would leave behind a process in
        # which nobody can import that again, and which Ray gives to other tasks.
        logger.debug("node %s did not tell its versions within %g s", asked[ref], _ANSWER_SECONDS)
    return answers


def _faults(node: str, there: Versions, here: Versions) -> list[str]:
    """Sentences on what would break on one node."""
    found = []
    if _minor(there["python"]) != _minor(here["python"]):
        found.append(
            f"Node {node} runs Python {there['python']}, this process {here['python']}: functions "
            "pickled here cannot be unpickled there; use the same minor version."
        )
    if there["ray"] != here["ray"]:
        found.append(
            f"Node {node} runs Ray {there['ray']}, this process {here['ray']}: Ray processes "
            "understand only their own version; install the same."
        )
    if there["torch"] is None:
        found.append(
            f"Node {node} has no torch, but dataset and collate_fn run there; "
            f"install it (here: {here['torch']})."
        )
    return found


def _minor(version: str | None) -> list[str]:
    return (version or "").split(".")[:2]


def _send_dpex(nodes: str) -> dict[str, Any]:
    """Put this dpex into the cluster's store and name it in a ``runtime_env`` for tasks.

    A task's ``py_modules`` replaces the job's, so the job's are named again.

    Raises:
        ClusterError: This Ray offers no way to send it; says what to do by hand.
    """
    import ray

    try:
        from dpex.compat.uploads import upload_package

        with quiet_ray():
            uris = upload_package(PACKAGE, _PACKAGE_KEPT_SECONDS)
    except (ImportError, AttributeError, TypeError) as error:
        raise ClusterError(
            f"dpex is missing, or another version, on {nodes}, and Ray {ray.__version__} offers "
            f"no way to send it ({error}). Install this dpex there, or connect first with "
            f"ray.init(runtime_env={{'py_modules': [{str(PACKAGE)!r}]}})."
        ) from error
    inherited = ray.get_runtime_context().runtime_env.get("py_modules") or []
    return {"py_modules": [*uris, *(uri for uri in inherited if uri not in uris)]}
