"""Behaviors of Ray's processes that dpex relies on, beyond names in Ray's code."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONTRACTS", "Contract"]


@dataclass(frozen=True)
class Contract:
    """A behavior of Ray's processes that dpex relies on.

    Attributes:
        habit: The behavior.
        used_in: The modules that rely on it, separated by commas.
        without: The effect on dpex if a later Ray behaves differently.
    """

    habit: str
    used_in: str
    without: str


CONTRACTS = (
    Contract(
        "`RAY_prestart_worker_first_driver`, `RAY_worker_maximum_startup_concurrency`, "
        "`RAY_gcs_rpc_server_reconnect_timeout_s`, "
        "`RAY_task_events_report_interval_ms` and `RAY_worker_niceness` are settings of Ray's "
        "processes",
        "cluster/local/launch.py",
        "a local Ray has Ray's own values: more idle workers, and lower priority",
    ),
    Contract(
        "`RAY_DATA_METADATA_PREFETCH_ON_THREAD` chooses how Ray Data fetches blocks' metadata",
        "compat/executor.py",
        "the executor's loop makes one more pass for each block",
    ),
    Contract(
        "a raylet's command line has `--gcs-address=`, and its environment `RAY_AUTH_MODE`",
        "cluster/nodes_here.py, cluster/connect.py",
        "`head_address='auto'` finds no cluster on this machine: give its address, or set "
        "RAY_AUTH_MODE",
    ),
    Contract(
        "the processes of Ray's workers have titles that begin with `ray::`",
        "cluster/nodes_here.py",
        "log lines name no tasks",
    ),
    Contract(
        "the raylet has the file of its object store open",
        "compat/objects.py",
        "each worker process copies the large arrays of the dataset",
    ),
)
"""All behaviors that dpex relies on."""
