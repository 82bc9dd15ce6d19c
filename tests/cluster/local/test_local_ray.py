"""Tests of a local Ray: its output, its end, and its protection from others.

All processes of a test work in one directory, by which the test finds processes that are left.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from cluster_programs import (
    PROGRAM_SECONDS,
    ROOT,
    Driver,
    DriverError,
    environment,
    processes_in,
    rank_variables,
    run_program,
    spawn,
    torchrun,
    wait_until,
    workplace,
)
from cluster_programs.ports import answers

from dpex.cluster.local import launch
from dpex.cluster.machine_share import usable_cores

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# The agent that makes runtime environments, and the one that reports to a dashboard.
AGENT = "ray::RuntimeEnvAgent"
AGENTS = (AGENT, "ray::DashboardAgent")
AGENT_SECONDS = 30
# Ray stops its processes one after another. After a kill of the process that started it, worker
# processes that are starting end after 25 s, and the two agents after 100 s.
GONE_SECONDS = 60
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


def all_gone(place: Path) -> bool:
    return not processes_in(place)


def all_but_agents_gone(place: Path) -> bool:
    return all(command.startswith(AGENTS) for command in processes_in(place).values())


def without_dpex(errors: str) -> str:
    """Return what stderr has beside dpex's lines, of which a busy machine has some."""
    return "".join(li for li in errors.splitlines(keepends=True) if not li.startswith("dpex: "))


def titles(place: Path, title: str) -> list[int]:
    return [pid for pid, command in processes_in(place).items() if title in command]


QUIET_PROGRAM = """
import random, ray, sys
from dpex.cluster.connect import connect
state = random.getstate()
connection = connect("local")
assert random.getstate() == state, "torch's loader draws nothing from this generator"
assert (connection.kind, connection.single_host, connection.runtime_env) == ("local", True, None)
assert ray.get(ray.remote(lambda: 1).remote()) == 1
"""


def test_prints_one_line_and_is_gone_at_the_end(place: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    well, badly = (
        spawn([sys.executable, "-c", QUIET_PROGRAM + ending], place, **pipes)
        for ending in ("", "raise RuntimeError('a bug')")
    )
    line = f"dpex: local Ray on {usable_cores()} cores\n"
    output, errors = well.communicate(timeout=100)
    assert (output, errors.startswith(line), without_dpex(errors)) == ("", True, "")
    assert well.returncode == 0
    output, errors = badly.communicate(timeout=100)
    assert (output, errors.startswith(line)) == ("", True)
    assert without_dpex(errors).startswith("Traceback")
    assert errors.endswith("RuntimeError: a bug\n")
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of Ray")


@pytest.mark.parametrize("hook", [None, "builtins.print"])
def test_breakpoint_stays_python_s(place: Path, hook: str | None) -> None:
    program = place / "program.py"
    program.write_text(QUIET_PROGRAM + "import os; print(os.environ.get('PYTHONBREAKPOINT'))")
    variables = {} if hook is None else {"PYTHONBREAKPOINT": hook}
    done = run_program(program, place=place, seconds=100, **variables)
    assert done.stdout == f"{hook}\n", done.stderr


def test_a_variable_sets_the_size_of_the_object_store(place: Path) -> None:
    size_bytes = 200 << 20
    owner = Driver(place, DPEX_OBJECT_STORE_MEMORY=str(size_bytes))
    owner.ask("connect", head_address="local")
    assert owner.ask("cluster")["object_store_bytes"] == size_bytes
    assert owner.end() == 0
    for refused in ("2GB", "1000"):
        owner = Driver(place, DPEX_OBJECT_STORE_MEMORY=refused)
        with pytest.raises(DriverError, match=f"DPEX_OBJECT_STORE_MEMORY='{refused}'.*78,643,200"):
            owner.ask("connect", head_address="local")
        assert owner.end() == 0


def test_sigkill_of_the_owner_ends_ray(place: Path) -> None:
    owner = Driver(place)
    owner.ask("connect", head_address="local")
    cluster = owner.ask("cluster")
    assert cluster["cpus"] == launch.local_cpus() >= 64
    shm = os.statvfs("/dev/shm")
    assert cluster["object_store_bytes"] <= shm.f_frsize * shm.f_blocks
    assert not titles(place, "ray::IDLE"), "workers are started before there is a task"
    assert not (place / "ray" / "ray_current_cluster").exists()
    # A kernel of Jupyter first ends the processes of its own group.
    group = os.getpgid(owner.process.pid)
    assert [pid for pid in processes_in(place) if os.getpgid(pid) == group] == [owner.process.pid]
    owner.ask("hog", num_cpus=1)
    wait_until(lambda: titles(place, "ray::hog"), 60, "busy worker")
    # A fork of the owner may outlive it, but must not keep Ray alive.
    sleeper = owner.ask("fork_sleeper")
    try:
        owner.send("task")
        wait_until(lambda: titles(place, "default_worker.py"), 60, "starting worker")
        owner.kill()
        wait_until(lambda: all_but_agents_gone(place), GONE_SECONDS, "end of Ray")
        os.kill(sleeper, 0)
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_outlives_the_thread_that_started_it(place: Path) -> None:
    owner, other = Driver(place), Driver(place)
    owner.send("connect_in_thread", head_address="local")
    other.send("connect", head_address="local")
    first = owner.receive()
    assert first["kind"] == "local"
    # Two processes do not share a local Ray.
    assert other.receive()["node"] != first["node"]
    owner.ask("task")
    again = owner.ask("connect", head_address="local")
    assert again["node"] == first["node"]

    for address in ("auto", "local"):
        refusal = owner.ask("connect_in_fork", head_address=address)
        assert refusal.startswith("ClusterError: this process was forked")
        assert "head_address='processes'" in refusal
    owner.ask("task")

    # After ray.shutdown(), the process starts another local Ray.
    owner.ask("shutdown")
    assert owner.ask("connect", head_address="local")["node"] != first["node"]
    assert owner.end() == 0
    assert other.end() == 0


def test_a_rank_starts_no_local_ray(place: Path) -> None:
    """A local Ray serves one process, so ranks need one that was started for all of them."""
    driver = Driver(place, **rank_variables(place, 0))
    text = "ClusterError: .* one of 2 ranks.* `ray start --head`.* head_address='processes'"
    with pytest.raises(DriverError, match=text):
        driver.ask("connect", head_address="local")
    assert driver.end() == 0
    alone = Driver(place, **rank_variables(place, 0, 1))
    assert alone.ask("connect", head_address="local")["kind"] == "local"
    assert alone.end() == 0


def test_a_ray_that_cannot_start_is_an_error_with_its_reason(place: Path) -> None:
    deep = place / ("deep" * 20)
    deep.mkdir()
    driver = Driver(place, RAY_TMPDIR=str(deep))
    with pytest.raises(DriverError, match=r"ClusterError: .*107 bytes.*Set a shorter RAY_TMPDIR"):
        driver.ask("connect", head_address="local")
    assert driver.end() == 0


def test_a_ray_that_another_thread_starts_at_the_same_time_stays(place: Path) -> None:
    driver = Driver(place)
    address = driver.ask("init", num_cpus=1, include_dashboard=False)
    with pytest.raises(DriverError, match=r"ClusterError: a local Ray did not start: .*twice"):
        driver.ask("start_local")
    assert driver.ask("is_connected")
    driver.ask("task")
    connection = driver.ask("connect", head_address="auto")
    assert (connection["kind"], connection["address"]) == ("existing", address)
    assert driver.end() == 0


SPAWNED_RANKS = """
import sys
import torch.distributed as dist
import torch.multiprocessing as mp

def main(number, place):
    dist.init_process_group("gloo", f"file://{place}/store", rank=number, world_size=2)
    from dpex import ClusterError
    from dpex.cluster.connect import connect
    try:
        connect("local")
    except ClusterError as error:
        print(error, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.extended
def test_spawned_ranks_without_torchruns_environment_start_no_local_ray(place: Path) -> None:
    program = place / "ranks.py"
    program.write_text(SPAWNED_RANKS)
    process = spawn(
        [sys.executable, str(program), str(place)],
        place,
        env=environment(place, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert output.count("this is one of 2 ranks") == 2, output
    assert all_gone(place)


BOUND_RANKS = """
import json
import os
import sys
from pathlib import Path

import torch.utils.data

import dpex

class Cores(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return str(sorted(os.sched_getaffinity(0)))

rank, cores = int(os.environ["LOCAL_RANK"]), sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[rank % len(cores)]})  # as numactl does
seen = {
    type.__module__: sorted({c for batch in type(Cores(), num_workers=1) for c in batch})
    for type in (torch.utils.data.DataLoader, dpex.DataLoader)
}
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(list(seen.values())))
"""


@pytest.mark.extended
def test_workers_run_on_the_cores_that_their_rank_is_bound_to(place: Path) -> None:
    program = place / "ranks.py"
    program.write_text(BOUND_RANKS)
    run = torchrun(program, str(place), ranks=2, place=place, seconds=PROGRAM_SECONDS)
    assert run.returncode == 0, run.stdout
    for rank in range(2):
        torchs, ours = json.loads((place / f"rank{rank}.json").read_text())
        assert ours == torchs


def test_importing_it_imports_neither_ray_nor_torch() -> None:
    program = "import sys, dpex.cluster.connect; assert not {'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


def listening_in(place: Path) -> set[tuple[str, str, int]]:
    """Return command, address and port of all processes of a place that listen."""
    listening = set()
    for pid, command in processes_in(place).items():
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
            listening |= {
                (command.split()[0], connection.laddr.ip, connection.laddr.port)
                for connection in psutil.Process(pid).net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return listening


def agent_listens(place: Path) -> bool:
    return any(command == AGENT for command, *_ in listening_in(place))


@pytest.mark.extended
@pytest.mark.parametrize(
    "variables",
    # Other machines can reach the local Ray with the last variable.
    [{}, {"RAY_AUTH_MODE": "disabled"}, {"DPEX_PUBLIC_RAY_ONLY": "1"}],
    ids=str,
)
def test_nobody_is_let_in_without_the_token(place: Path, variables: dict[str, str]) -> None:
    owner = Driver(place, **variables)
    address = owner.ask("connect", head_address="local")["address"]
    token = token_in(place)
    assert token.stat().st_mode & 0o777 == 0o600
    on_loopback = {address for _, address, _ in listening_in(place)} <= LOOPBACK
    assert on_loopback != ("DPEX_PUBLIC_RAY_ONLY" in variables)

    with workplace() as elsewhere:
        # With this setting, Ray keeps a loopback address as it is given.
        here = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        strangers = [
            Driver(elsewhere, RAY_AUTH_MODE="disabled", **here),
            Driver(elsewhere, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64, **here),
        ]
        for stranger in strangers:
            stranger.send("init", address=address)
        for stranger in strangers:
            with pytest.raises(DriverError, match="Failed to connect to Ray cluster"):
                stranger.receive(seconds=90)
        # With the token, the same connection succeeds.
        known = Driver(elsewhere, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token.read_text(), **here)
        assert known.ask("init", address=address) == address
    owner.ask("task")
    assert owner.end() == 0
    assert not (place / "home" / ".ray").exists()


READING_PROGRAM = """
import sys
from dpex import DpexDataLoader

loader = DpexDataLoader(range(8), num_workers=2, distribute_mode=True, head_address="local")
assert [int(index) for index in loader] == list(range(8))
print("read", flush=True)
sys.stdin.read()
"""


def test_the_token_is_in_no_log_and_no_command_line(place: Path) -> None:
    program = spawn(
        [sys.executable, "-c", READING_PROGRAM],
        place,
        env=environment(place, RAY_BACKEND_LOG_LEVEL="debug"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert program.stdout is not None
    while (line := program.stdout.readline()) != "read\n":
        assert line, "no epoch"
    token = token_in(place)
    secret = token.read_bytes().strip()
    assert len(secret) == 64
    # Every user of this machine can read command lines.
    commands = "\n".join(processes_in(place).values())
    output, _ = program.communicate(timeout=60)
    assert program.returncode == 0, output
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of Ray")

    written = {p: p.read_bytes() for p in place.rglob("*") if p.is_file() and p != token}
    logs = {path.name for path in written if "logs" in path.parts}
    assert {"raylet.out", "gcs_server.out"} <= logs
    assert any(name.startswith("python-core-worker-") for name in logs)
    assert secret not in output.encode()
    assert secret not in commands.encode()
    assert not [path for path, content in written.items() if secret in content]


def test_listens_on_the_loopback_address_alone(place: Path) -> None:
    owner = Driver(place)
    owner.ask("connect", head_address="local")
    owner.ask("task")
    wait_until(lambda: agent_listens(place), AGENT_SECONDS, "agent")
    listening = listening_in(place)
    # The head, its node, the agent, a worker process and the training process.
    assert len({command for command, *_ in listening}) >= 5
    assert {address for _, address, _ in listening} <= LOOPBACK
    assert owner.end() == 0


def test_every_port_refuses_who_has_no_token(place: Path) -> None:
    owner = Driver(place)
    owner.ask("connect", head_address="local")
    owner.ask("task")
    token = token_in(place).read_text()
    wait_until(lambda: agent_listens(place), AGENT_SECONDS, "agent")
    seen: set[str] = set()
    for listening in sorted(listening_in(place)):
        *_, port = listening
        for wrong in (None, "0" * 64):
            refused = answers(port, wrong)
            assert refused in ({"UNAUTHENTICATED"}, {"401"}, {"403"}), listening
        known = answers(port, token)
        assert known in ({"OK"}, {"404"}), listening
        seen |= known
    assert seen == {"OK", "404"}
    assert owner.end() == 0


def test_nobody_else_can_enter_its_directories(place: Path) -> None:
    variables = environment(place)
    del variables["RAY_TMPDIR"]
    program = spawn([sys.executable, "-c", QUIET_PROGRAM], place, env=variables)
    assert program.wait(100) == 0
    directory = place / f"dpex-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert list(directory.glob("*/ray/session_*/sockets"))
    assert not (place / "ray").exists()


def test_the_files_of_local_rays_go_after_their_processes(place: Path) -> None:
    """The files of a local Ray that runs must stay when another one starts."""
    variables = environment(place)
    del variables["RAY_TMPDIR"]
    directory = place / f"dpex-{os.getuid()}"

    def start(then: str = "", **pipes: int) -> Popen[str]:
        program = [sys.executable, "-c", QUIET_PROGRAM + then]
        return spawn(program, place, env=variables, **pipes)

    def numbered() -> set[Path]:
        return {path for path in directory.iterdir() if path.name.isdecimal()}

    assert start().wait(100) == 0
    ended = numbered()
    assert ended
    lives = start(
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
        "assert ray.get(ray.remote(lambda: 2).remote()) == 2\n",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert lives.stdout is not None
    assert lives.stdout.readline() == "up\n"
    wait_until(lambda: not ended & numbered(), 60, "end of the old files")
    living = numbered()
    assert start().wait(100) == 0
    assert living < numbered()
    lives.communicate()
    assert lives.returncode == 0


def test_the_token_of_a_killed_process_goes_with_the_next_start(place: Path) -> None:
    owner = Driver(place)
    owner.send("connect", head_address="local")
    [token] = wait_until(lambda: list(place.glob("dpex-*/*/auth_token")), 100, "token")
    owner.kill()
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    wait_until(lambda: all_but_agents_gone(place), GONE_SECONDS, "end of Ray")
    following = Driver(place)
    following.ask("connect", head_address="local")
    wait_until(lambda: not token.exists(), GONE_SECONDS, "deletion of the token")
    assert following.end() == 0


DIRECTORIES_PROGRAM = """
import sys
from dpex.cluster.local.directory import delete_ended, make_directory
made = []
for _ in range(40):
    made.append(make_directory())
    delete_ended()
print(*(directory.name for directory in made), flush=True)
sys.stdin.read()
assert all((directory / "lock").exists() for directory in made)
"""


def test_local_rays_that_start_at_once_have_directories_of_their_own(place: Path) -> None:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    program = [sys.executable, "-c", DIRECTORIES_PROGRAM]
    for _ in range(2):  # the second time, all numbers are those of ended processes
        starting = [spawn(program, place, env=environment(place), **streams) for _ in range(4)]
        names: list[str] = []
        for process in starting:
            assert process.stdout is not None
            names += process.stdout.readline().split()
        assert len(set(names)) == 160
        for process in starting:
            process.communicate(timeout=60)
            assert process.returncode == 0
    left = {path.name for path in (place / f"dpex-{os.getuid()}").iterdir()}
    assert left >= set(names)


def token_in(place: Path) -> Path:
    """Return the file with the token of the only local Ray."""
    [token] = place.glob(f"dpex-{os.getuid()}/*/auth_token")
    return token


TAKING_PROGRAM = """
import os
import ray
from dpex.cluster.connect import connect

def variables():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}

before = variables()
for _ in range(2):
    connect("local")
    assert ray.get(ray.remote(lambda: 2).remote()) == 2
    assert variables() == before
    ray.shutdown()
ray.init(num_cpus=1, include_dashboard=False)
assert ray.get(ray.remote(lambda: 2).remote()) == 2
"""


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_the_users_own_ray_starts_after_a_local_one(place: Path, mode: str | None) -> None:
    """dpex restores the user's environment while a local Ray runs, and after its end."""
    variables = {} if mode is None else {"RAY_AUTH_MODE": mode}
    program = place / "program.py"
    program.write_text(TAKING_PROGRAM)
    done = run_program(program, place=place, seconds=100, **variables)
    assert done.returncode == 0, done.stderr


LATE_READER_PROGRAM = """
import atexit, threading, time

def wait_for_reader():
    # Runs last: Ray has been shut down.
    for thread in threading.enumerate():
        if thread.name == "dpex-receive":
            thread.join(60)
            assert not thread.is_alive()

atexit.register(wait_for_reader)

import ray, ray.data, torch
from torch.utils.data import TensorDataset
from dpex import DpexDataLoader

read = ray.data.DataIterator.iter_torch_batches

def read_late(self, **kwargs):
    while ray.is_initialized():
        time.sleep(0.01)
    return read(self, **kwargs)

ray.data.DataIterator.iter_torch_batches = read_late
loader = DpexDataLoader(
    TensorDataset(torch.arange(8)), num_workers=2, distribute_mode=True, head_address="local"
)
iterator = iter(loader)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        *(
            pytest.param(end, marks=pytest.mark.extended)
            for end in ("del iterator", "ray.shutdown()")
        ),
    ],
)
def test_a_reader_that_starts_when_ray_has_gone_starts_no_other(place: Path, end: str) -> None:
    """By default, every call of Ray starts one."""
    program = place / "program.py"
    program.write_text(LATE_READER_PROGRAM + end)
    done = run_program(program, place=place, seconds=100)
    assert (done.returncode, without_dpex(done.stderr)) == (0, "")
