"""Processes of the tests: programs, and nodes of clusters.

Every test has its own directory, which is the working directory of all processes that it starts. By
this directory, ``processes_in`` also finds processes that Ray has renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parents[1]
ROOT = PROGRAMS.parents[1]
# Extended tests run two at a time. Only a program that hangs takes this long.
PROGRAM_SECONDS = 300
RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("LOCAL_SIZE", "TORCHELASTIC_RUN_ID"),
}


class DriverError(Exception):
    """An exception of the driver process; its text is ``"Type: message"``."""


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Make a directory for a test's processes; at the end, kill them and remove it."""
    # The paths of pytest's temporary directories are too long for a Ray session's sockets.
    place = Path(tempfile.mkdtemp(prefix="dx", dir="/tmp"))
    try:
        yield place
    finally:
        for pid in processes_in(place):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not processes_in(place), 20, f"end of all processes in {place}")
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mount a disk of one megabyte; raise ``CalledProcessError`` if that is not allowed."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def environment(place: Path, **variables: str) -> dict[str, str]:
    """Return an environment in which a process finds no Ray but the test's."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name not in RANK_VARIABLES
    }
    home = place / "home"
    home.mkdir(exist_ok=True)
    return clean | {
        "RAY_TMPDIR": str(place),
        "RAY_USAGE_STATS_ENABLED": "0",  # else Ray Data starts one more process in every cluster
        "TMPDIR": str(place),
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **variables,
    }


def rank_variables(place: Path, number: int, world_size: int = 2) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank; the directory names the job."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": place.name,
    }


def _die_with_pytest() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def spawn(command: list[str], place: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a process that ends with this one, even if this one is killed."""
    options.setdefault("env", environment(place))
    return subprocess.Popen(command, cwd=place, text=True, preexec_fn=_die_with_pytest, **options)


def run_program(
    program: Path,
    *arguments: str,
    place: Path,
    seconds: float,
    flags: tuple[str, ...] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and capture its output; ``flags`` are options of Python."""
    return subprocess.run(
        [sys.executable, *flags, str(program), *arguments],
        cwd=place,
        env=environment(place, **variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def torchrun(
    program: Path, *arguments: str, ranks: int, place: Path, seconds: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in several ranks to their end; the output includes standard error."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return _launch(launcher, program, *arguments, place=place, seconds=seconds, **variables)


def deepspeed(
    program: Path, *arguments: str, ranks: int, place: Path, seconds: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Do the same with DeepSpeed's launcher."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launcher = ["deepspeed.launcher.runner", f"--num_gpus={ranks}", f"--master_port={port}"]
    variables = {"DS_ACCELERATOR": "cpu", **variables}
    launcher.append("--no_local_rank")  # otherwise an argument of the program
    return _launch(launcher, program, *arguments, place=place, seconds=seconds, **variables)


def _launch(
    launcher: list[str],
    program: Path,
    *arguments: str,
    place: Path,
    seconds: float,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *launcher]
    process = spawn(
        [*command, str(program), *arguments],
        place,
        env=environment(place, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for pid, command_line in processes_in(place).items():
            if str(program) in command_line and pid != process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler then prints the threads' stacks
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"the ranks did not end within {seconds} s:\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def ask_actor(loader: Any, question: Callable[[Any], Any]) -> Any:
    """Call a function with a loader's pipeline actor, in the actor; return the result."""
    import ray

    return ray.get(loader._cluster.session._actor.handle.__ray_call__.remote(question))


def processes_in(place: Path) -> dict[int, str]:
    """Return the command lines, by pid, of a directory's processes, without zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == place:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:
                    found[int(entry.name)] = command
    return found


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until the condition holds, and return its result."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)
    return result


class Driver:
    """A process of ``driver.py``; ``ask("task", ...)`` calls its ``do_task(...)``."""

    def __init__(
        self, place: Path, *, under: tuple[str, ...] = (), cwd: Path | None = None, **variables: str
    ) -> None:
        program = Path(__file__).with_name("driver.py")
        self.process = spawn(
            [*under, sys.executable, str(program)],
            cwd or place,
            env=environment(place, **variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self, seconds: float = 100) -> Any:
        """Return the next result; a driver that gives none prints its threads' stacks."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                self.process.send_signal(signal.SIGABRT)
                self.process.wait()
                raise AssertionError(f"the driver did not answer within {seconds} s")
        line = self.process.stdout.readline()
        assert line, f"the driver ended with {self.process.wait()}"
        reply = json.loads(line)
        if "error" in reply:
            raise DriverError(reply["error"])
        return reply["result"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.receive()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Close the input, wait for the process to end, and return its exit code."""
        self.process.communicate(timeout=60)
        return self.process.returncode


def start_node(
    place: Path, *options: str, under: tuple[str, ...] = (), **variables: str
) -> subprocess.Popen[str]:
    """Start a node with ``ray start``, and wait until the node runs."""
    log = place / f"node-{time.monotonic_ns()}.log"
    with log.open("w") as output:
        node = spawn(
            [
                *under,
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--block",
                "--object-store-memory=100000000",
                *options,
            ],
            place,
            env=environment(place, **variables),
            stdout=output,
            stderr=output,
        )
    wait_until(
        lambda: "Ray runtime started" in log.read_text() or node.poll() is not None, 60, "Ray node"
    )
    assert node.poll() is None, log.read_text()
    return node


def address_of(place: Path) -> str:
    """Return the address of the head in a directory; ``ray start`` writes it after its messages."""
    file = place / "ray" / "ray_current_cluster"
    address = wait_until(
        lambda: file.exists() and file.read_text().strip(), 60, "address of the head"
    )
    return str(address)
