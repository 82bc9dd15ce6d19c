"""A program that injects faults into epochs at random moments, many times: ``make soak``.

Each run has its own cluster. In the middle of the epoch, a process dies or stops, a link fails, or
a store fills up. The program compares the batches, in order and bit for bit, with those of an
undisturbed run. It writes all runs to ``--out``, and ``python -m benchmarks.report`` makes a table
from them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster_programs import processes_in, small_disk, workplace
from cluster_programs.clusters import (
    SMALL_STORE_NODE,
    SPARE_BYTES,
    Cluster,
    little_memory,
    spilled,
)
from cluster_programs.links import network
from cluster_programs.training_process import (
    LENGTH,
    SMALL_STORE,
    TrainingProcess,
    drawn,
    longest_wait,
)

STOPPED_S = 20
# The training process stops for this time, so the object stores fill up.
FILLING_S = 5
DRAIN_S = 3
# Ray ends a process that has not reached the head for a minute.
RAY_ENDS_S = 100
# Options whose last item is a file. The file exists once the fault has happened.
MARKING = {"deadly_read", "deadly_collate", "deadly_transform", "hungry", "endless"}
# Longer than the wait for the first batch, and for the batches before an endless sample.
TIMEOUT_S = 40


@dataclass(frozen=True)
class Outcome:
    """Result of one disturbed run.

    Attributes:
        fault: Name of the fault.
        seed: Seed of the moment and of the shuffle.
        batches: Number of batches compared with the undisturbed run.
        lost: Number of samples that did not arrive.
        doubled: Number of samples that arrived again.
        changed: Number of samples whose content or place differs from the undisturbed run.
        recovery_s: The longest wait for a batch, less that of the undisturbed run.
        error: The error that ended the run; empty if there was none.
    """

    fault: str
    seed: int
    batches: int
    lost: int
    doubled: int
    changed: int
    recovery_s: float
    error: str = ""


Disturb = Callable[[Cluster, TrainingProcess, random.Random], None]


def kill_process(title: str) -> Disturb:
    """Return a fault that kills a random process whose command line starts with ``title``."""

    def disturb(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
        training.go()
        found = [p for p, c in processes_in(cluster.place).items() if c.startswith(title)]
        os.kill(chance.choice(sorted(found)), signal.SIGKILL)

    return disturb


def working_node(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> str:
    """Choose a node, and let the training process continue to a batch from this node."""
    node = chance.choice(sorted(cluster.raylets().keys() - {cluster.head}))
    training.until_from(node)
    return node


def kill_node(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
    """Kill a node's raylet, and with it all processes of the node."""
    node = working_node(cluster, training, chance)
    training.go()
    cluster.signal(node, signal.SIGKILL)


def stop_node(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
    """Stop a node's raylet for some seconds."""
    node = working_node(cluster, training, chance)
    training.go()
    cluster.signal(node, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    cluster.signal(node, signal.SIGCONT)


def drain_node(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
    """Announce that a node will be removed, as a cloud does, and remove it."""
    node = working_node(cluster, training, chance)
    cluster.drain(node, DRAIN_S)
    training.go()
    time.sleep(DRAIN_S)
    if node in cluster.raylets():  # it may have left by itself
        cluster.signal(node, signal.SIGKILL)


def cut_link(seconds: float | None) -> Disturb:
    """Return a fault that cuts a node's link, for some seconds or for good."""

    def disturb(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
        assert cluster.network is not None
        link = cluster.links[working_node(cluster, training, chance)]
        cluster.network.cut(link)
        training.go()
        if seconds is not None:
            time.sleep(seconds)
            cluster.network.repair(link)

    return disturb


def slow_link(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
    """Limit a node's link for good, so that a batch takes about half a second."""
    assert cluster.network is not None
    link = cluster.links[working_node(cluster, training, chance)]
    cluster.network.slow(link, megabits=4)
    training.go()


def stop_training_process(seconds: float) -> Disturb:
    """Return a fault that stops the training process for some seconds."""

    def disturb(_: Cluster, training: TrainingProcess, __: random.Random) -> None:
        training.go()
        training.suspend(seconds)

    return disturb


def run_another_job(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
    """Run an epoch of another training process on the same nodes."""
    other = TrainingProcess(cluster.place, cluster.address, seed=chance.randrange(1000))
    other.until(0)
    training.go()
    other.finish(300)


def kill_head(cluster: Cluster, training: TrainingProcess, chance: random.Random) -> None:
    """Kill the raylet of the head's node, or its GCS server: either ends the training process."""
    cluster.kill_head(chance.choice(["raylet", "gcs_server"]))
    training.go()
    assert training.process.wait(RAY_ENDS_S) != 0, "the epoch was over before"


def wait_in_vain(_: Cluster, training: TrainingProcess, __: random.Random) -> None:
    """Wait for a sample that never arrives: the training loop gets an error that names it."""
    training.go()
    assert training.process.wait(3 * TIMEOUT_S) != 0, "the epoch was over before"
    message = training.said()["timed_out"]
    named = {int(number) for number in re.findall(r"\d+", message.partition("[")[2])}
    assert training.options["endless"][0] in named, message


def nothing(_: Cluster, __: TrainingProcess, ___: random.Random) -> None:
    """Do nothing: the options of the training process cause the fault."""


Options = Callable[[random.Random, Path, list[int]], dict[str, Any]]
"""Function that makes a training process's options, given the indices in their epoch's order."""


def deadly(where: str, what: signal.Signals, *, first_of_batch: bool = False) -> Options:
    """Return a function that makes options for a sample that kills its worker process."""

    def options(chance: random.Random, place: Path, order: list[int]) -> dict[str, Any]:
        mark = place / f"mark-{chance.random()}"
        index = chance.choice(order[::10] if first_of_batch else order)
        return {f"deadly_{where}": [index, int(what), str(mark)]}

    return options


def hungry(chance: random.Random, place: Path, order: list[int]) -> dict[str, Any]:
    """Return options for a sample that allocates more memory than its node allows."""
    return {"hungry": [chance.choice(order), 2 * SPARE_BYTES, str(place / "mark")]}


def endless(chance: random.Random, place: Path, order: list[int]) -> dict[str, Any]:
    """Return options for a sample that never arrives."""
    return {"endless": [chance.choice(order[len(order) * 3 // 4 :]), str(place / "mark")]}


def none(_: random.Random, __: Path, ___: list[int]) -> dict[str, Any]:
    """Return no options."""
    return {}


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: Name in the table.
        disturb: Function that causes the fault in the middle of the epoch.
        options: Function that makes options of the disturbed training process.
        both: Options of the disturbed and of the undisturbed training process.
        node: Options of the nodes.
        variables: Function that makes environment variables of the nodes.
        full_disk: Whether the disk to which the object stores spill has only one megabyte.
        spills: Whether the nodes' object stores must have been full.
        resumes: Whether the fault ends the training process, and another one resumes the epoch on
            another cluster.
        once: Whether the fault takes so long that it runs only once.
        linked: Whether each node needs its own link.
    """

    name: str
    disturb: Disturb = nothing
    options: Options = none
    both: dict[str, Any] = field(default_factory=dict)
    node: tuple[str, ...] = ()
    variables: Callable[[], dict[str, str]] = dict
    full_disk: bool = False
    spills: bool = False
    resumes: bool = False
    once: bool = False
    linked: bool = False


FAULTS = (
    Fault("worker killed in a read", options=deadly("read", signal.SIGKILL)),
    # A batch takes so long that its worker process sends it at once: earlier blocks are in flight.
    Fault(
        "worker killed between two blocks",
        options=deadly("read", signal.SIGKILL, first_of_batch=True),
    ),
    Fault("worker killed in collate_fn", options=deadly("collate", signal.SIGKILL)),
    Fault(
        "worker killed in a separate stage",
        options=deadly("transform", signal.SIGKILL),
        both={"staged": True},
        node=("--num-cpus=2",),
    ),
    Fault("a sample that segfaults, once", options=deadly("read", signal.SIGSEGV)),
    Fault("worker killed at any moment", kill_process("ray::MapBatches")),
    Fault("pipeline actor killed", kill_process("ray::_PipelineActor")),
    Fault("node killed", kill_node),
    Fault(f"node silent for {STOPPED_S} s", stop_node),
    Fault("node drained", drain_node),
    Fault("a node's link cut for 5 s", cut_link(5), linked=True),
    Fault("a node's link cut for 30 s", cut_link(30), linked=True),
    Fault("a node's link cut for good", cut_link(None), linked=True),
    Fault("a node's link of 4 Mbit/s", slow_link, linked=True),
    Fault(
        "a sample that sleeps for ever, resumed after the timeout",
        wait_in_vain,
        options=endless,
        both={"timeout": TIMEOUT_S},
        resumes=True,
    ),
    Fault("another job on the cluster", run_another_job),
    Fault("head killed, resumed on another cluster", kill_head, resumes=True),
    Fault(f"training process stopped for {STOPPED_S} s", stop_training_process(STOPPED_S)),
    Fault("training process stopped for 10 min", stop_training_process(600), once=True),
    Fault(
        "worker killed by Ray for its memory", options=hungry, variables=little_memory, linked=True
    ),
    Fault(
        "object store of 80 MB, batches of 38 MB",
        stop_training_process(FILLING_S),
        both=SMALL_STORE,
        node=SMALL_STORE_NODE,
        spills=True,
    ),
    Fault(
        "object store of 80 MB, batches of 38 MB, disk full",
        stop_training_process(FILLING_S),
        both=SMALL_STORE,
        node=SMALL_STORE_NODE,
        full_disk=True,
        spills=True,
    ),
)


class CannotBeMade(Exception):
    """This user or this machine cannot cause a fault."""


def run(fault: Fault, seed: int) -> Outcome:
    """Run one epoch with a fault and one without, on a new cluster."""
    chance = random.Random(f"{fault.name} {seed}")
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(workplace())
        try:
            links = stack.enter_context(network()) if fault.linked else None
            if fault.full_disk:
                stack.enter_context(small_disk(place / "disk"))
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotBeMade(
                f"which needs root, and the commands ip and mount: {error}"
            ) from None
        spilling: tuple[str, ...] = ()
        if fault.full_disk:
            spilling = (f"--object-spilling-directory={place / 'disk'}",)

        def new_cluster(place: Path) -> Cluster:
            made = Cluster(place, links)
            for _ in range(2):
                made.add(*fault.node, *spilling, **fault.variables())
            return made

        cluster = new_cluster(place)
        both = {"seed": seed, **fault.both}
        # The undisturbed run must not use the nodes with small object stores.
        quiet = stack.enter_context(workplace()) if fault.spills else place
        address = "local" if fault.spills else cluster.address
        expected = TrainingProcess(quiet, address, **both).finish()
        order = [index for _, index, _ in drawn(expected)]
        given = {**both, **fault.options(chance, place, order)}
        if fault.resumes:
            given["checkpoint"] = str(place / "checkpoint")
        # Nodes with several CPUs need not all be used, and another cluster has other nodes.
        workers = sorted(cluster.raylets().keys() - {cluster.head})
        nodes = () if fault.node or fault.resumes else workers
        training = TrainingProcess(place, cluster.address, nodes=nodes, **given)
        if fault.disturb is not nothing:
            training.until(chance.randrange(1, len(order) * 3 // 40))
            fault.disturb(cluster, training, chance)
        if fault.resumes:
            another = new_cluster(stack.enter_context(workplace()))
            training = TrainingProcess(another.place, another.address, **given)
        found = training.finish(300)
        marks = [Path(value[-1]) for name, value in given.items() if name in MARKING]
        assert all(mark.exists() for mark in marks), "nothing befell it"
        assert not fault.spills or spilled(place), "the object stores had space for everything"
    wanted, got = drawn(expected), drawn(found)
    indices = [index for _, index, _ in got]
    return Outcome(
        fault.name,
        seed,
        len({batch for batch, *_ in got}),
        len({index for _, index, _ in wanted} - set(indices)),
        len(indices) - len(set(indices)),
        sum(a != b for a, b in zip(wanted, got, strict=False)),
        max(0.0, longest_wait(found, training.suspended) - longest_wait(expected)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults, each many times.")
    parser.add_argument("--runs", type=int, default=10, help="of each fault")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--more", action="store_true", help="keep the runs that are there")
    parser.add_argument("--out", type=Path, required=True, help="the record, JSON")
    options = parser.parse_args()
    names = {fault.name: place for place, fault in enumerate(FAULTS)}
    outcomes: list[Outcome] = []
    if (options.only or options.more) and options.out.exists():
        known = [Outcome(**record) for record in json.loads(options.out.read_text())]
        outcomes += [o for o in known if options.more or options.only not in o.fault]
    there = {(outcome.fault, outcome.seed) for outcome in outcomes}
    for seed in range(options.runs):
        for fault in FAULTS:
            if options.only not in fault.name or (fault.once and seed):
                continue
            if (fault.name, seed) in there:
                continue
            try:
                outcomes.append(run(fault, seed))
            except CannotBeMade as error:
                print(f"{fault.name}: skipped, {error}", flush=True)
                continue
            except Exception as error:  # an error in one run must not stop the others
                outcomes.append(Outcome(fault.name, seed, 0, LENGTH, 0, 0, 0.0, repr(error)))
            print(outcomes[-1], flush=True)
            outcomes.sort(key=lambda o: (o.seed, names.get(o.fault, -1)))
            records = [asdict(outcome) for outcome in outcomes]
            # Write after each run: the program may be stopped.
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(records, indent=1) + "\n")
    if any(outcome.lost or outcome.doubled or outcome.changed for outcome in outcomes):
        raise SystemExit("an epoch was not what it is without the fault")


if __name__ == "__main__":
    main()
