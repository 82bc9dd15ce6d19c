"""Connection of this process to its cluster, and the cluster's state."""

from __future__ import annotations

import json
import time

import ray

from dpex.compat.shortcut import PrivateName, Shortcut

__all__ = ["client_server", "end_client_start", "starts_no_nodes"]

_CONTEXT = PrivateName("ray.util.client:ray.get_context", "has the connection")
_WORKER = PrivateName(
    "ray.util.client:_ClientContext.client_worker", "has the connection", of_instances=True
)
CLIENT_SERVER = Shortcut(
    "compare head_address with the server that Ray Client is connected to",
    "dpex takes the connected server without a comparison",
    "ray",
    context=_CONTEXT,
    worker=_WORKER,
    address=PrivateName(
        "ray.util.client.worker:Worker._conn_str",
        "is the server's address",
        check="it is a string",
        of_instances=True,
    ),
)
CLIENT_START = Shortcut(
    "end an attempt to connect through Ray Client that got no answer",
    "dpex does not try again, and this process cannot connect through Ray Client any more",
    "ray",
    context=_CONTEXT,
    worker=_WORKER,
    ending=PrivateName(
        "ray.util.client.worker:Worker._in_shutdown",
        "keeps the attempt's threads from connecting again",
        of_instances=True,
    ),
    channel=PrivateName(
        "ray.util.client.worker:Worker.channel",
        "has the calls that got no answer",
        check="the attempt does not end",
        of_instances=True,
    ),
)
AUTOSCALING = Shortcut(
    "notice that no autoscaler will start the node that is asked for",
    "the loader keeps waiting, and logs the missing node",
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


def end_client_start(timeout_s: float) -> bool:
    """End a ``ray.init`` of another thread that waits for a Ray Client server.

    ``ray.shutdown`` ends established connections, but not attempts to connect.

    Args:
        timeout_s: How long the attempt may take to end, in seconds.

    Returns:
        Whether it has ended, so that this process can connect again.
    """
    if CLIENT_START.find() is None:
        return False
    deadline = time.monotonic() + timeout_s
    with CLIENT_START.attempt():
        context = ray.util.client.ray.get_context()
        worker = context.client_worker
        if worker is not None:
            worker._in_shutdown = True
            worker.channel.close()
        # The thread of the attempt removes its connection last.
        while context.client_worker is not None:
            if time.monotonic() > deadline:
                raise TimeoutError("the attempt does not end")
            time.sleep(0.05)
    return not CLIENT_START.failed


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
