"""Upload of dpex's own code for cluster nodes that lack it."""

from __future__ import annotations

import inspect
import logging
import tempfile
from pathlib import Path
from typing import Any

from dpex.compat.private_names import PrivateName, Shortcut

__all__ = ["UPLOAD", "upload_package"]

UPLOAD = Shortcut(
    "send dpex to nodes that lack it",
    "install dpex there, or name it in ray.init(runtime_env=...)",
    "ray",
    upload=PrivateName(
        "ray._private.runtime_env.py_modules:upload_py_modules_if_needed",
        "puts the package into the cluster's store",
        check="its parameters; the nodes are asked for dpex's version afterwards",
    ),
    pin=PrivateName(
        "ray.experimental.internal_kv:_pin_runtime_env_uri", "keeps the package in the store"
    ),
)


def upload_package(package: Path, kept_seconds: int) -> list[str]:
    """Upload a package's directory to the cluster's store, as ``ray.init`` does for a job.

    Args:
        package: The directory.
        kept_seconds: Seconds for which Ray must keep the package even if no job refers to it.

    Returns:
        URIs for ``py_modules`` of a task's ``runtime_env``.

    Raises:
        ImportError, AttributeError, TypeError: This Ray lacks a name that the upload needs.
    """
    upload, pin = UPLOAD.names["upload"].find(), UPLOAD.names["pin"].find()
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
