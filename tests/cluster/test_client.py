"""Tests of Ray Client: a training process outside the cluster gets the same batches."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_programs import (
    PROGRAM_SECONDS,
    PROGRAMS,
    ROOT,
    Driver,
    DriverError,
    processes_in,
    run_program,
    wait_until,
    workplace,
)
from cluster_programs.clusters import Cluster, free_port
from cluster_programs.training_process import LENGTH, TrainingProcess

pytestmark = [
    pytest.mark.extended,
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# Without GRPC_ENABLE_FORK_SUPPORT=0, the server's process for a client may crash at its start.
HEAD = {"RAY_AUTH_MODE": "disabled", "GRPC_ENABLE_FORK_SUPPORT": "0"}
PROGRAM = PROGRAMS / "client_program.py"
# By default, Ray's client tries for half a minute to reach a server that it has lost.
RECONNECTS = {"RAY_CLIENT_RECONNECT_GRACE_PERIOD": "5"}
LOST_SECONDS = 60
# Three attempts, and the imports of the driver.
JOIN_SECONDS = 200
HELPER = "def double(number):\n    return 2 * number\n"


def start_server(place: Path, *, elsewhere: int = 0, **variables: str) -> str:
    """Start a cluster with a Ray Client server; return the server's address once it answers.

    Args:
        place: Directory of the cluster's processes.
        elsewhere: Number of nodes of one CPU besides the head, which then has no CPU. With 0, the
            head has two CPUs.
        **variables: Environment of the cluster's nodes.
    """
    port = free_port()
    options = (f"--num-cpus={0 if elsewhere else 2}", f"--ray-client-server-port={port}")
    cluster = Cluster(place, head_options=options, **(HEAD | variables))
    for _ in range(elsewhere):
        cluster.add()

    def listens() -> bool:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return True
        return False

    wait_until(listens, 30, "Ray Client server")
    return f"ray://127.0.0.1:{port}"


def join(driver: Driver, server: str) -> dict[str, Any]:
    """Connect a driver to the server, and return the connection."""
    driver.send("connect", head_address=server)
    connection: dict[str, Any] = driver.receive(JOIN_SECONDS)
    assert connection["kind"] == "client"
    return connection


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with workplace() as directory:
        yield start_server(directory, elsewhere=2)


@pytest.fixture(scope="module")
def report(server: str) -> Iterator[dict[str, Any]]:
    """Yield the report of a program that runs as on another machine: own files, no Ray node."""
    with workplace() as laptop:
        program = shutil.copy(PROGRAM, laptop)
        (laptop / "beside_the_script.py").write_text(HELPER)
        out = laptop / "report.json"
        done = run_program(
            Path(program),
            server,
            str(out),
            place=laptop,
            seconds=PROGRAM_SECONDS,
            RAY_AUTH_MODE="disabled",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield json.loads(out.read_text())


def test_the_stream_is_torchs(report: dict[str, Any]) -> None:
    assert report["client"]
    assert report["dpex"] == report["torch"]


def test_samples_draw_the_same_however_many_workers(report: dict[str, Any]) -> None:
    one, three = report["draws"]
    assert one == three
    assert one[0] != one[1]


def test_batches_of_many_megabytes_arrive_whole(report: dict[str, Any]) -> None:
    assert report["large"] == [[0, 3, 20_000_000]]


def test_errors_arrive_as_they_are(report: dict[str, Any]) -> None:
    assert report["failing"].startswith("ZeroDivisionError: ")
    assert "dataset index 30, batch 7" in report["failing"]


def test_workers_are_on_the_cluster_and_a_break_leaves_them_usable(report: dict[str, Any]) -> None:
    assert report["pid"] not in report["pids"]
    assert len(report["nodes"]) == 50
    assert report["head"] not in report["nodes"]
    assert report["again"] == 50


def test_a_pipeline_actor_that_dies_changes_nothing(report: dict[str, Any]) -> None:
    assert report["survived"] == report["expected"]


# Python runs this code when it starts. It aborts the server's first process for a client.
FIRST_FAILS = """
import os, sys
if "--mode=specific-server" in sys.orig_argv and not os.path.exists(os.environ["FAILED"]):
    open(os.environ["FAILED"], "x").close()
    os.abort()
"""


@pytest.mark.long
def test_a_server_that_fails_once_is_asked_again() -> None:
    with workplace() as head, workplace() as laptop:
        (head / "sitecustomize.py").write_text(FIRST_FAILS)
        failed = head / "failed"
        server = start_server(
            head,
            PYTHONPATH=os.pathsep.join([str(head), str(ROOT)]),
            FAILED=str(failed),
            RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S="10",
        )
        driver = Driver(laptop, RAY_AUTH_MODE="disabled")
        join(driver, server)
        assert failed.exists()
        assert driver.ask("task", module="dpex")[1].endswith("dpex/__init__.py")
        assert len([line for line in driver.ask("logged") if "asks it again" in line]) == 1
        assert driver.end() == 0


def test_a_head_that_dies_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with workplace() as head, workplace() as laptop:
        training = TrainingProcess(laptop, start_server(head), RECONNECTS, length=50 * LENGTH)
        training.until(5)
        servers = [p for p, c in processes_in(head).items() if "/gcs_server " in c]
        os.kill(*servers, signal.SIGKILL)
        training.go()
        assert training.process.wait(LOST_SECONDS) == 1
    assert "dpex.errors.BatchLostError" in capfd.readouterr().err


@pytest.mark.long
def test_the_quickstart_runs_as_it_is(server: str) -> None:
    """Once RAY_ADDRESS names the server, a program needs no other change."""
    with workplace() as laptop:
        variables = {"RAY_ADDRESS": server, "RAY_AUTH_MODE": "disabled"}
        quickstart = ROOT / "examples" / "quickstart.py"
        done = run_program(quickstart, place=laptop, seconds=PROGRAM_SECONDS, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [step.partition(":")[0] for step in done.stdout.splitlines()] == [
            f"epoch {epoch}, step {step}" for epoch in range(3) for step in (0, 10)
        ]
        assert not list(laptop.glob("ray/session_*")), "it has started a Ray of its own"


def test_a_server_with_tokens_is_reached_with_its_token_and_not_without() -> None:
    with workplace() as head, workplace() as laptop:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        server = start_server(head, **token)
        other = token | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        strangers = {
            "set RAY_AUTH_MODE=token, and provide its token": Driver(
                laptop, RAY_AUTH_MODE="disabled"
            ),
            "sends the token of RAY_AUTH_TOKEN": Driver(laptop, **other),
        }
        for stranger in strangers.values():
            stranger.send("connect", head_address=server)
        for hint, stranger in strangers.items():
            with pytest.raises(DriverError, match=hint):
                stranger.receive(JOIN_SECONDS)
            assert stranger.end() == 0
        training = TrainingProcess(laptop, server, token)
        training.go()
        indices = [index for _, index, *_ in training.finish()["samples"]]
        assert sorted(indices) == list(range(LENGTH))
        for path in [*head.rglob("*"), *laptop.rglob("*")]:
            if path.is_file():
                assert token["RAY_AUTH_TOKEN"].encode() not in path.read_bytes(), path


def test_another_server_than_the_connected_one_is_refused(server: str) -> None:
    with workplace() as laptop:
        driver = Driver(laptop, RAY_AUTH_MODE="disabled")
        assert not join(driver, server)["single_host"]
        for same in ("auto", "cluster", server):
            join(driver, same)
        with pytest.raises(DriverError, match=rf"ClusterError: .*ray://other:10001.*{server}"):
            driver.ask("connect", head_address="ray://other:10001")
        assert driver.end() == 0


def test_a_connection_that_the_program_made_is_used(server: str) -> None:
    with workplace() as laptop:
        driver = Driver(laptop, RAY_AUTH_MODE="disabled")
        driver.ask("init", address=server, runtime_env={"py_modules": [str(ROOT / "dpex")]})
        for head_address in ("cluster", "auto", server):
            join(driver, head_address)
        with pytest.raises(DriverError, match="is connected to the Ray at"):
            driver.ask("connect", head_address="other:6379")
        assert driver.end() == 0


def test_no_server_says_how_to_start_one() -> None:
    with workplace() as laptop, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        driver = Driver(laptop)
        with pytest.raises(
            DriverError, match=rf"no Ray Client server.*--ray-client-server-port={port}"
        ):
            driver.ask("connect", head_address=f"ray://127.0.0.1:{port}")
