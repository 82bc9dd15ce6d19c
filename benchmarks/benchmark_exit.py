"""The benchmark ``exit``: time of a whole program of eight batches, and of its end by Ctrl-C.

A program of eight batches of small pictures runs from the start of its process to the end of all
processes that it has started. Another program reads four of them and waits. The benchmark sends
SIGINT to it, as a terminal does, and measures until all its processes have ended. Each run has a
fresh process, and no other run beside it. The first round only fills the page cache.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict

import psutil

from benchmarks.fresh import END_TIMEOUT_S, MARK, RUN_TIMEOUT_S, STARTED_S, processes_of
from benchmarks.goals import Goal
from benchmarks.harness import arguments, describe_machine, say, spread, summarise, write
from benchmarks.plots import bars
from benchmarks.start_up import WAITS

PEERS = ("torch fork", "dpex", "local")
BATCH_SIZE = 50
# What is measured: a program that ends by itself, and Ctrl-C in another one.
ENDS = {"program": "whole program", "ctrl-c": "Ctrl-C to the end"}
GOAL_LATER_S = 0.2


def run(peer: str, workers: int, end: str) -> float:
    """Run a program, and return the seconds of what is measured."""
    mark = uuid.uuid4().hex
    call = f"eight_batches({peer!r}, {BATCH_SIZE}, {workers}, {end == 'ctrl-c'})"
    started = time.monotonic()
    program = subprocess.Popen(
        [sys.executable, "-c", f"from benchmarks.start_up import eight_batches; {call}"],
        env=os.environ | {MARK: mark, STARTED_S: str(started)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    if end == "ctrl-c":
        if not any(line.strip() == WAITS for line in program.stdout):
            raise RuntimeError(f"the program of {peer} ended before Ctrl-C")
        started = time.monotonic()
        os.killpg(program.pid, signal.SIGINT)
    status = program.wait(RUN_TIMEOUT_S)
    if (status == 0) != (end == "program"):
        raise RuntimeError(f"the program of {peer} ended with status {status}")
    _, alive = psutil.wait_procs(processes_of(mark), timeout=END_TIMEOUT_S)
    if alive:
        raise RuntimeError(f"processes of {peer} do not end: {alive}")
    return time.monotonic() - started


def main() -> None:
    options = arguments(__doc__, "exit", ["--rounds", "5", *sys.argv[1:]])
    record = describe_machine("exit")
    record["settings"] = {"num_workers": options.workers, "batch_size": BATCH_SIZE}
    seconds: dict[str, dict[str, list[float]]] = {end: {peer: [] for peer in PEERS} for end in ENDS}
    for round_number in range(options.rounds + 1):
        for end, by_peer in seconds.items():
            for peer, found in by_peer.items():
                found.append(run(peer, options.workers, end))
                say(f"exit round {round_number}/{options.rounds} {end} {peer}: {found[-1]:.2f} s")
    counted = {
        end: {peer: found[1:] for peer, found in by_peer.items()}
        for end, by_peer in seconds.items()
    }
    record["seconds"] = {
        end: {peer: summarise(found) for peer, found in by_peer.items()}
        for end, by_peer in counted.items()
    }
    goals = [
        Goal.of(
            "latency",
            f"eight batches, {what}: dpex later than torch fork",
            [
                ours - theirs
                for ours, theirs in zip(
                    counted[end]["dpex"], counted[end]["torch fork"], strict=True
                )
            ],
            "<=",
            GOAL_LATER_S,
            "seconds",
            ", ".join(f"{peer} {spread(record['seconds'][end][peer])} s" for peer in PEERS),
        )
        for end, what in ENDS.items()
    ]
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"A program of eight batches, {options.workers} workers",
        {f"{peer}, {ENDS[end]}": found for end in ENDS for peer, found in counted[end].items()},
        "s",
    )
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


if __name__ == "__main__":
    main()
