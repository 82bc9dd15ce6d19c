"""Tests of ``head_address``: which Ray it selects, and how soon it raises an error."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_programs import (
    ROOT,
    Driver,
    DriverError,
    address_of,
    environment,
    processes_in,
    start_node,
    wait_until,
    workplace,
)
from cluster_programs.seeing import hiding, installed, namespace

from dpex.cluster import node_versions
from dpex.cluster.connect import _running_cluster, connect
from dpex.errors import ClusterError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# Limit for an error that needs no wait for an answer, on a busy machine.
QUICK_SECONDS = 10
# dpex waits 15 s for a server that does not answer.
SILENT_SECONDS = 60


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Yield the directory of a running cluster of 2 CPUs, whose clients need a token."""
    with workplace() as directory:
        ray = directory / "home" / ".ray"
        ray.mkdir(parents=True)
        (ray / "auth_token").write_text("0123456789abcdef" * 4)
        start_node(directory, "--head", "--port=0", "--num-cpus=2", "--include-dashboard=false")
        yield directory


@pytest.fixture
def empty_place() -> Iterator[Path]:
    """Yield a directory without a cluster."""
    with workplace() as directory:
        yield directory


def logged(driver: Driver, text: str) -> bool:
    return any(text in line for line in driver.ask("logged"))


def test_auto_finds_the_cluster_of_this_machine(place: Path) -> None:
    driver = Driver(place)
    connection = driver.ask("connect", head_address="auto")
    assert connection["kind"] == "cluster"
    assert connection["address"] == address_of(place)
    assert connection["single_host"]
    assert connection["runtime_env"] is None
    line = f"INFO Ray at {address_of(place)} (found on this machine): 1 node, 2 CPUs"
    assert logged(driver, line)

    # Once connected, all names of this cluster are accepted, and no other address is.
    port = address_of(place).rpartition(":")[2]
    for name in ("auto", address_of(place), f"localhost:{port}", f"127.0.0.1:{port}"):
        again = driver.ask("connect", head_address=name)
        assert {**again, "seconds": 0} == {**connection, "seconds": 0}
        assert again["seconds"] < QUICK_SECONDS
    with pytest.raises(DriverError, match=f"ClusterError: .*10.1.2.3:6379.*{address_of(place)}"):
        driver.ask("connect", head_address="10.1.2.3:6379")
    with pytest.raises(DriverError, match=f"ClusterError: .*local Ray.*{address_of(place)}"):
        driver.ask("connect", head_address="local")
    assert driver.end() == 0


def test_cluster_starts_no_local_ray(place: Path, empty_place: Path) -> None:
    driver = Driver(place)
    assert driver.ask("connect", head_address="cluster")["address"] == address_of(place)
    assert driver.ask("connect", head_address="cluster")["kind"] == "cluster"
    assert driver.end() == 0

    driver = Driver(empty_place)
    with pytest.raises(DriverError, match="ClusterError: head_address='cluster' found no cluster"):
        driver.ask("connect", head_address="cluster")
    assert driver.ask("connect", head_address="local")["kind"] == "local"
    with pytest.raises(DriverError, match=r"ClusterError: .*this process uses a local Ray"):
        driver.ask("connect", head_address="cluster")
    assert driver.end() == 0

    driver = Driver(empty_place, RAY_ADDRESS="local")
    with pytest.raises(DriverError, match=r"ClusterError: .*RAY_ADDRESS is 'local'"):
        driver.ask("connect", head_address="cluster")
    assert driver.end() == 0
    driver = Driver(empty_place, RAY_ADDRESS="cluster")
    with pytest.raises(DriverError, match="ValueError: RAY_ADDRESS must be 'auto', 'local', 'host"):
        driver.ask("connect", head_address="auto")
    assert driver.end() == 0


def test_nodes_that_are_still_to_come_are_sent_dpex(empty_place: Path) -> None:
    start_node(empty_place, "--head", "--port=0", "--num-cpus=0", "--include-dashboard=false")
    connection = Driver(empty_place).ask("connect", head_address="auto")
    assert not connection["single_host"]
    assert connection["runtime_env"]["py_modules"]


def test_an_address_is_taken_from_argument_and_environment(place: Path) -> None:
    port = address_of(place).rpartition(":")[2]
    by_argument = Driver(place, RAY_TMPDIR="/nowhere")
    by_environment = Driver(place, RAY_TMPDIR="/nowhere", RAY_ADDRESS=address_of(place))
    by_argument.send("connect", head_address=f"localhost:{port}")
    by_environment.send("connect", head_address="auto")
    for driver in (by_argument, by_environment):
        connection = driver.receive()
        assert connection["kind"] == "cluster"
        assert connection["address"] == address_of(place)
        driver.ask("task")
        assert driver.end() == 0


def test_the_ray_a_process_has_is_taken_and_left_as_it_is(place: Path) -> None:
    driver = Driver(place, RAY_ADDRESS="10.1.2.3:6379", RAY_AUTH_MODE="token")
    assert driver.ask("init", address=address_of(place)) == address_of(place)
    connection = driver.ask("connect", head_address="auto")
    assert connection["kind"] == "existing"
    assert connection["address"] == address_of(place)
    assert driver.ask("connect", head_address=address_of(place))["kind"] == "existing"
    with pytest.raises(DriverError, match=f"ClusterError: .*10.1.2.3:6379.*{address_of(place)}"):
        driver.ask("connect", head_address="10.1.2.3:6379")
    with pytest.raises(DriverError, match=f"ClusterError: .*local Ray.*{address_of(place)}"):
        driver.ask("connect", head_address="local")
    driver.ask("task")

    # After ray.shutdown(), the earlier connection has no effect.
    driver.ask("shutdown")
    with pytest.raises(DriverError, match=r"ClusterError: .*RAY_ADDRESS='10.1.2.3:6379'"):
        driver.ask("connect", head_address="auto")
    assert driver.ask("connect", head_address=address_of(place))["kind"] == "cluster"
    assert driver.end() == 0


def test_local_is_a_local_ray_though_a_cluster_runs(place: Path) -> None:
    driver = Driver(place, RAY_ADDRESS=address_of(place))
    connection = driver.ask("connect", head_address="local")
    assert connection["kind"] == "local"
    assert connection["address"] != address_of(place)
    with pytest.raises(DriverError, match=f"ClusterError: .*{address_of(place)}"):
        driver.ask("connect", head_address=address_of(place))
    # Another process still finds the cluster, not this local Ray.
    other = Driver(place)
    assert other.ask("connect", head_address="auto")["address"] == address_of(place)
    driver.ask("shutdown")
    assert driver.ask("connect", head_address=address_of(place))["kind"] == "cluster"
    assert driver.end() == 0
    assert other.end() == 0


def test_who_holds_the_cpus(place: Path) -> None:
    other = Driver(place)
    other.ask("connect", head_address="auto")
    other.ask("hog", num_cpus=1)
    driver = Driver(place)
    driver.ask("connect", head_address="auto")

    def report() -> str:
        return driver.ask("busy")

    text = wait_until(lambda: "hog" in report() and report(), 60, "report of the running task")
    assert "placement group 'reserved' reserves 1" in text
    assert "1 x hog" in text
    assert driver.end() == 0
    assert other.end() == 0


@pytest.mark.parametrize("content", ["127.0.0.1:{closed}", "127.0.0.1:{silent}", "x", ""])
def test_a_stale_address_file_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    silent_port: int,
    closed_port: int,
    content: str,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    file = tmp_path / "ray" / "ray_current_cluster"
    assert _running_cluster() is None
    file.write_text(content.format(closed=closed_port, silent=silent_port))
    assert _running_cluster() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_an_address_file_of_another_user_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    file = tmp_path / "ray" / "ray_current_cluster"
    os.mkfifo(file)  # a read would wait forever
    os.chown(file, 65534, 65534)
    assert _running_cluster() is None


def test_without_a_live_cluster_auto_is_processes(empty_place: Path, closed_port: int) -> None:
    (empty_place / "ray").mkdir()
    (empty_place / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed_port}")
    driver = Driver(empty_place)
    assert driver.ask("choose", head_address="auto") == ["processes", "no cluster found"]
    assert logged(driver, "DEBUG ignoring ")
    with pytest.raises(DriverError, match=r"ClusterError: .*names no Ray .*head_address='local'"):
        driver.ask("connect", head_address="auto")
    assert driver.end() == 0


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return int(reserved.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yield the port of a server that never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def web_port() -> Iterator[int]:
    """Yield the port of a web server, which answers but is no Ray."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


def test_nobody_there_is_said_at_once(empty_place: Path, closed_port: int, web_port: int) -> None:
    driver = Driver(empty_place)
    addresses = [
        f"127.0.0.1:{closed_port}",
        f"localhost:{closed_port}",
        f"127.0.0.1:{web_port}",
        "host.invalid:6379",
    ]
    for address in addresses:
        driver.send("connect", head_address=address)
        command = f"`ray start --address={address} --num-cpus=0`"
        with pytest.raises(DriverError, match=f"ClusterError: .*{address!r}.*{command}"):
            driver.receive(QUICK_SECONDS)
    # No failed attempt leaves anything behind.
    assert driver.ask("connect", head_address="local")["kind"] == "local"
    assert driver.end() == 0


def test_no_node_on_this_machine_is_said_at_once(place: Path) -> None:
    # In a new PID namespace, the cluster's node is not a process of this machine.
    elsewhere = Driver(place, under=namespace("--fork", "--kill-child", "--pid", "--mount-proc"))
    elsewhere.send("connect", head_address=address_of(place))
    command = f"`ray start --address={address_of(place)} --num-cpus=0`"
    with pytest.raises(DriverError, match=f"ClusterError: .*no node of it.*{command}"):
        elsewhere.receive(QUICK_SECONDS)
    assert elsewhere.ask("connect", head_address="local")["kind"] == "local"
    assert elsewhere.end() == 0


@pytest.mark.extended
@pytest.mark.long
def test_who_is_silent_is_given_up_after_15_seconds(empty_place: Path, silent_port: int) -> None:
    start_node(empty_place, "--head", "--port=0", "--num-cpus=1", "--include-dashboard=false")
    [head] = [pid for pid, name in processes_in(empty_place).items() if "gcs_server" in name]
    silent = Driver(empty_place, RAY_ADDRESS=f"127.0.0.1:{silent_port}")
    frozen = Driver(empty_place)
    os.kill(head, signal.SIGSTOP)
    silent.send("connect", head_address="auto")
    frozen.send("connect", head_address=address_of(empty_place))
    with pytest.raises(DriverError, match=f"ClusterError: .*RAY_ADDRESS='127.0.0.1:{silent_port}'"):
        silent.receive(SILENT_SECONDS)
    with pytest.raises(DriverError, match=f"ClusterError: .*='{address_of(empty_place)}'"):
        frozen.receive(SILENT_SECONDS)
    # "auto" skips a cluster that does not answer, because the user has not named it.
    assert frozen.ask("choose", head_address="auto") == ["processes", "no cluster found"]
    assert logged(frozen, f"nobody answers at {address_of(empty_place)}")
    assert silent.end() == 0
    assert frozen.end() == 0


def test_a_node_without_dpex_gets_it(empty_place: Path) -> None:
    # A copy, because the package under test may be installed, and then the node has it too.
    library = empty_place / "library"
    shutil.copytree(ROOT / "dpex", library / "dpex")
    (library / "dpex" / "only_here.py").write_text("")
    _, metadata = installed("torch")
    other_torch = f"printf 'Name: torch\\nVersion: 1.0.0\\n' > '{metadata}/METADATA'"
    start_node(empty_place, "--head", "--port=0", "--num-cpus=1", "--include-dashboard=false")
    start_node(
        empty_place,
        f"--address={address_of(empty_place)}",
        "--num-cpus=1",
        under=hiding(library, metadata, more=other_torch),
    )
    driver = Driver(empty_place, PYTHONPATH=str(library))
    connection = driver.ask("connect", head_address="auto")
    [second] = [node for node in driver.ask("cluster")["nodes"] if node != connection["node"]]
    assert connection["runtime_env"] is not None
    assert logged(driver, "INFO sending dpex along with the tasks")
    assert logged(driver, "has torch 1.0.0, but this process has ")

    with pytest.raises(DriverError, match="ModuleNotFoundError"):
        driver.ask("task", node=second, module="dpex.only_here")
    _, path = driver.ask(
        "task", node=second, module="dpex.only_here", runtime_env=connection["runtime_env"]
    )
    assert not Path(path).is_relative_to(library)
    assert driver.end() == 0


def test_a_node_without_torch_is_named(empty_place: Path) -> None:
    start_node(
        empty_place,
        *("--head", "--port=0", "--num-cpus=1", "--include-dashboard=false"),
        under=hiding(*installed("torch")),
    )
    driver = Driver(empty_place)
    host = address_of(empty_place).rpartition(":")[0]
    with pytest.raises(DriverError, match=f"ClusterError: .*Node {host} has no torch"):
        driver.ask("connect", head_address="auto")
    assert not driver.ask("is_connected")
    assert driver.end() == 0


# Python runs this code when it starts. An import of numpy then waits for the file GO_ON.
IMPORTS_SLOWLY = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy._core.numeric":
            open(os.environ["IMPORTING"], "a").close()
            while not os.path.exists(os.environ["GO_ON"]):
                time.sleep(0.01)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.extended
def test_a_node_that_answers_too_late_stays_usable(empty_place: Path) -> None:
    (empty_place / "sitecustomize.py").write_text(IMPORTS_SLOWLY)
    importing, go_on = empty_place / "importing", empty_place / "go_on"
    start_node(
        empty_place,
        *("--head", "--port=0", "--num-cpus=1", "--include-dashboard=false"),
        PYTHONPATH=os.pathsep.join([str(empty_place), str(ROOT)]),
        IMPORTING=str(importing),
        GO_ON=str(go_on),
    )
    driver = Driver(empty_place)
    assert driver.ask("connect", head_address="auto")["kind"] == "cluster"
    assert importing.exists()
    assert logged(driver, "did not tell its versions within")
    go_on.touch()
    driver.ask("task", module="numpy.testing")
    assert driver.end() == 0


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        ({"python": "3.10.2"}, "Python 3.10.2"),
        ({"ray": "2.0.0"}, "Ray 2.0.0"),
        ({"torch": None}, "no torch"),
    ],
)
def test_what_would_break_says_so(difference: dict[str, str | None], sentence: str) -> None:
    here = node_versions._make_probe()()
    assert node_versions._faults("10.1.2.3", here, here) == []
    [fault] = node_versions._faults("10.1.2.3", {**here, **difference}, here)
    assert fault.startswith("Node 10.1.2.3")
    assert sentence in fault


@pytest.mark.parametrize(
    "value",
    [
        "",
        "6379",
        "head",
        "head:",
        "head:0",
        "head:65536",
        "a b:1",
        "http://head:1",
        "::1",
        "ray://head",
        None,
    ],
)
def test_malformed_addresses_are_refused_with_the_forms(value: str) -> None:
    with pytest.raises(ValueError, match=r"'local', 'processes', 'host:port' or 'ray://") as caught:
        connect(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("address", ["local", "auto", "cluster", "10.1.2.3:6379", "ray://a:1"])
def test_a_frozen_program_uses_no_ray(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ClusterError, match=f"{sys.executable}.* is not a Python interpreter"):
        connect(address)


def test_dpex_in_an_archive_is_refused(empty_place: Path) -> None:
    archive = empty_place / "dpex.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in node_versions.PACKAGE.rglob("*.py"):
            file.write(path, path.relative_to(node_versions.PACKAGE.parent))
    code = "from dpex.cluster.connect import connect; connect('local')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=empty_place,
        env=environment(empty_place, PYTHONPATH=str(archive)),
        capture_output=True,
        text=True,
        timeout=QUICK_SECONDS,
        check=False,
    )
    error = done.stderr.splitlines()[-1]
    assert error == (
        f"dpex.errors.ClusterError: Ray runs files of dpex, but {archive}/dpex is in an archive. "
        "Install dpex, or unpack the archive"
    )
