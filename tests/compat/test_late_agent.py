"""Tests that the placeholder of an agent ends with its raylet, and keeps its agent alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_programs import processes_in, run_program, wait_until, workplace

from dpex.compat import late_agent

# In place of a raylet, because the placeholder looks for that word in its parent's command.
RAYLET = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[2:]))"
AGENT = """
import os, sys, time
from pathlib import Path

place = Path(sys.argv[1])
pids = os.getpid(), os.getppid(), os.environ["RAY_RAYLET_PID"]
(place / "agents").open("a").write(" ".join(map(str, pids)) + "\\n")
while not (place / "fails").exists():
    time.sleep(0.01)
sys.exit(7)
"""
KILLS_ITS_AGENT = """
import os, signal, time
from pathlib import Path
from torch.utils.data import Dataset
from dpex import DataLoader

class Slow(Dataset):
    def __len__(self): return 2000
    def __getitem__(self, index): time.sleep(0.002); return index

def agents():
    titles = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == Path.cwd():
                titles[int(entry.name)] = (entry / "cmdline").read_bytes()
        except OSError:
            pass
    return {pid for pid, title in titles.items() if title.startswith(b"ray::RuntimeEnvAgent")}

def wait_for_another(than):
    deadline = time.monotonic() + 60
    while not (new := agents() - than):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return new

if __name__ == "__main__":
    loader = DataLoader(Slow(), batch_size=10, num_workers=2)
    indices = []
    for number, batch in enumerate(loader):
        indices += batch.tolist()
        if number == 20:
            [first] = wait_for_another(set())
            os.kill(first, signal.SIGKILL)
    assert indices == list(range(2000))
    assert wait_for_another({first})
    import ray
    env = {"env_vars": {"NAMED": "1"}}  # the agent makes it
    named = ray.remote(num_cpus=0, runtime_env=env)(lambda: os.environ["NAMED"])
    print(ray.get(named.remote()))
"""


def test_a_placeholder_whose_raylet_has_ended_before_it_looks_ends(tmp_path: Path) -> None:
    command = [sys.executable, late_agent.__file__, str(tmp_path / "wanted"), "agent.py"]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a placeholder whose agent is wanted, below a process that stands for a raylet."""
    agent, wanted = tmp_path / "agent.py", tmp_path / "wanted"
    agent.write_text(AGENT)
    wanted.touch()
    placeholder = [sys.executable, "-I", "-S", late_agent.__file__, str(wanted)]
    command = [sys.executable, str(agent), str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", RAYLET, "raylet", *placeholder, *command])
    yield process
    process.kill()
    process.wait()


def started(place: Path, number: int) -> tuple[int, int]:
    """Wait for a start of the agent, and return its pid and its parent's."""
    file = place / "agents"

    def line() -> list[str]:
        lines = file.read_text().splitlines() if file.exists() else []
        return lines[number].split() if len(lines) > number else []

    pid, parent, rays_parent = map(int, wait_until(line, 30, "start of the agent"))
    assert parent == rays_parent, "else Ray's agent takes its raylet for dead"
    return pid, parent


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_agent_starts_again_and_an_agent_that_fails_does_not(
    raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    first, parent = started(tmp_path, 0)
    os.kill(first, signal.SIGKILL)
    _, same = started(tmp_path, 1)
    assert same == parent
    (tmp_path / "fails").touch()
    assert raylet.wait(30) == 7
    assert len((tmp_path / "agents").read_text().splitlines()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_agent_ends_with_its_placeholder_and_that_with_its_raylet(
    raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    agent, placeholder = started(tmp_path, 0)
    raylet.kill()
    raylet.wait()
    wait_until(lambda: gone(placeholder), 30, "end of the placeholder")
    wait_until(lambda: gone(agent), 30, "end of the agent")


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_agent_of_a_local_ray_starts_again() -> None:
    with workplace() as place:
        program = place / "program.py"
        program.write_text(KILLS_ITS_AGENT)
        done = run_program(program, place=place, seconds=160)
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
        wait_until(lambda: not processes_in(place), 30, "end of Ray and of the fork server")
