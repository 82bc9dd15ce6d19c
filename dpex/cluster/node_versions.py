"""Check of this process's Python and dpex, and of the versions that the cluster's nodes have.

Nodes that lack this dpex receive it with each task.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from dpex import tuning
from dpex.cluster.local.launch import quiet_ray
from dpex.errors import ClusterError

__all__ = ["PACKAGE", "check_nodes", "check_programs"]

PACKAGE = Path(__file__).parents[1]
"""Directory of this dpex, which dpex sends to nodes that lack it."""

logger = logging.getLogger("dpex")


Versions = dict[str, str | None]


def check_programs() -> None:
    """Check that other processes can run this process's interpreter and dpex's files.

    A frozen program would start itself again in place of each process of Ray.

    Raises:
        ClusterError: This program is frozen or embeds Python, or dpex is in an archive.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ClusterError(
            f"Ray and dpex start Python programs, but sys.executable={sys.executable!r} is not a "
            "Python interpreter. Run the training script with one, or pass distribute_mode=False"
        )
    if not PACKAGE.is_dir():
        raise ClusterError(
            f"Ray runs files of dpex, but {PACKAGE} is in an archive. Install dpex, or unpack the "
            "archive"
        )


def check_nodes(*, single_host: bool, including: str = "") -> dict[str, Any] | None:
    """Compare Python, Ray, torch and dpex of the cluster's nodes with this process's.

    dpex sends a task that claims no CPUs to each node that has CPUs. It ignores a node that does
    not answer in time, because that node may only be busy.

    Args:
        single_host: Whether all nodes are on this machine. If no node answers, dpex counts as
            present on this machine and as missing on others.
        including: Id of a node to ask even if it has no CPUs.

    Returns:
        The ``runtime_env`` that tasks must carry so that every node imports this dpex, or
        ``None`` if the nodes have it.

    Raises:
        ClusterError: Python's minor version or Ray's version differ, torch is missing on a node,
            or dpex is missing and cannot be sent. The message names the nodes and what to do.
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
                "node %s has torch %s, but this process has %s. Samples and transforms may differ "
                "there. Install the same minor version of torch on all nodes",
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
    # Invariant: the function is nested and uses no global of this module. cloudpickle then sends
    # it by value, so it runs on a node without dpex.
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
                # A build from source may lack metadata. An import would take seconds.
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
    """Return the address and the versions of each node that has answered in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    deadline = time.monotonic() + tuning.VERSIONS_S
    nodes = [
        node
        for node in ray.nodes()
        if node["Alive"] and (node["Resources"].get("CPU", 0) > 0 or node["NodeID"] == including)
    ]
    if len(nodes) > tuning.MOST_NODES_ASKED:
        logger.debug(
            "asking %d of %d nodes for their versions", tuning.MOST_NODES_ASKED, len(nodes)
        )
    task = ray.remote(probe)
    asked = {
        task.options(
            name="dpex.versions",
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(): str(node["NodeManagerAddress"])
        for node in nodes[: tuning.MOST_NODES_ASKED]
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
            # If the node is faulty, the first task that needs it raises its own error.
            logger.debug("node %s did not tell its versions: %s", asked[ref], error)
        else:
            answers.append((asked[ref], cast(Versions, answer)))
    for ref in late:
        # Do not cancel the task. A cancellation during the import of numpy leaves a process that
        # can never import numpy again, and Ray reuses that process for other tasks.
        logger.debug("node %s did not tell its versions within %g s", asked[ref], tuning.VERSIONS_S)
    return answers


def _faults(node: str, there: Versions, here: Versions) -> list[str]:
    """Return sentences that describe the incompatibilities of one node."""
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
    """Put this dpex into the cluster's store, and return a ``runtime_env`` that names it.

    A task's ``py_modules`` replaces the job's, so the result repeats the job's modules.

    Args:
        nodes: Nodes that lack this dpex, for the error message.

    Raises:
        ClusterError: This Ray cannot send dpex. The message says what to do by hand.
    """
    import ray

    try:
        from dpex.compat.uploads import upload_package

        with quiet_ray():
            uris = upload_package(PACKAGE, tuning.PACKAGE_KEPT_S)
    except (ImportError, AttributeError, TypeError) as error:
        raise ClusterError(
            f"dpex is missing, or another version, on {nodes}, and Ray {ray.__version__} offers "
            f"no way to send it ({error}). Install this dpex there, or connect first with "
            f"ray.init(runtime_env={{'py_modules': [{str(PACKAGE)!r}]}})."
        ) from error
    inherited = ray.get_runtime_context().runtime_env.get("py_modules") or []
    return {"py_modules": [*uris, *(uri for uri in inherited if uri not in uris)]}
