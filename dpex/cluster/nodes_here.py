"""Ray nodes on this machine, and comparison of addresses with theirs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dpex import tuning
from dpex.cluster.local.launch import within

__all__ = [
    "HOST_PORT",
    "Raylet",
    "local_raylets",
    "node_of",
    "probe",
    "running_here",
    "same_endpoint",
    "split",
]

HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/@,]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Raylet:
    """A Ray node's process on this machine, its node id, and the address of its cluster."""

    pid: int
    node_id: str
    address: str


def probe(address: str, timeout_s: float) -> None:
    """Raise ``OSError`` unless a gRPC server, such as a Ray head, answers.

    If another program listens on the port, ``ray.init`` would retry for many minutes.

    Source:
        RFC 9113, section 3.4: both sides of HTTP/2 begin with a SETTINGS frame (type 4).
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection(split(address), timeout_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in {"", "0"}:
            return
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        header = b""
        while len(header) < 9:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            received = connection.recv(9 - len(header))
            if not received:
                break
            header += received
    if header[3:4] != b"\x04":
        raise ConnectionError("something listens there, but it is no Ray head")


def local_raylets() -> list[Raylet] | None:
    """Return the Ray nodes on this machine, or ``None`` if dpex cannot determine them.

    Source:
        Ray also finds the driver's node by the command lines of processes.
    """
    if not sys.platform.startswith("linux"):
        return None
    raylets = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(arguments[0]).name != "raylet":
                continue
            flags = dict(argument.partition("=")[::2] for argument in arguments[1:])
            address = flags.get("--gcs-address", "")
            if not HOST_PORT.fullmatch(address):
                return None
            raylets.append(Raylet(int(entry.name), flags.get("--node_id", ""), address))
    return raylets


def node_of(address: str, raylets: list[Raylet]) -> Raylet | None:
    """Return one of the nodes of the cluster at this address, or None."""
    return next((raylet for raylet in raylets if same_endpoint(raylet.address, address)), None)


def running_here(address: str) -> Counter[str]:
    """Count a cluster's tasks and actors on this machine, by the process title that Ray sets."""
    titles = Counter[str]()
    raylets = {raylet.pid for raylet in local_raylets() or [] if raylet.address == address}
    for entry in Path("/proc").iterdir() if raylets else ():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            title = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            idle = title.startswith(("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"))
            if title.startswith("ray::") and not idle and parent in raylets:
                titles[title.removeprefix("ray::")] += 1
    return titles


def split(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of ``"host:port"``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def same_endpoint(one: str, other: str) -> bool:
    """Return whether two addresses are the same endpoint under different host names."""
    if one == other:
        return True
    (host, port), (other_host, other_port) = split(one), split(other)
    return port == other_port and not _ips(host).isdisjoint(_ips(other_host))


def _ips(host: str) -> set[str]:
    """Resolve a host name; each of this machine's own addresses becomes ``"here"``."""
    try:
        found = within(tuning.LOOKUP_S, lambda: socket.getaddrinfo(host, None))
    except (OSError, TimeoutError):
        return set()
    ips = {str(entry[4][0]) for entry in found}
    return {"here" if _is_own(ip) else ip for ip in ips}


def _is_own(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((ip, 0))  # only own addresses, including loopback, can be bound
        return True
    return False
