"""Measurements in fresh interpreters, and all processes that belong to one measurement.

Each process of a run has the run's mark in its environment, so that detached processes are found
too. This is necessary to add up their memory, and to wait for their end before the next run.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MARK = "DPEX_BENCHMARK_RUN"
STARTED_S = "DPEX_BENCHMARK_STARTED_S"
TREE = "DPEX_BENCHMARK_TREE"
RUN_TIMEOUT_S = 300
END_TIMEOUT_S = 60


def run_fresh(
    function: Callable[..., Any],
    *,
    timeout_s: float = RUN_TIMEOUT_S,
    ranks: int = 1,
    tree: Path | None = None,
    **arguments: Any,
) -> Any:
    """Call a function in a fresh interpreter, and wait for the end of all processes that it starts.

    Args:
        function: A function of any module. If workers also import that module, for example for its
            dataset, it should import only what they need.
        timeout_s: Maximum time of the call.
        ranks: Number of interpreters. torchrun starts them if there are several.
        tree: Directory whose ``dpex`` and ``benchmarks`` the interpreter and its workers import. It
            is also their working directory. None leaves both unchanged.
        arguments: Arguments that JSON can represent.

    Returns:
        The function's result, converted to JSON and back; that of rank 0 if there are several.

    Raises:
        RuntimeError: Some of its processes do not end.
        subprocess.SubprocessError: The call failed, or took longer.
    """
    mark = uuid.uuid4().hex
    module = sys.modules[function.__module__].__spec__
    assert module is not None
    command = [sys.executable, "-m", "benchmarks.fresh", module.name, function.__name__]
    if ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[2:2] = [*torchrun, "--local-ranks-filter=0", "-m"]
    environment = {
        **os.environ,
        # Some measurements need more workers than there are cores.
        "PYTHONWARNINGS": "ignore:This DataLoader will create",
        MARK: mark,
        STARTED_S: repr(time.monotonic()),
    }
    if tree is not None:
        environment |= {"PYTHONPATH": str(tree), TREE: str(tree)}
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        timeout=timeout_s,
        check=True,
    )
    _, alive = psutil.wait_procs(processes_of(mark), timeout=END_TIMEOUT_S)
    if alive:
        raise RuntimeError(f"still there {END_TIMEOUT_S} s after the run of {function}: {alive}")
    return json.loads(done.stdout.splitlines()[-1])


def since_start_s() -> float:
    """Return the age of this fresh interpreter; all processes of a machine share this clock."""
    return time.monotonic() - float(os.environ[STARTED_S])


def own_processes() -> list[psutil.Process]:
    """Return this fresh interpreter's process and all its descendants, detached ones too."""
    return processes_of(os.environ[MARK])


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the processes of one run."""
    processes = {process.pid: process for process in psutil.process_iter(["environ", "ppid"])}
    found = {p for p, q in processes.items() if (q.info["environ"] or {}).get(MARK) == mark}
    # The titles of Ray's agents overwrite their environment, so only the parent identifies them.
    while more := {p for p, q in processes.items() if q.info["ppid"] in found} - found:
        found |= more
    return [processes[pid] for pid in found]


def check_origin() -> None:
    """Check that this fresh interpreter imported dpex and the benchmarks from its tree.

    Raises:
        RuntimeError: A module comes from another place.
    """
    tree = os.environ.get(TREE)
    for name in ("dpex", "benchmarks"):
        origin = getattr(sys.modules.get(name), "__file__", None)
        if tree and origin and not Path(origin).is_relative_to(tree):
            raise RuntimeError(f"{name} must be imported from {tree}, was imported from {origin}")


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    returned = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    check_origin()
    print(json.dumps(returned))
