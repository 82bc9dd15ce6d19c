"""Ray Client: connections of training processes on machines outside the cluster."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from dpex import tuning
from dpex.cluster.local.launch import disconnect, init_ray
from dpex.cluster.node_versions import PACKAGE
from dpex.cluster.nodes_here import probe, split
from dpex.cluster.tokens import token_hint
from dpex.errors import ClusterError

__all__ = ["SCHEME", "join_through_client"]

logger = logging.getLogger("dpex")

SCHEME = "ray://"


def join_through_client(address: str, where: str) -> None:
    """Connect this process to a cluster through Ray Client.

    dpex sends its own package along, because the server's process for this client imports it.

    Args:
        address: ``"ray://host:port"``.
        where: The address and its source, for error messages.

    Raises:
        ClusterError: Ray Client is not installed here, no server answers, or the server refuses.
    """
    endpoint = address.removeprefix(SCHEME)
    if importlib.util.find_spec("grpc") is None:
        raise ClusterError(
            f"{where} needs Ray Client, which is not installed here: pip install 'ray[client]'"
        )
    host, port = split(endpoint)
    try:
        probe(endpoint, tuning.CLUSTER_ANSWER_S)
    except OSError as error:
        raise ClusterError(
            f"no Ray Client server answers at {where} ({error}). Start the cluster's "
            "head with `pip install 'ray[client]'` and `GRPC_ENABLE_FORK_SUPPORT=0 ray start "
            f"--head --ray-client-server-port={port}` on {host}"
        ) from error
    try:
        _join(address, where)
    except Exception as error:
        disconnect()
        raise ClusterError(
            f"the Ray Client server at {where} answers but cannot be joined: "
            f"{str(error).rstrip('.')}. {token_hint()}. Client and cluster need the same version "
            "of Ray and the same minor version of Python. If the server fails only sometimes, "
            "start the head with GRPC_ENABLE_FORK_SUPPORT=0, and this process again"
        ) from error


def _join(address: str, where: str) -> None:
    # The server forks while gRPC's threads run, so the child sometimes crashes (Ray issue 63202).
    for tries_left in reversed(range(tuning.CLIENT_JOIN_TRIES)):
        try:
            init_ray(tuning.CLIENT_JOIN_S, address=address, runtime_env=_our_package())
        except ConnectionAbortedError as error:
            if not tries_left:
                raise
            reason = str(error).strip().splitlines()[-1]
            logger.warning(
                "the Ray Client server at %s did not start its process for this client (%s). dpex "
                "asks it again, %d more times at most",
                where,
                reason,
                tries_left,
            )
        else:
            return


def _our_package() -> dict[str, Any]:
    """Return the ``runtime_env`` with which all processes of this job import this dpex."""
    return {"py_modules": [str(PACKAGE)], "excludes": ["**/__pycache__"]}
