"""The benchmark ``training_speed``: epoch time, with light, medium and heavy preprocessing.

It also measures the share of time that the training loop waits. torch has one machine with four
workers, and dpex has 1, 2, 4 and 8 nodes with four tasks each. ``benchmarks/training_loops.py``
explains step and preprocessing. ``benchmarks/nodes.py`` explains the nodes, and when a figure is
void. In a second part, both loaders use the cores of this machine, and only the step is simulated.
"""

import sys
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal, worst
from benchmarks.harness import arguments, describe_machine, summarise, write
from benchmarks.nodes import TASKS_PER_NODE, busy_note, count_of
from benchmarks.plots import lines
from benchmarks.training_loops import (
    PHOTOGRAPH_BATCH_SIZE,
    PHOTOGRAPH_SIZE,
    PHOTOGRAPH_STEPS,
    STEP_S,
    WAIT_S,
    WAITING_BATCH_SIZE,
    WAITING_STEPS,
    Run,
    on_nodes,
    on_one_node,
    on_own_cores,
)

NODES = (1, 2, 4, 8)
RUN_TIMEOUT_S = 3_600
GOAL_OVER_LEAST = 1.1
GOAL_OVER_TORCH = 1.05


def main() -> None:
    options = arguments(__doc__, "training_speed", ["--rounds", "2", *sys.argv[1:]])
    record = describe_machine("training_speed")
    record["settings"] = {
        "step_s": STEP_S,
        "step": "matrix products on a GPU" if torch.cuda.is_available() else "sleep",
        "nodes": NODES,
        "tasks_per_node": TASKS_PER_NODE,
        "wait_s": WAIT_S,
        "waiting_batch_size": WAITING_BATCH_SIZE,
        "waiting_steps": WAITING_STEPS,
        "photograph_size": PHOTOGRAPH_SIZE,
        "photograph_batch_size": PHOTOGRAPH_BATCH_SIZE,
        "photograph_steps": PHOTOGRAPH_STEPS,
        "num_workers": options.workers,
    }
    rounds = {"timeout_s": RUN_TIMEOUT_S, "rounds": options.rounds}
    waiting = {
        f"torch, 1 node, {TASKS_PER_NODE} workers": run_fresh(
            on_one_node, workers=TASKS_PER_NODE, **rounds
        )
    }
    for nodes in NODES:
        waiting[dpex_on(nodes)] = run_fresh(on_nodes, nodes=nodes, **rounds)
    by_kind = {
        kind: run_fresh(on_own_cores, kind=kind, workers=options.workers, **rounds)
        for kind in PHOTOGRAPH_SIZE
    }
    working = {
        f"{peer}, {options.workers} workers": {kind: by_kind[kind][peer] for kind in by_kind}
        for peer in ("torch", "dpex")
    }
    record["waiting"] = {name: sum_up(runs) for name, runs in waiting.items()}
    record["working"] = {name: sum_up(runs) for name, runs in working.items()}
    goals = goals_of_runs({nodes: waiting[dpex_on(nodes)]["heavy"] for nodes in NODES}, by_kind)
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    lines(
        options.out.with_suffix(".svg"),
        f"Time of an epoch of {WAITING_STEPS} steps of {STEP_S} s, samples that wait",
        NODES,
        {
            f"{kind}, {wait_s * 1e3:g} ms a sample": [
                record["waiting"][dpex_on(nodes)][kind]["seconds"]["median"] for nodes in NODES
            ]
            for kind, wait_s in WAIT_S.items()
        },
        f"nodes, {TASKS_PER_NODE} tasks each",
        "s",
    )
    for goal in goals:
        print(f"{goal.what}: {goal.figure}, goal {goal.bound}; {goal.note}")


def dpex_on(nodes: int) -> str:
    """Return the name of dpex's row."""
    return f"dpex, {count_of(nodes)}, {nodes * TASKS_PER_NODE} tasks"


def sum_up(by_kind: dict[str, list[Run]]) -> dict[str, Any]:
    """Summarise the epochs of each kind of preprocessing."""
    figures = ("seconds", "waiting_share", "busy_percent")
    return {
        kind: {"runs": runs} | {name: summarise([run[name] for run in runs]) for name in figures}
        for kind, runs in by_kind.items()
    }


def least_s(wait_s: float, workers: int) -> float:
    """Return a lower bound of an epoch's time.

    All workers start with a batch each, so the first batch arrives after the time of one batch.
    After that, either the steps or the workers determine the rate. In the second case, one step
    follows the last batch.
    """
    batch_s = wait_s * WAITING_BATCH_SIZE
    return max(batch_s + WAITING_STEPS * STEP_S, WAITING_STEPS * batch_s / workers + STEP_S)


def goals_of_runs(
    heavy: dict[int, list[Run]], by_kind: dict[str, dict[str, list[Run]]]
) -> list[Goal]:
    """Return the goals for both kinds of samples.

    Args:
        heavy: The epochs of heavy samples that wait, for each number of nodes.
        by_kind: The epochs of each kind of photographs, for each loader.
    """
    sizes = {kind: "x".join(map(str, size)) for kind, size in PHOTOGRAPH_SIZE.items()}
    return [
        worst({count_of(nodes): over_least(nodes, runs) for nodes, runs in heavy.items()}),
        worst({sizes[kind]: over_torch(runs) for kind, runs in by_kind.items()}),
    ]


def over_least(nodes: int, runs: list[Run]) -> Goal:
    """Return the goal for the time of heavy preprocessing, divided by its lower bound."""
    least = least_s(WAIT_S["heavy"], nodes * TASKS_PER_NODE)
    busy = max(run["busy_percent"] for run in runs)
    return Goal.of(
        "nodes",
        "training_speed, samples that wait: time of an epoch over what waiting allows, "
        f"{NODES[0]} to {NODES[-1]} nodes",
        [run["seconds"] / least for run in runs],
        "<=",
        GOAL_OVER_LEAST,
        "ratio",
        f"waiting allows {least:.1f} s; waits {waiting_percent(runs)}; {busy_note(busy)}",
    )


def over_torch(runs: dict[str, list[Run]]) -> Goal:
    """Return the goal for the time with dpex, divided by that with torch, round by round."""
    ours, theirs = runs["dpex"], runs["torch"]
    return Goal.of(
        "throughput",
        "training_speed, photographs: time of an epoch, dpex/torch",
        [mine["seconds"] / other["seconds"] for mine, other in zip(ours, theirs, strict=True)],
        "<=",
        GOAL_OVER_TORCH,
        "ratio",
        f"waits {waiting_percent(ours)}, torch {waiting_percent(theirs)}",
    )


def waiting_percent(runs: list[Run]) -> str:
    """Return the median share of waiting time as text."""
    share = summarise([run["waiting_share"] for run in runs])["median"]
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    main()
