"""Whether the cluster has an autoscaler."""

from __future__ import annotations

import json

from dpex.compat.private_names import PrivateName, Shortcut

__all__ = ["starts_no_nodes"]

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
