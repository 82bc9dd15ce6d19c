"""Tests of a local Ray: its output, its end, ranks that share it, and protection from others.

All processes of a test work in one directory, by which the test finds processes that are left.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from cluster_programs import (
    PROGRAM_SECONDS,
    RANK_VARIABLES,
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

from dpex.cluster import limits
from dpex.cluster.limits import usable_cores
from dpex.cluster.local import launch, shared_by_ranks
from dpex.compat import local_ray

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# The agent that makes runtime environments. It starts when the first block has arrived, or after
# tuning.SETTLE_S.
AGENT = "ray::RuntimeEnvAgent"
AGENT_SECONDS = 30
# After a kill of the process that started it, Ray would leave two agents for 100 s, and starting
# worker processes for 25 s. dpex ends them sooner.
GONE_SECONDS = 60
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


def all_gone(place: Path) -> bool:
    return not processes_in(place)


def without_dpex(errors: str) -> str:
    """Return what stderr has beside dpex's lines, of which a busy machine has some."""
    return "".join(li for li in errors.splitlines(keepends=True) if not li.startswith("dpex: "))


def titles(place: Path, title: str) -> list[int]:
    return [pid for pid, command in processes_in(place).items() if title in command]


def rank(place: Path, number: int, world_size: int = 2) -> Driver:
    """Start a process with the environment that torchrun gives to a rank."""
    return Driver(place, **rank_variables(place, number, world_size))


QUIET_PROGRAM = """
import ray, sys
from dpex.cluster.connect import connect
connection = connect("local")
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
    owner.ask("hog", num_cpus=1)
    wait_until(lambda: titles(place, "ray::hog"), 60, "busy worker")
    # A fork of the owner may outlive it, but must not keep Ray alive.
    sleeper = owner.ask("fork_sleeper")
    try:
        owner.send("task")
        wait_until(lambda: titles(place, "default_worker.py"), 60, "starting worker")
        owner.kill()
        wait_until(lambda: all_gone(place), GONE_SECONDS, "end of Ray")
        os.kill(sleeper, 0)
    finally:
        os.kill(sleeper, signal.SIGKILL)


KILLED_PROGRAM = """
import os, signal, sys
from pathlib import Path
from dpex.cluster.local.process_end import end_ray_after_us
directory = Path(sys.argv[1])
end_ray_after_us(directory, directory / "auth_token")
(directory / "auth_token").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_token_of_an_owner_that_is_killed_at_once_is_deleted(place: Path) -> None:
    """The process that deletes the token may start to run after the owner's end."""
    owner = [sys.executable, "-c", KILLED_PROGRAM, str(place)]
    assert spawn(owner, place).wait(60) == -signal.SIGKILL
    wait_until(lambda: not (place / "auth_token").exists(), 60, "deletion of the token")


def test_outlives_the_thread_that_started_it(place: Path) -> None:
    owner, other = Driver(place), Driver(place)
    owner.send("connect_in_thread", head_address="auto")
    other.send("connect", head_address="auto")
    first = owner.receive()
    assert first["kind"] == "local"
    # Two processes that are not ranks of one job do not share a local Ray.
    assert other.receive()["node"] != first["node"]
    owner.ask("task")
    again = owner.ask("connect", head_address="local")
    assert again["node"] == first["node"]

    refusal = owner.ask("connect_in_fork", head_address="auto")
    assert refusal.startswith("ClusterError: this process was forked")
    owner.ask("task")

    # After ray.shutdown(), the process starts another local Ray.
    owner.ask("shutdown")
    assert owner.ask("connect", head_address="auto")["node"] != first["node"]
    assert owner.end() == 0
    assert other.end() == 0


def test_ranks_share_one_ray_until_the_last_is_gone(place: Path) -> None:
    ranks = [rank(place, number) for number in range(2)]
    for driver in ranks:
        driver.send("connect", head_address="auto")
    nodes = [driver.receive()["node"] for driver in ranks]
    assert nodes[0] == nodes[1]
    assert len(titles(place, "gcs_server")) == 1
    # One rank starts the keeper, but each rank's tasks have the variables of their rank.
    assert [driver.ask("task", variable="RANK")[0] for driver in ranks] == ["0", "1"]
    assert [driver.ask("task", variable="WORLD_SIZE")[0] for driver in ranks] == ["2", "2"]

    ranks[0].kill()
    ranks[1].ask("task")
    # A late rank, as after a restart, joins the running Ray.
    late = rank(place, 0)
    assert late.ask("connect", head_address="local")["node"] == nodes[1]
    assert late.end() == 0
    ranks[1].ask("task")
    assert list(place.rglob("jobs/*")), "each rank's job has a file"
    ranks[1].kill()
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of the shared Ray")
    wait_until(lambda: not list(place.rglob("jobs/*")), GONE_SECONDS, "deletion of the files")


@pytest.mark.extended
def test_the_first_rank_may_die_while_the_shared_ray_starts(place: Path) -> None:
    first = rank(place, 0)
    first.send("connect", head_address="auto")
    wait_until(lambda: titles(place, "dpex.cluster.local.shared_by_ranks"), 60, "keeper")
    first.kill()
    second = rank(place, 1)
    assert second.ask("connect", head_address="auto")["kind"] == "local"
    second.ask("task")

    # If the keeper is killed, its Ray ends, and the next rank starts a new one.
    [keeper] = titles(place, "dpex.cluster.local.shared_by_ranks")
    os.kill(keeper, signal.SIGKILL)
    second.kill()
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of Ray")
    third = rank(place, 0)
    assert third.ask("connect", head_address="auto")["kind"] == "local"
    assert third.end() == 0
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of the shared Ray")


def test_a_ray_that_cannot_start_is_an_error_with_its_reason(place: Path) -> None:
    deep = place / ("deep" * 20)
    deep.mkdir()
    alone = Driver(place, RAY_TMPDIR=str(deep))
    several = Driver(place, RAY_TMPDIR=str(deep), WORLD_SIZE="2", MASTER_PORT="1", RANK="0")
    for driver in (alone, several):
        driver.send("connect", head_address="local")
    for driver in (alone, several):
        with pytest.raises(
            DriverError, match=r"ClusterError: .*107 bytes.*Set a shorter RAY_TMPDIR"
        ):
            driver.receive()
        driver.end()
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of the keeper")


def test_a_keeper_that_no_rank_reaches_ends(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "job.sock"))
        listener.listen()
        program = (
            "import sys; from dpex.cluster.local import shared_by_ranks as keeper;"
            "from dpex import tuning;tuning.FIRST_RANK_S = 1;"
            "keeper.keep(sys.argv[1], int(sys.argv[2]))"
        )
        keeper = spawn(
            [sys.executable, "-c", program, str(place / "job"), str(listener.fileno())],
            place,
            pass_fds=[listener.fileno()],
        )
    assert keeper.wait(timeout=100) == 0
    assert not (place / "job.sock").exists()
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of Ray")


SPAWNED_RANKS = """
import sys
import torch.distributed as dist
import torch.multiprocessing as mp

def main(number, place):
    dist.init_process_group("gloo", f"file://{place}/store", rank=number, world_size=2)
    from dpex.cluster.connect import connect
    address = connect("auto").address
    addresses = [None, None]
    dist.all_gather_object(addresses, address)
    assert addresses[0] == addresses[1], addresses
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.extended
def test_spawned_ranks_without_torchruns_environment_share_too(place: Path) -> None:
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
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of the shared Ray")


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "shared"),
    [
        ({}, False),
        ({"WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}, False),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}, True),
        ({"LOCAL_SIZE": "2"}, False),  # not a launcher's
        ({"WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "many"}, False),
    ],
)
def test_who_shares(
    bare_environment: pytest.MonkeyPatch, variables: dict[str, str], shared: bool
) -> None:
    for name, value in variables.items():
        bare_environment.setenv(name, value)
    assert (shared_by_ranks.shared_job() is not None) == shared


def test_jobs_are_told_apart(bare_environment: pytest.MonkeyPatch) -> None:
    bare_environment.setenv("WORLD_SIZE", "2")
    names = {shared_by_ranks.shared_job()}
    bare_environment.setenv("MASTER_PORT", "29500")
    names.add(shared_by_ranks.shared_job())
    bare_environment.setenv("MASTER_PORT", "29501")
    names.add(shared_by_ranks.shared_job())
    bare_environment.setenv("TORCHELASTIC_RUN_ID", "two")
    names.add(shared_by_ranks.shared_job())
    assert len(names) == 4


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_cores_are_divided_among_ranks(variable: str, bare_environment: pytest.MonkeyPatch) -> None:
    cores = limits.free_cores()
    assert 1 <= cores <= len(os.sched_getaffinity(0)) <= launch.local_cpus()
    bare_environment.setenv("LOCAL_RANK", "0")
    bare_environment.setenv(variable, str(cores))
    assert limits.free_cores() == 1
    bare_environment.setenv(variable, "1000")
    assert limits.free_cores() == 1


@pytest.mark.parametrize(
    ("own", "of_parent", "ranks", "share"),
    [
        (64, 64, "", 64),
        (64, 64, "8", 8),
        (8, 64, "8", 8),  # bound to cores of its own
        (32, 64, "8", 8),  # bound to a NUMA node, with three others
        (8, 8, "8", 1),
        (64, 1, "8", 8),  # OpenMP has bound the parent's main thread
    ],
)
def test_a_bound_rank_uses_all_its_cores(
    own: int, of_parent: int, ranks: str, share: int, bare_environment: pytest.MonkeyPatch
) -> None:
    bare_environment.setenv("LOCAL_WORLD_SIZE", ranks)
    cores = {0: own, os.getppid(): of_parent}
    bare_environment.setattr(limits, "_own_groups", lambda: iter(()))
    bare_environment.setattr(os, "sched_getaffinity", lambda process: set(range(cores[process])))
    assert limits.free_cores() == share


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
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of the shared Ray")


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


def test_agents_start_when_they_are_wanted(place: Path) -> None:
    owner = Driver(place)
    owner.ask("settle_after", seconds=1000)
    owner.ask("connect", head_address="local")
    owner.ask("task")
    assert not titles(place, AGENT)
    owner.ask("settle")
    # A task with a runtime_env waits for the agent.
    assert owner.ask("task", runtime_env={"env_vars": {"RANK": "7"}})[0] == "7"
    assert agent_listens(place)
    assert not titles(place, "ray::DashboardAgent"), "nobody has a use for it"
    assert owner.end() == 0


def test_agents_that_were_not_wanted_end_with_their_node(place: Path) -> None:
    owner = Driver(place)
    owner.ask("settle_after", seconds=1000)
    owner.ask("connect", head_address="local")
    [raylet] = titles(place, "raylet/raylet")
    agents = psutil.Process(raylet).children()
    assert len(agents) == 2
    os.kill(raylet, signal.SIGKILL)
    wait_until(lambda: not any(a.is_running() for a in agents), GONE_SECONDS, "end of the agents")
    owner.kill()
    wait_until(lambda: all_gone(place), GONE_SECONDS, "end of Ray")


@pytest.mark.extended
@pytest.mark.parametrize(
    "variables",
    # Other machines can reach the local Ray with the last variable.
    [{}, {"RAY_AUTH_MODE": "disabled"}, {"DPEX_PUBLIC_RAY_ONLY": "1"}],
    ids=str,
)
def test_nobody_is_let_in_without_the_token(place: Path, variables: dict[str, str]) -> None:
    owner = Driver(place, **variables)
    address = owner.ask("connect", head_address="auto")["address"]
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
    wait_until(lambda: not token.exists(), GONE_SECONDS, "end of the token")
    assert not (place / "home" / ".ray").exists()


READING_PROGRAM = """
import sys
from dpex import DpexDataLoader

class Forked:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return sys.of_the_training_process

sys.of_the_training_process = 1
loader = DpexDataLoader(Forked(), num_workers=2, distribute_mode=True, head_address="local")
loader.warm_up(wait=True)
assert [int(forked) for forked in loader] == [1] * 8
print("read", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="no forks")
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
    assert not [name for name in left if name.startswith("ended-")]
    assert left >= set(names)


def test_ranks_without_a_home_share_a_token(place: Path) -> None:
    variables = {"HOME": "/proc/nowhere", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        Driver(place, RANK=str(n), LOCAL_RANK=str(n), MASTER_PORT="29999", **variables)
        for n in range(2)
    ]
    for driver in ranks:
        driver.send("connect", head_address="auto")
    assert len({driver.receive()["address"] for driver in ranks}) == 1
    for driver in ranks:
        driver.ask("task")
    assert token_in(place).stat().st_mode & 0o777 == 0o600
    for driver in ranks:
        assert driver.end() == 0


def token_in(place: Path) -> Path:
    """Return the file with the token of the only local Ray."""
    [token] = place.glob(f"dpex-{os.getuid()}/*/auth_token")
    return token


TAKING_PROGRAM = """
import os, sys
import ray, torch
from torch.utils.data import TensorDataset
from dpex import DpexDataLoader

def epoch():
    loader = DpexDataLoader(
        TensorDataset(torch.arange(8)), num_workers=2, distribute_mode=True, head_address="local"
    )
    assert torch.cat([batch for batch, in loader]).tolist() == list(range(8))

def variables():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}

before = variables()
for _ in range(2):
    epoch()
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


@pytest.mark.parametrize("option", ["SO_REUSEADDR", "SO_REUSEPORT", "SO_KEEPALIVE"])
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_nobody_else_can_take_the_port_of_an_agent_that_has_not_started(option: str) -> None:
    port = local_ray._reserve_port("127.0.0.1")
    program = (
        "import os, socket, sys\n"
        "os.setuid(int(sys.argv[1]))\n"
        "taken = socket.socket()\n"
        f"taken.setsockopt(socket.SOL_SOCKET, socket.{option}, 1)\n"
        f"taken.bind(('127.0.0.1', {port}))\n"
    )

    def bind(user: int) -> str:
        command = [sys.executable, "-I", "-S", "-c", program, str(user)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert "Address already in use" in bind(65534)
    assert (bind(0) == "") == (option == "SO_REUSEPORT")


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
loader = DpexDataLoader(TensorDataset(torch.arange(8)), num_workers=2, distribute_mode=True)
iterator = iter(loader)
"""


@pytest.mark.parametrize("end", ["", "del iterator", "ray.shutdown()"])
def test_a_reader_that_starts_when_ray_has_gone_starts_no_other(place: Path, end: str) -> None:
    """By default, every call of Ray starts one."""
    program = place / "program.py"
    program.write_text(LATE_READER_PROGRAM + end)
    done = run_program(program, place=place, seconds=100)
    assert (done.returncode, without_dpex(done.stderr)) == (0, "")
