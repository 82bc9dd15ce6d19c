"""The benchmark ``service_times``: the times that the simulation of many nodes draws from.

``tests/simulation/scale.py`` reads the record. Samples of the second part compute nothing, and
processor time is counted by thread, so another program on this machine hardly changes the figures.
"""

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.benchmark_jpeg import FOLDER
from benchmarks.fresh import own_processes, run_fresh
from benchmarks.harness import arguments, describe_machine, say, write
from benchmarks.nodes import ray_nodes
from benchmarks.ray_processes import PROCESSES
from benchmarks.workloads import JpegFiles, make_jpegs

BATCH_SIZE = 64
BATCHES = 2_000
CALLS = 1_000
TASKS = 200
PROCESS_STARTS = 6
WORKERS = 2
# The time of a sample, and the number of batches of one sample in an epoch. In the first epoch,
# nothing but a worker is ever late. The other one keeps the pipeline actor busy.
EPOCHS = {"waiting": (0.02, 400), "busy": (0.0, 3_000)}
PERCENTS = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 100)
RUN_TIMEOUT_S = 600


class Stamped(Dataset[torch.Tensor]):
    """Samples that hold their reader's pid, and the times at which it began and ended.

    Args:
        length: Number of samples.
        wait_s: Seconds that a sample takes.
    """

    def __init__(self, length: int, wait_s: float) -> None:
        self.length = length
        self.wait_s = wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        began = time.monotonic()
        time.sleep(self.wait_s)
        return torch.tensor([os.getpid(), began, time.monotonic()], dtype=torch.float64)


def measure_batches(passes: int) -> list[float]:
    """Return the processor times of batches of photographs, decoded and augmented.

    Each batch is a random choice of photographs. The time of a photograph is the shortest of all
    passes, because other programs make the others longer.
    """
    photographs = JpegFiles(make_jpegs(FOLDER.resolve()))
    shortest = [float("inf")] * len(photographs)
    for _ in range(passes):
        for place in range(len(photographs)):
            began = time.thread_time()
            photographs[place]
            shortest[place] = min(shortest[place], time.thread_time() - began)
    draws = random.Random(0)
    return [sum(draws.choices(shortest, k=BATCH_SIZE)) for _ in range(BATCHES)]


def measure_calls() -> dict[str, list[float]]:
    """Return round trips to an async actor, and the starts of tasks in old and new processes."""
    import ray

    remote: Any = ray.remote

    class Answering:
        async def answer(self, place: int) -> int:
            return place

    def call(actor: Any, calls: int) -> list[float]:
        took = []
        for place in range(calls):
            began = time.monotonic()
            ray.get(actor.answer.remote(place))
            took.append(time.monotonic() - began)
        return took

    def begin(new: bool) -> float:
        if new:
            import torch as loaded  # as in every worker process

            assert loaded is not None
        return time.monotonic()

    with ray_nodes(1) as address:
        ray.init(address, logging_level="ERROR")
        actor = remote(num_cpus=0)(Answering).remote()
        caller, beginner = remote(call), remote(begin)
        ray.get(caller.remote(actor, CALLS // 10))
        calls = ray.get(caller.remote(actor, CALLS))
        starts, new_processes = [], []
        for _ in range(TASKS):
            began = time.monotonic()
            starts.append(ray.get(beginner.remote(False)) - began)
        for number in range(PROCESS_STARTS):
            # No process has this environment, so Ray starts one.
            runtime_env = {"env_vars": {"DPEX_BENCHMARK_START": str(number)}}
            began = time.monotonic()
            new = beginner.options(runtime_env=runtime_env).remote(True)
            new_processes.append(ray.get(new) - began)
    return {"call_s": calls, "task_start_s": starts, "process_start_s": new_processes[1:]}


def measure_epoch(wait_s: float, batches: int) -> dict[str, Any]:
    """Read an epoch whose chunks have one batch each, from a node of this machine.

    Returns:
        ``arrival_s``: for each batch, the time from its end in the worker process to the training
        loop. ``gap_s``: the times between two batches of a worker process. ``thread_ms``: processor
        time of a batch by process and thread, in milliseconds. ``batches_per_s``.
    """
    from dpex import DpexDataLoader

    with ray_nodes(1) as address:
        loader = DpexDataLoader(
            Stamped(batches, wait_s),
            batch_size=1,
            num_workers=WORKERS,
            persistent_workers=True,
            prefetch_bytes=0,
            in_order=False,
            distribute_mode=True,
            head_address=address,
        )
        for _ in loader:  # starts the processes
            pass
        before, began = _thread_times(), time.monotonic()
        arrival_s, read = [], []
        for batch in loader:
            arrival_s.append(time.monotonic() - float(batch[0, 2]))
            read.append(batch[0].tolist())
        seconds = time.monotonic() - began
        spent = {name: after - before[name] for name, after in _thread_times().items()}
        loader.close()
    gap_s = []
    ends: dict[float, float] = {}
    for pid, start, end in sorted(read, key=lambda times: times[1]):
        if pid in ends:
            gap_s.append(start - ends[pid])
        ends[pid] = end
    by_process: dict[str, dict[str, float]] = defaultdict(dict)
    for (process, thread), thread_s in spent.items():
        if thread_s:
            by_process[process][thread] = 1e3 * thread_s / batches
    return {
        "arrival_s": arrival_s,
        "gap_s": gap_s,
        "thread_ms": by_process,
        "batches_per_s": batches / seconds,
    }


def _thread_times() -> Counter[tuple[str, str]]:
    """Return the processor time of this process and of the pipeline actor, by thread's name."""
    times: Counter[tuple[str, str]] = Counter()
    for process in own_processes():
        command = " ".join(process.cmdline())
        if process.pid == os.getpid():
            kind = "training_process"
        elif PROCESSES["pipeline_actor"] in command:
            kind = "pipeline_actor"
        else:
            continue
        for thread in process.threads():
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm")
            try:
                times[kind, name.read_text().strip()] += thread.user_time + thread.system_time
            except FileNotFoundError:
                continue
    return times


def serial(thread_ms: Mapping[str, float]) -> float:
    """Return the time of the threads that may hold the GIL, so that no two of them run at once.

    Python's threads have the name of their process, and Ray names its own threads.
    """
    return sum(ms for name, ms in thread_ms.items() if name.startswith(("python", "ray::")))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of some values, by percent."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {str(percent): ordered[round(percent / 100 * last)] for percent in PERCENTS}


def main() -> None:
    options = arguments(__doc__, "service_times")
    record = describe_machine("service_times")
    record["settings"] = {
        "batch_size": BATCH_SIZE,
        "calls": CALLS,
        "tasks": TASKS,
        "process_starts": PROCESS_STARTS - 1,
        "workers": WORKERS,
        "epochs": EPOCHS,
    }
    times = {"batch_s": measure_batches(options.rounds)}
    say(f"service_times: batches {percentiles(times['batch_s'])}")
    times |= run_fresh(measure_calls, timeout_s=RUN_TIMEOUT_S)
    record["epochs"] = {}
    for name, (wait_s, batches) in EPOCHS.items():
        epoch = run_fresh(measure_epoch, timeout_s=RUN_TIMEOUT_S, wait_s=wait_s, batches=batches)
        for figure in ("arrival_s", "gap_s"):
            epoch[figure] = percentiles(epoch[figure])
        epoch["serial_ms"] = {name: serial(spent) for name, spent in epoch["thread_ms"].items()}
        record["epochs"][name] = epoch
        say(f"service_times: {name} {epoch}")
    record["seconds"] = {name: percentiles(values) for name, values in times.items()}
    write(record, options.out)
    print({name: values["50"] for name, values in record["seconds"].items()})


if __name__ == "__main__":
    main()
