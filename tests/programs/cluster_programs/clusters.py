"""Clusters of several nodes on this machine, which tests add and remove."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from cluster_programs import environment, processes_in, start_node, wait_until
from cluster_programs.links import Network

# Memory beyond the current use at which the nodes of ``little_memory`` kill worker processes.
SPARE_BYTES = 2 << 30
# Four tasks may store a batch of 38 MB at once, but the store has space for only two.
SMALL_STORE_NODE = ("--object-store-memory=80000000", "--num-cpus=4")
# Options of the head's node, which is the training process's node too.
_HEAD = ("--head", "--num-cpus=0", "--include-dashboard=false")


class Cluster:
    """A head without CPUs, and the nodes that ``add`` starts.

    Args:
        place: Directory of the cluster's processes.
        network: Network that gives each node its own address and link. The head gets the address
            of this machine.
        port: Port of the head; by default a free port.
        head_options: Further options of the head's ``ray start``.
        **variables: Environment variables of the nodes.

    Attributes:
        head: Node id of the head.
        address: Address of the head, ``"ip:port"``.
        links: Name of each node's link, by node id.
        variables: Environment variables of the nodes; a training process needs them too.
    """

    def __init__(
        self,
        place: Path,
        network: Network | None = None,
        *,
        port: int | None = None,
        head_options: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        self.place = place
        self.links: dict[str, str] = {}
        self.network = network
        self.variables = {"RAY_AUTH_MODE": "disabled", **variables}
        own = (f"--node-ip-address={network.here}",) if network else ()
        self.head = self._start(*_HEAD, f"--port={port or free_port()}", *own, *head_options)
        [command] = self.raylets().values()
        self.address = _flag(command, "gcs-address")

    def raylets(self) -> dict[str, str]:
        """Return the command line of each node's raylet, by node id."""
        commands = processes_in(self.place).values()
        # A worker process that has just started has the raylet's socket in its command.
        return {_flag(c, "node_id"): c for c in commands if c.split(" ")[0].endswith("/raylet")}

    def _start(self, *options: str, under: tuple[str, ...] = (), **variables: str) -> str:
        before = self.raylets().keys()
        start_node(self.place, *options, under=under, **{**self.variables, **variables})
        [started] = self.raylets().keys() - before
        return started

    def add(self, *options: str, **variables: str) -> str:
        """Add a node, with one CPU unless the options set a number, and return its id.

        Args:
            *options: Options of ``ray start``.
            **variables: Environment variables of this node only.
        """
        cpus = () if any(o.startswith("--num-cpus") for o in options) else ("--num-cpus=1",)
        joining = (f"--address={self.address}", *cpus, *options)
        if self.network is None:
            return self._start(*joining, **variables)
        name, address = self.network.attach()
        under = ("ip", "netns", "exec", name)
        node = self._start(*joining, f"--node-ip-address={address}", under=under, **variables)
        self.links[node] = name
        return node

    def signal(self, node: str, what: signal.Signals) -> None:
        """Send a signal to a node's raylet."""
        [pid] = [p for p, c in processes_in(self.place).items() if f"--node_id={node}" in c]
        os.kill(pid, what)

    def kill_head(self, what: str) -> None:
        """Kill one of the head's processes, ``"raylet"`` or ``"gcs_server"``."""
        if what == "raylet":
            return self.signal(self.head, signal.SIGKILL)
        [pid] = [p for p, c in processes_in(self.place).items() if f"/{what} " in c]
        return os.kill(pid, signal.SIGKILL)

    def drain(self, node: str, seconds: int) -> None:
        """Announce to Ray that a node will be removed after some seconds."""
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
                *(f"--address={self.address}", f"--node-id={node}"),
                *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test"),
                f"--deadline-remaining-seconds={seconds}",
            ],
            cwd=self.place,
            env=environment(self.place, **self.variables),
            check=True,
            timeout=60,
        )

    def wait_until_gone(self, node: str, seconds: float = 60) -> None:
        """Wait until a node's raylet has ended."""
        wait_until(lambda: node not in self.raylets(), seconds, f"end of node {node}")


def free_port() -> int:
    """Return a free port, which the kernel will give to no outgoing connection."""
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        port = 20_000 + secrets.randbelow(int(outgoing[0]) - 20_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def _flag(command: str, name: str) -> str:
    found = re.search(rf"--{name}=(\S+)", command)
    assert found, command
    return found[1]


def spilled(place: Path) -> bool:
    """Return whether the object store of any node in a session was full."""
    # In order: Ray spills periodically, Ray spills for a waiting object, the disk is full too.
    words = (b"Triggering object spilling", b"Spilled ", b"Out-of-disk")
    logs = [log.read_bytes() for log in (place / "ray").glob("session_2*/logs/raylet*")]
    return any(word in log for log in logs for word in words)


def little_memory() -> dict[str, str]:
    """Return variables of nodes that kill worker processes once ``SPARE_BYTES`` more are used."""
    from ray._common.utils import get_system_memory
    from ray._private.utils import get_used_memory

    memory = psutil.virtual_memory()
    total = get_system_memory()
    # If the container has a memory limit, Ray counts only the container's memory.
    used = get_used_memory() if total < memory.total else memory.total - memory.available
    share = (used + SPARE_BYTES) / total
    return {"RAY_memory_usage_threshold": f"{share:.3f}", "RAY_memory_monitor_refresh_ms": "100"}
