"""Tests that another user of the machine reaches nothing of a local Ray.

They need root, which starts programs of another user.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_programs import (
    PROGRAMS,
    Driver,
    environment,
    processes_in,
    workplace,
)
from other_user_program import OTHER_USER

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user"),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that all users can enter, and in which all can create files."""
    with workplace() as directory:
        directory.chmod(0o1777)
        yield directory


def connections_of(process: psutil.Process, kind: str) -> list[Any]:
    """Return the connections of a process; none if the process has ended."""
    try:
        return list(process.net_connections(kind))
    except psutil.NoSuchProcess:
        return []


def test_another_user_reaches_nothing_of_a_local_ray(place: Path) -> None:
    (place / "home").mkdir(mode=0o700)
    folder = place / "t"  # the user's RAY_TMPDIR
    folder.mkdir()
    folder.chmod(0o1777)
    owner = Driver(place, RAY_TMPDIR=str(folder))
    owner.ask("connect", head_address="local")
    owner.ask("task")
    private = folder / f"dpex-{os.getuid()}"
    assert list(folder.iterdir()) == [private]
    paths = [private, *private.rglob("*")]
    sockets = {path.name for path in paths if path.is_socket()}
    assert {"raylet", "plasma_store"} <= sockets
    [token] = private.glob("*/auth_token")
    secret = token.read_text()

    processes = [psutil.Process(pid) for pid in processes_in(place)]
    bound = {c.laddr for p in processes for c in connections_of(p, "unix") if c.laddr}
    assert bound
    assert all(Path(path).is_relative_to(private) for path in bound), "no other name of a socket"
    ports = sorted(
        {
            connection.laddr.port
            for process in processes
            for connection in connections_of(process, "tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    )
    assert len(ports) >= 4

    given = {
        "paths": [str(path) for path in paths],
        "ports": ports,
        "pids": [process.pid for process in processes],
    }
    program = subprocess.run(
        [sys.executable, str(PROGRAMS / "other_user_program.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    found = json.loads(program.stdout)
    assert found["succeeded"] == []
    assert any("raylet" in command for command in found["commands"])
    assert not any(secret in command for command in found["commands"])
    owner.ask("task")
    assert owner.end() == 0


@pytest.mark.parametrize("link", [False, True])
def test_a_directory_that_another_user_created_first_is_refused(place: Path, link: bool) -> None:
    folder = place / "t"
    folder.mkdir()
    folder.chmod(0o1777)
    theirs = place / "theirs"
    ours = folder / f"dpex-{os.getuid()}"
    if link:
        theirs.mkdir(mode=0o700)  # even one that belongs to us
        ours.symlink_to(theirs)
        os.lchown(ours, OTHER_USER, OTHER_USER)
    else:
        ours.mkdir(mode=0o700)
        os.chown(ours, OTHER_USER, OTHER_USER)
    code = "from dpex.cluster.local.directory import runtime_directory; print(runtime_directory())"

    def start(**variables: str) -> subprocess.CompletedProcess[str]:
        values = environment(place, **variables)
        if "RAY_TMPDIR" not in variables:
            del values["RAY_TMPDIR"]
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=values, capture_output=True, text=True, timeout=60, check=False
        )

    refused = start(RAY_TMPDIR=str(folder))
    text = rf"ClusterError: .* {ours} belongs to user {OTHER_USER}, .*directory with RAY_TMPDIR"
    assert re.search(text, refused.stderr), refused.stderr
    assert start(TMPDIR=str(folder)).stdout == f"/tmp/dpex-{os.getuid()}\n"
    assert not list(theirs.glob("*"))
