"""A cluster of several nodes, all of them on this machine, which come and go."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from cluster_programs import environment, processes_in, start_node, wait_until
from cluster_programs.links import Network

# What may be taken on top of what is taken already, where workers are killed for their memory.
SPARE_BYTES = 2 << 30
# Four tasks may store theirs at once, of which two have room.
SMALL_STORE_NODE = ("--object-store-memory=80000000", "--num-cpus=4")
# Of the head, which is the trainer's node too.
_HEAD = ("--head", "--num-cpus=0", "--include-dashboard=false")


class Cluster:
    """A head without CPUs, and the nodes that are added to it.

    Args:
        place: Directory of the cluster's processes.
        network: Where each node gets an address and a link of its own; the head is this host.
        port: Where the head listens; by default somewhere.
        head_options: Further ones of its ``ray start``.
        **variables: Environment of its nodes.

    Attributes:
        head: Id of the head's node.
        address: The head's, ``"ip:port"``.
        links: The name of each node's link, by node id.
        variables: Environment of its nodes; a trainer needs it too.
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
        """The command line of each node's raylet, by node id."""
        commands = processes_in(self.place).values()
        return {_flag(c, "node_id"): c for c in commands if "/raylet --" in c}

    def _start(self, *options: str, under: tuple[str, ...] = (), **variables: str) -> str:
        before = self.raylets().keys()
        start_node(self.place, *options, under=under, **{**self.variables, **variables})
        [started] = self.raylets().keys() - before
        return started

    def add(self, *options: str, **variables: str) -> str:
        """Add a node of one CPU, unless the options say otherwise; returns its id.

        Args:
            *options: Of ``ray start``.
            **variables: Environment of this node.
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
        """Kill one of the head's processes: its ``raylet``, or ``gcs_server``."""
        if what == "raylet":
            return self.signal(self.head, signal.SIGKILL)
        [pid] = [p for p, c in processes_in(self.place).items() if f"/{what} " in c]
        return os.kill(pid, signal.SIGKILL)

    def drain(self, node: str, seconds: int) -> None:
        """Announce that a node will be taken away."""
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
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _flag(command: str, name: str) -> str:
    found = re.search(rf"--{name}=(\S+)", command)
    assert found, command
    return found[1]


def spilled(place: Path) -> bool:
    """Tell whether any node of a session had to make room in its object store, or found none."""
    # By Ray's clock, for an object that waits, and with no room on the disk either.
    words = (b"Triggering object spilling", b"Spilled ", b"Out-of-disk")
    logs = [log.read_bytes() for log in (place / "ray").glob("session_2*/logs/raylet*")]
    return any(word in log for log in logs for word in words)


def little_memory() -> dict[str, str]:
    """Make the environment of nodes that kill workers when ``SPARE_BYTES`` more are taken."""
    from ray._common.utils import get_system_memory
    from ray._private.utils import get_used_memory

    memory = psutil.virtual_memory()
    total = get_system_memory()
    # Of a container, where that has a limit.
    used = get_used_memory() if total < memory.total else memory.total - memory.available
    share = (used + SPARE_BYTES) / total
    return {"RAY_memory_usage_threshold": f"{share:.3f}", "RAY_memory_monitor_refresh_ms": "100"}
