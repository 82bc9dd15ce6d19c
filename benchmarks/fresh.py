"""Interpreters of their own: one measurement in each, and all the processes that it starts.

What such a run starts carries the run's mark in its environment, so it is found however it was
detached: to sum up its memory, and to see it gone before the next run begins.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil

MARK = "DPEX_BENCHMARK_RUN"
STARTED_S = "DPEX_BENCHMARK_STARTED_S"
RUN_TIMEOUT_S = 300
END_TIMEOUT_S = 60


def run_fresh(
    function: Callable[..., Any],
    *,
    timeout_s: float = RUN_TIMEOUT_S,
    ranks: int = 1,
    **arguments: Any,
) -> Any:
    """Call a function in a fresh interpreter, and wait for the end of everything that it started.

    Args:
        function: Of any module. If its loader's workers import that module too, as for a dataset
            in it, it should import no more than they need.
        timeout_s: How long it may take.
        ranks: In how many interpreters, which torchrun starts if there are several.
        arguments: What JSON can carry.

    Returns:
        What the function returned, in rank 0 if there are several, through JSON.

    Raises:
        RuntimeError: Some of its processes stay.
        subprocess.SubprocessError: It failed, or took longer.
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
        # More workers than cores are what some of the measurements are about.
        "PYTHONWARNINGS": "ignore:This DataLoader will create",
        MARK: mark,
        STARTED_S: repr(time.monotonic()),
    }
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=timeout_s,
        check=True,
    )
    _, alive = psutil.wait_procs(processes_of(mark), timeout=END_TIMEOUT_S)
    if alive:
        raise RuntimeError(f"still there {END_TIMEOUT_S} s after the run of {function}: {alive}")
    return json.loads(done.stdout.splitlines()[-1])


def since_start_s() -> float:
    """Return the age of this fresh interpreter; all processes of a host have one such clock."""
    return time.monotonic() - float(os.environ[STARTED_S])


def own_processes() -> list[psutil.Process]:
    """Return this fresh interpreter's process and all that came of it, detached ones too."""
    return processes_of(os.environ[MARK])


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the processes of one run."""
    processes = {process.pid: process for process in psutil.process_iter(["environ", "ppid"])}
    found = {p for p, q in processes.items() if (q.info["environ"] or {}).get(MARK) == mark}
    # Ray's agents have their titles where their environment was.
    while more := {p for p, q in processes.items() if q.info["ppid"] in found} - found:
        found |= more
    return [processes[pid] for pid in found]


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(arguments))))
