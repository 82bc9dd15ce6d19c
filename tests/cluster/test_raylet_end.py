"""Tests of what dpex says when the raylet of this process's node ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from cluster_programs import wait_until

from dpex.cluster import raylet_end
from dpex.cluster.raylet_end import log_end_of_raylet, raylet_ended
from dpex.errors import ClusterError

# For documentation: no cluster has this address.
ADDRESS = "192.0.2.9:1"
NODE_ID, OTHER_ID = 56 * "a", 56 * "b"


@contextlib.contextmanager
def raylet_process(node_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with the command of a raylet of one cluster, and kill it at the end."""
    flags = [f"--node_id={node_id}", f"--gcs-address={ADDRESS}"]
    command = ["raylet", "-c", "import time; time.sleep(600)", *flags]
    with subprocess.Popen(command, executable=sys.executable) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("connected", [True, False])
def test_the_end_of_a_raylet_is_logged_while_this_process_is_connected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, connected: bool
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))
    monkeypatch.setattr(raylet_end, "_ended", set())
    earlier = set(raylet_end._watched)  # the raylet of the tests' own Ray may be among them
    with raylet_process(OTHER_ID), raylet_process(NODE_ID) as raylet, raylet_process(OTHER_ID):
        log_end_of_raylet(NODE_ID)
        wait_until(lambda: raylet_end._watched - earlier, 30, "thread that watches")
        assert raylet_end._watched - earlier == {raylet.pid}
        raylet.kill()
        raylet.wait()
    wait_until(lambda: raylet.pid not in raylet_end._watched, 30, "end of the thread")
    if connected:
        wait_until(lambda: caplog.messages, 30, "message")
    assert raylet_ended(NODE_ID) == connected
    assert not raylet_ended(OTHER_ID)
    assert [f"(process {raylet.pid}) has ended" in text for text in caplog.messages] == (
        [True] if connected else []
    )


@pytest.mark.usefixtures("shared_ray")
def test_nothing_waits_for_a_node_whose_raylet_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from dpex.carriers.ray.node_health import Nodes

    nodes = Nodes()
    nodes.look()
    here = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(raylet_end, "_ended", {here})
    with pytest.raises(ClusterError, match="the Ray node of this process has died"):
        nodes.look()
