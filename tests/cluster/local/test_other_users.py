"""Tests that another user of the machine reaches nothing of a local Ray.

They need root, which starts programs of another user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
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
    rank_variables,
    spawn,
    wait_until,
    workplace,
)
from other_user_program import OTHER_USER

from dpex.cluster.local import forked_worker, shared_by_ranks

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user"),
]

# A program of another user that listens at a path in a directory that admits everybody.
LISTENER = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o777)
    listener.listen()
    print("listens", flush=True)
    connection, _ = listener.accept()
    received = b""
    descriptors = []
    while True:
        more, sent, _flags, _address = socket.recv_fds(connection, 1 << 16, 3)
        if not more:
            break
        received += more
        descriptors += sent
    print(len(received), len(descriptors), flush=True)
"""
# A program of another user that connects to a path, sends a line, and prints the answer.
CLIENT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    try:
        connection.sendall(sys.stdin.buffer.read())
        connection.shutdown(socket.SHUT_WR)
        print(connection.recv(16))
    except OSError:  # the server has closed the connection
        print(b"")
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that all users can enter, and in which all can create files."""
    with workplace() as directory:
        directory.chmod(0o1777)
        yield directory


def of_user(program: str, path: Path, user: int) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, str(path), str(user)]


@contextlib.contextmanager
def listener(path: Path, user: int) -> Iterator[subprocess.Popen[str]]:
    command = of_user(LISTENER, path, user)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("user", [0, OTHER_USER])
def test_a_worker_program_sends_nothing_to_a_server_of_another_user(place: Path, user: int) -> None:
    instead = place / "instead.py"
    instead.write_text("print('Ray starts the worker process itself')")
    with listener(place / "server", user) as server:
        worker = subprocess.run(
            [sys.executable, "-I", "-S", forked_worker.__file__, "worker.py"],
            env={
                **environment(place),
                forked_worker.SERVER: str(place / "server"),
                forked_worker.RAYS_OWN: str(instead),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        received, _ = server.communicate(timeout=60)
    sent_bytes, descriptors = map(int, received.split())
    assert (sent_bytes > 0, descriptors) == ((True, 3) if user == 0 else (False, 0))
    assert worker.stdout == "Ray starts the worker process itself\n"


SERVER_PROGRAM = """
import os, pathlib, sys
from dpex.cluster.local import forkserver
from dpex.wire.pickling import dump
from dpex.worker.inherited_job import Bequest

job = Bequest(dump(0, "job"), 0)
path = pathlib.Path(forkserver.address(lambda: job, forkserver.FIRST_JOB))
assert path.is_socket()
for closed in (path, path.parent, path.parent.parent):
    closed.chmod(0o777)  # so that only the server itself can refuse
print(path, flush=True)
sys.stdin.read()
"""


def test_the_fork_server_reads_nothing_from_another_user(place: Path) -> None:
    program = spawn(
        [sys.executable, "-c", SERVER_PROGRAM],
        place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdout is not None
    path = Path(program.stdout.readline().strip())
    # A pickle that creates a file.
    for user in (OTHER_USER, 0):
        made = place / f"made-{user}"
        pickled = f"cposix\nmkdir\n(S'{made}'\ntR."
        subprocess.run(
            of_user(CLIENT, path, user), input=pickled, text=True, timeout=60, check=True
        )
        assert made.exists() == (user == 0)
    program.communicate(timeout=60)
    assert program.returncode == 0


def test_a_rank_refuses_a_keeper_of_another_user(place: Path) -> None:
    with listener(place / "job.sock", OTHER_USER) as keeper:
        with pytest.raises(PermissionError, match="another user's"):
            shared_by_ranks._connected(place / "job.sock")
        received, _ = keeper.communicate(timeout=60)
    assert received == "0 0\n"


KEEPER_PROGRAM = """
import pathlib, socket, sys
from dpex import tuning
from dpex.cluster.local import shared_by_ranks

tuning.FIRST_RANK_S, tuning.LAST_RANK_S = 1000, 0
stem = pathlib.Path(sys.argv[1])
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(stem.with_suffix(".sock")))
    stem.with_suffix(".sock").chmod(0o777)
    listener.listen()
    print("listens", flush=True)
    shared_by_ranks._serve(stem, listener, b"secret\\n")
"""


def test_a_keeper_answers_no_rank_of_another_user(place: Path) -> None:
    program = [sys.executable, "-c", KEEPER_PROGRAM, str(place / "job")]
    keeper = spawn(program, place, stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "listens\n"
    answers = [
        subprocess.run(
            of_user(CLIENT, place / "job.sock", user),
            input="",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for user in (OTHER_USER, 0)
    ]
    assert answers == ["b''\n", "b'secret\\n'\n"]
    assert keeper.wait(60) == 0, "it counts only ranks of this user"


def connections_of(process: psutil.Process, kind: str) -> list[Any]:
    """Return the connections of a process; none if the process has ended."""
    try:
        return list(process.net_connections(kind))
    except psutil.NoSuchProcess:
        return []


def test_another_user_reaches_nothing_of_a_local_ray(place: Path) -> None:
    """The local Ray is one of ranks, which has all kinds of files and sockets."""
    (place / "home").mkdir(mode=0o700)
    folder = place / "t"  # the user's RAY_TMPDIR
    folder.mkdir()
    folder.chmod(0o1777)
    owner = Driver(place, RAY_TMPDIR=str(folder), **rank_variables(place, 0))
    owner.ask("connect", head_address="local")
    owner.ask("settle")
    owner.ask("task")
    private = folder / f"dpex-{os.getuid()}"
    assert list(folder.iterdir()) == [private]
    paths = [private, *private.rglob("*")]
    sockets = {path.name for path in paths if path.is_socket()}
    assert {"fork_server", "raylet", "plasma_store"} < sockets
    assert any(name.endswith(".sock") for name in sockets), "the keeper's"
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
    assert any("dpex-reaper" in command for command in found["commands"])
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


def test_the_token_of_a_killed_process_is_deleted_from_its_first_moment(place: Path) -> None:
    owner = Driver(place)
    owner.send("connect", head_address="local")
    [token] = wait_until(lambda: list(place.glob("dpex-*/*/auth_token")), 100, "token")
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait()
    wait_until(lambda: not token.exists(), 60, "deletion of the token")
    wait_until(lambda: not processes_in(place), 60, "end of Ray")
