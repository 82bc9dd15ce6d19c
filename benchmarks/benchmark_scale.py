"""The benchmark ``scale``: samples per second on 1 to 8 nodes, with four tasks on each.

Samples wait and compute nothing. ``benchmarks/nodes.py`` explains the nodes, and when a figure is
void.
"""

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
from torch.utils.data import DistributedSampler

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal, Subject, worst
from benchmarks.harness import arguments, describe_machine, say, summarise, write
from benchmarks.nodes import (
    TASKS_PER_NODE,
    Waiting,
    busy_note,
    count_of,
    ray_nodes,
    readers_of,
)
from benchmarks.plots import scaling

NODES = (1, 2, 4, 8)
WAIT_S = 0.1
# Samples per second of a node, if its tasks never wait for anything but their samples.
IDEAL_OF_A_NODE = TASKS_PER_NODE / WAIT_S
BATCH_SIZE = 16
# In each epoch. At its end, tasks wait for the last task, for at most one batch each.
BATCHES_PER_TASK = 40
EPOCHS = 2
RUN_TIMEOUT_S = 900
SAMPLER_INDICES = 20_000_000
GOAL_OF_LINEAR = 0.95
GOAL_DRIVER = 1.2
# By process: the subject and the name of its goal.
PROCESSES: dict[str, tuple[Subject, str]] = {
    "training_process": ("training process", "training process"),
    "pipeline_actor": ("nodes", "pipeline actor"),
}


def measure(nodes: int, short_turns: bool) -> list[dict[str, Any]]:
    """Read epochs from a cluster, once all tasks have started.

    Args:
        nodes: Number of nodes.
        short_turns: Whether each epoch is followed by one in which every task makes one chunk.

    Returns:
        The figures of each epoch. ``readers`` is the number of worker processes that delivered, and
        ``tasks`` the number of tasks that started. ``training_process_s``, ``pipeline_actor_s``,
        ``head_s`` (Ray's head) and ``raylets_s`` are processor seconds. ``place_s`` is the time of
        the epoch, times the number of tasks that can run at once. ``turn_s`` is the length of a
        task lease. ``busy_percent`` is the load of the machine.
    """
    from benchmarks.ray_processes import Scheduler, spent_s
    from dpex import DpexDataLoader

    tasks = TASKS_PER_NODE * nodes
    epochs = []
    with ray_nodes(nodes) as address:
        loader = DpexDataLoader(
            Waiting(tasks * BATCHES_PER_TASK * BATCH_SIZE, WAIT_S),
            batch_size=BATCH_SIZE,
            num_workers=tasks,
            persistent_workers=True,
            distribute_mode=True,
            head_address=address,
        )
        while len(readers_of(loader)) < tasks:  # until all tasks have started
            pass
        turns = Scheduler(loader)
        usual_s = turns.length_s
        for turn_s in (usual_s, 0.0) * EPOCHS if short_turns else (usual_s,) * EPOCHS:
            turns.length_s = turn_s
            psutil.cpu_percent()
            begun, spent = turns.begun, spent_s()
            training_process_s, began = time.process_time(), time.perf_counter()
            readers = readers_of(loader)
            seconds = time.perf_counter() - began
            training_process_s = time.process_time() - training_process_s
            epochs.append(
                {
                    "samples_per_s": tasks * BATCHES_PER_TASK * BATCH_SIZE / seconds,
                    "readers": len(readers),
                    "training_process_s": training_process_s,
                    **{f"{kind}_s": after - spent[kind] for kind, after in spent_s().items()},
                    "batches": tasks * BATCHES_PER_TASK,
                    "tasks": turns.begun - begun,
                    "place_s": tasks * seconds,
                    "turn_s": turn_s,
                    "busy_percent": psutil.cpu_percent(),
                }
            )
        loader.close()
    return epochs


def measure_sampler(indices: int) -> dict[str, float]:
    """Return the cost of one rank's shuffled ``DistributedSampler`` for each index of the dataset.

    Returns:
        ``s_per_index`` and ``bytes_per_index``.
    """
    sampler = DistributedSampler[int](range(indices), num_replicas=2, rank=0)  # type: ignore[arg-type]
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    drawn = iter(sampler)
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    next(drawn)
    return {"s_per_index": seconds / indices, "bytes_per_index": grown / indices}


def costs_of_a_task(epochs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compare epochs in which each task makes one chunk with the usual epochs before them.

    Returns:
        The cost of each additional task. ``pipeline_actor_ms``, ``head_ms`` (Ray's head) and
        ``raylets_ms`` (all raylets) are processor time. ``place_ms`` is the time for which the CPU
        of a task is idle. ``turn_s`` is the usual length of a task lease, and ``tasks`` the number
        of additional tasks.
    """
    usual, short = epochs[::2], epochs[1::2]

    def more(name: str) -> float:
        return sum(figures(short, name)) - sum(figures(usual, name))

    kinds = ("pipeline_actor", "head", "raylets", "place")
    costs = {f"{kind}_ms": 1e3 * more(f"{kind}_s") / more("tasks") for kind in kinds}
    return {**costs, "turn_s": usual[0]["turn_s"], "tasks": more("tasks")}


def main() -> None:
    options = arguments(__doc__, "scale", ["--rounds", "1", *sys.argv[1:]])
    record = describe_machine("scale")
    record["settings"] = {
        "nodes": NODES,
        "tasks_per_node": TASKS_PER_NODE,
        "wait_s": WAIT_S,
        "batch_size": BATCH_SIZE,
        "batches_per_task": BATCHES_PER_TASK,
    }
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    both_turns: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for nodes in NODES:
            last = nodes == NODES[-1]
            epochs = run_fresh(measure, timeout_s=RUN_TIMEOUT_S, nodes=nodes, short_turns=last)
            both_turns += epochs if last else []
            runs[nodes] += [epoch for epoch in epochs if epoch["turn_s"]]
            say(f"scale round {number + 1}/{options.rounds}, {nodes} nodes: {runs[nodes][-1]}")
    record["runs"] = runs
    record["short_turns"] = both_turns[1::2]
    record["task"] = costs_of_a_task(both_turns)
    record["sampler"] = {
        "indices": SAMPLER_INDICES,
        **run_fresh(measure_sampler, indices=SAMPLER_INDICES),
    }
    record["samples_per_s"] = {n: summarise(figures(runs[n], "samples_per_s")) for n in NODES}
    record["busy_percent"] = {n: summarise(figures(runs[n], "busy_percent")) for n in NODES}
    for process in PROCESSES:
        record[f"{process}_ms_per_batch"] = {n: summarise(ms(runs[n], process)) for n in NODES}
    goals = goals_of_runs(runs)
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    scaling(json.loads(options.out.read_text()), options.out.with_suffix(".svg"))
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


def goals_of_runs(runs: Mapping[int, Sequence[dict[str, Any]]]) -> list[Goal]:
    """Return the goals for the rate and for the processor time of a batch.

    Args:
        runs: The epochs of each number of nodes.
    """
    rates = {
        count_of(nodes): Goal.of(
            "nodes",
            f"scale: samples/s of what waiting allows, {NODES[0]} to {NODES[-1]} nodes",
            [rate / (nodes * IDEAL_OF_A_NODE) for rate in figures(runs[nodes], "samples_per_s")],
            ">=",
            GOAL_OF_LINEAR,
            "ratio",
            busy_note(max(figures(runs[nodes], "busy_percent"))),
        )
        for nodes in NODES
    }
    goals = [worst(rates)]
    for process, (subject, name) in PROCESSES.items():
        least, most = ms(runs[NODES[0]], process), ms(runs[NODES[-1]], process)
        goals.append(
            Goal.of(
                subject,
                f"{name}'s processor time a batch, {NODES[-1]} nodes / {NODES[0]}",
                [many / few for many, few in zip(most, least, strict=True)],
                "<=",
                GOAL_DRIVER,
                "ratio",
                f"{sum(least) / len(least):.2f} ms with {NODES[0]}",
            )
        )
    return goals


def figures(epochs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return one figure of each epoch."""
    return [float(epoch[name]) for epoch in epochs]


def ms(epochs: Sequence[dict[str, Any]], process: str) -> list[float]:
    """Return a process's processor time for a batch in each epoch, in milliseconds."""
    return [1e3 * epoch[f"{process}_s"] / epoch["batches"] for epoch in epochs]


if __name__ == "__main__":
    main()
