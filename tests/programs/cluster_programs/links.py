"""Network namespaces on one bridge, which give each node its own address and link.

They need root, and the commands ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator


class Network:
    """A bridge on this machine, and the namespaces that are linked to it.

    Attributes:
        here: Address of this machine on the bridge.
    """

    def __init__(self, number: int) -> None:
        self._bridge = f"dpex{number}"
        self._subnet = f"10.213.{number}"
        self._names: list[str] = []
        self.here = f"{self._subnet}.1"

    def attach(self) -> tuple[str, str]:
        """Add a namespace with a link to the bridge, and return its name and address."""
        place = len(self._names) + 2
        name, address = f"{self._bridge}n{place}", f"{self._subnet}.{place}"
        _ip("netns", "add", name)
        self._names.append(name)
        link = ("type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "add", name, *link)
        _ip("link", "set", name, "master", self._bridge, "up")
        for command in (
            ("address", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-netns", name, *command)
        return name, address

    def cut(self, name: str) -> None:
        """Take a namespace's link down."""
        _ip("link", "set", name, "down")

    def repair(self, name: str) -> None:
        """Bring a namespace's link up again."""
        _ip("link", "set", name, "up")

    def slow(self, name: str, megabits: float) -> None:
        """Limit the rate of a namespace's link, in each direction."""
        for inside, device in (((), name), (("-netns", name), "eth0")):
            limit = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms")
            _run("tc", *inside, "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def _open(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.here}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def _close(self) -> None:
        for name in self._names:
            # Delete the link first: a namespace exists as long as a process runs in it.
            for command in (("link", "delete", name), ("netns", "delete", name)):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*command)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Create a network, and remove it at the end.

    Raises:
        OSError, subprocess.CalledProcessError: This user or kernel cannot create it.
    """
    made = Network(os.getpid() % 250)
    try:
        made._open()
        yield made
    finally:
        made._close()


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
