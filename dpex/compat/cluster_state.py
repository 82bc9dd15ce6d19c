"""State of the cluster that this process is connected to."""

from __future__ import annotations

import json

import ray

from dpex.compat.shortcut import PrivateName, Shortcut

__all__ = ["client_server", "starts_no_nodes"]

CLIENT_SERVER = Shortcut(
    "compare head_address with the server that Ray Client is connected to",
    "dpex takes the connected server without a comparison",
    "ray",
    context=PrivateName("ray.util.client:ray.get_context", "has the connection"),
    worker=PrivateName(
        "ray.util.client:_ClientContext.client_worker", "has the connection", of_instances=True
    ),
    address=PrivateName(
        "ray.util.client.worker:Worker._conn_str",
        "is the server's address",
        check="it is a string",
        of_instances=True,
    ),
)
AUTOSCALING = Shortcut(
    "notice that no autoscaler will start the node that is asked for",
    "the loader waits on, and logs what for",
    "ray",
    key=PrivateName(
        "ray._private.ray_constants:DEBUG_AUTOSCALING_STATUS",
        "names the report of Ray's monitor",
    ),
    get=PrivateName(
        "ray.experimental.internal_kv:_internal_kv_get",
        "reads the report",
        check="it is JSON, and has the types of all nodes",
    ),
)


def client_server() -> str | None:
    """Return ``"host:port"`` of the server of this Ray Client, or None if it is unknown."""
    if CLIENT_SERVER.find() is not None:
        with CLIENT_SERVER.attempt():
            address = ray.util.client.ray.get_context().client_worker._conn_str
            return address if isinstance(address, str) else None
    return None


def starts_no_nodes() -> bool:
    """Return whether the cluster has no autoscaler that starts nodes; False if unknown.

    Without an autoscaler, Ray's monitor reports every node as a separate type, ``node_<id>``.
    """
    found = AUTOSCALING.find()
    if found is None:
        return False
    try:
        status = json.loads(found["get"](found["key"]))
        types = status["autoscaler_report"]["node_type_mapping"]
        return bool(types) and all(name == f"node_{node}" for node, name in types.items())
    except Exception:  # another kind of autoscaler writes no report, or Ray does not answer
        return False
