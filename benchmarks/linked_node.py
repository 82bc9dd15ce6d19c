"""A Ray whose workers are all on another node, behind a link that counts bytes.

The other node is a network namespace of this machine. The link needs root and the command ``ip``.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

JOIN_TIMEOUT_S = 60
STORE_BYTES = 1 << 30


class Link:
    """The link between the training process's node and the other node.

    The training process's node is the head, and runs no task.

    Attributes:
        name: Name of the end here, and of the namespace at the other end.
    """

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name = f"dpexbench{number}"
        self.here, self.there = (f"10.214.{number}.{host}" for host in (1, 2))

    def sent_bytes(self) -> int:
        """Return the bytes sent to the other node so far, with the headers of every layer."""
        return int(Path(f"/sys/class/net/{self.name}/statistics/tx_bytes").read_text())

    def close(self) -> None:
        """Remove the link and the namespace."""
        for kind in ("link", "netns"):
            with suppress(subprocess.CalledProcessError):
                _ip(kind, "delete", self.name)


@contextmanager
def new_link() -> Iterator[Link]:
    """Make a link to a new namespace, and remove both at the end.

    Raises:
        OSError, subprocess.CalledProcessError: This user or kernel cannot make a link.
    """
    link = Link()
    _ip("netns", "add", link.name)
    try:
        peer = ("peer", "name", "eth0", "netns", link.name)
        _ip("link", "add", link.name, "type", "veth", *peer)
        for inside, address, device in (
            ((), link.here, link.name),
            (("-netns", link.name), link.there, "eth0"),
        ):
            _ip(*inside, "address", "add", f"{address}/24", "dev", device)
            _ip(*inside, "link", "set", device, "up")
        _ip("-netns", link.name, "link", "set", "lo", "up")
        yield link
    finally:
        link.close()


@contextmanager
def linked_node(cpus: int) -> Iterator[Link]:
    """Connect this process to a new Ray whose CPUs are all behind a link.

    Args:
        cpus: Number of CPUs.

    Raises:
        OSError, subprocess.CalledProcessError: This user or kernel cannot make the link.
        RuntimeError: The node does not join.
    """
    import ray

    with new_link() as link, tempfile.TemporaryDirectory(prefix="dpex") as place:
        # Other processes that look for a Ray on this machine must not find this one.
        os.environ["RAY_TMPDIR"] = place
        started = ray.init(
            "local",
            num_cpus=0,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _node_ip_address=link.here,
        )
        address = started.address_info["gcs_address"]
        node = subprocess.Popen(
            [
                *("ip", "netns", "exec", link.name, sys.executable, "-m", "ray.scripts.scripts"),
                *("start", "--block", f"--address={address}", f"--num-cpus={cpus}"),
                *(f"--node-ip-address={link.there}", f"--object-store-memory={STORE_BYTES}"),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            _await_cpus(cpus, node)
            yield link
        finally:
            node.terminate()
            node.wait()
            ray.shutdown()


def _await_cpus(cpus: int, node: subprocess.Popen[bytes]) -> None:
    import ray

    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while ray.cluster_resources().get("CPU", 0) < cpus:
        if node.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the node behind the link has not joined in {JOIN_TIMEOUT_S} s")
        time.sleep(0.1)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
