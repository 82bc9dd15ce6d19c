"""Tests of what dpex says when the raylet of this process's node ends."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from cluster_programs import wait_until

from dpex.cluster import raylet_end
from dpex.cluster.raylet_end import log_end_of_raylet, raylet_ended
from dpex.errors import ClusterError

# For documentation: no cluster has this address.
ADDRESS = "192.0.2.9:1"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("connected", [True, False])
def test_the_end_of_a_raylet_is_logged_while_this_process_is_connected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, connected: bool
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))
    monkeypatch.setattr(raylet_end, "_ended", {ADDRESS})
    command = ["raylet", "-c", "import time; time.sleep(600)", f"--gcs-address={ADDRESS}"]
    raylet = subprocess.Popen(command, executable=sys.executable)
    try:
        log_end_of_raylet(ADDRESS)
        assert not raylet_ended(ADDRESS), "that was another Ray with the same port"
        wait_until(lambda: raylet.pid in raylet_end._watched, 30, "thread that watches")
    finally:
        raylet.kill()
        raylet.wait()
    wait_until(lambda: raylet.pid not in raylet_end._watched, 30, "end of the thread")
    if connected:
        wait_until(lambda: caplog.messages, 30, "message")
    assert raylet_ended(ADDRESS) == connected
    assert [f"(process {raylet.pid}) has ended" in text for text in caplog.messages] == (
        [True] if connected else []
    )


@pytest.mark.usefixtures("shared_ray")
def test_nothing_waits_for_a_node_whose_raylet_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpex.cluster.own_process import ray_job
    from dpex.pipeline.node_health import Nodes

    nodes = Nodes()
    nodes.look()
    monkeypatch.setattr(raylet_end, "_ended", {ray_job()[0]})
    with pytest.raises(ClusterError, match="the Ray node of this process has died"):
        nodes.look()
