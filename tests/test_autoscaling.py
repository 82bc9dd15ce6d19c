"""Test of an autoscaling cluster, which starts nodes for waiting tasks and stops idle nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_programs import wait_until, workplace
from cluster_programs.clusters import Cluster, free_port
from cluster_programs.training_process import LENGTH, TrainingProcess, drawn, nodes_in
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

NODES = 2
IDLE_SECONDS = 6
GONE_SECONDS = 60
# Small batches stay in their owner's memory. A node with batches in its object store is not idle.
SAMPLES: dict[str, Any] = {"length": LENGTH, "floats": 10, "staged": True}


def start_autoscaling(place: Path, variables: dict[str, str]) -> Cluster:
    """Start a head without CPUs, whose autoscaler starts nodes of two CPUs on this machine.

    Args:
        place: Directory of the cluster's processes.
        variables: Environment variables of the cluster, which select the autoscaler.
    """
    import ray.util

    port = free_port()
    # Ray's provider for tests, as "external": its own type needs a file that Ray's wheel lacks.
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": f"{ray.util.get_node_ip_address()}:{port}",
        "head_node_id": started(0),
        "use_node_id_as_ip": True,
        "launch_multiple": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    worker = {"CPU": 2, "object_store_memory": 100_000_000}
    config = {
        "cluster_name": "autoscaling",
        "provider": provider,
        "max_workers": NODES,
        "idle_timeout_minutes": IDLE_SECONDS / 60,
        "upscaling_speed": 1.0,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "max_workers": NODES},
        },
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{when}setup_commands": [] for when in ("", "head_", "worker_")},
        **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
        "initialization_commands": [],
    }
    file = place / "autoscaling.json"
    file.write_text(json.dumps(config))
    return Cluster(
        place,
        port=port,
        head_options=(f"--autoscaling-config={file}",),
        RAY_FAKE_CLUSTER="1",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        **variables,
    )


def started(number: int) -> str:
    """Return the id of the node that the provider starts with this number; the head's is 0."""
    return f"{number:05}".rjust(56, "f")


@pytest.mark.long
@pytest.mark.parametrize(
    "variables",
    [{}, {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": started(0)}],
    ids=["ray start", "KubeRay"],
)
def test_nodes_are_started_for_an_epoch_and_taken_away_in_it(variables: dict[str, str]) -> None:
    with workplace() as place:
        undisturbed = drawn(TrainingProcess(place, "local", seconds=0, **SAMPLES).finish())
    torchs = DataLoader(
        range(LENGTH),  # type: ignore[arg-type]
        batch_size=10,
        shuffle=True,
        generator=torch.Generator().manual_seed(5),
    )
    order = [(number, int(index)) for number, batch in enumerate(torchs) for index in batch]
    assert [(number, index) for number, index, _ in undisturbed] == order

    with workplace() as place:
        cluster = start_autoscaling(place, variables)
        alone = {cluster.head: cluster.raylets()[cluster.head]}
        assert cluster.raylets() == alone
        training = TrainingProcess(place, cluster.address, seconds=0.1, **SAMPLES)
        training.until_from(started(1))
        training.until_from(started(2))  # four logical workers use the CPUs of two nodes
        wait_until(lambda: cluster.raylets() == alone, GONE_SECONDS, "end of idle nodes")
        training.go()
        result = training.finish()
        assert drawn(result) == undisturbed
        # The autoscaler may stop a new node before it has a task. Any node started later counts.
        assert {started(1), started(2)} < nodes_in(result)
        assert cluster.head not in nodes_in(result)
        wait_until(lambda: cluster.raylets() == alone, GONE_SECONDS, "end of all nodes")
