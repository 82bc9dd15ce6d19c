"""Tests of clusters of several nodes: which nodes make batches, and nodes that come and go."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_programs import processes_in, workplace
from cluster_programs.clusters import Cluster
from cluster_programs.training_process import LENGTH, Drawn, TrainingProcess, drawn, nodes_in

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


DRAIN_SECONDS = 2
# Ray ends a process that has lost its raylet, and one that has not reached the head for a minute.
RAYLET_LOST_SECONDS = 30
HEAD_LOST_SECONDS = 100
# A process that has lost its local Ray ends sooner.
LOCAL_RAY_ENDS_SECONDS = 30
# An epoch this many times as long takes a logical worker several task leases.
SEVERAL_LEASES = 4


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


@pytest.fixture(scope="module")
def cluster(place: Path) -> Cluster:
    """Start a head without CPUs, and a node that stays while the tests add others."""
    cluster = Cluster(place)
    cluster.add("--labels=kind=lasting", '--resources={"lasting": 100}')
    return cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Drawn]:
    result = TrainingProcess(cluster.place, cluster.address).finish()
    stream = drawn(result)
    assert sorted(index for _, index, _ in stream) == list(range(LENGTH))
    assert len({draw for *_, draw in stream}) == LENGTH
    assert cluster.head not in nodes_in(result), "the training process's node has no CPU to give"
    return stream


def test_a_node_that_is_killed_changes_nothing(cluster: Cluster, undisturbed: list[Drawn]) -> None:
    victim = cluster.add()
    training = TrainingProcess(cluster.place, cluster.address, nodes=[victim])
    training.until_from(victim)
    cluster.signal(victim, signal.SIGKILL)
    cluster.wait_until_gone(victim)
    training.go()
    assert drawn(training.finish()) == undisturbed


@pytest.mark.parametrize("where", ["between two blocks", "collate", "transform"])
def test_a_worker_that_is_killed_changes_nothing(
    cluster: Cluster, undisturbed: list[Drawn], where: str
) -> None:
    with workplace() as place:
        mark = place / "mark"
        # First of a batch in mid-epoch, which is read once the batch before it is handed over.
        _, index, _ = undisturbed[LENGTH // 2]
        option = "deadly_read" if where == "between two blocks" else f"deadly_{where}"
        fault = {option: (index, signal.SIGKILL, str(mark)), "staged": where == "transform"}
        added = cluster.add("--num-cpus=2")
        training = TrainingProcess(cluster.place, cluster.address, **fault)
        assert drawn(training.finish()) == undisturbed
        assert mark.exists()
        cluster.signal(added, signal.SIGTERM)
        cluster.wait_until_gone(added)


def test_a_node_that_joins_is_used_in_the_same_epoch(cluster: Cluster) -> None:
    # The second one only shows what an undisturbed epoch delivers.
    both = [
        TrainingProcess(cluster.place, cluster.address, length=10 * LENGTH, seconds=seconds)
        for seconds in (0.01, 0)
    ]
    both[0].until(10)
    added = cluster.add("--num-cpus=2")
    both[0].until_from(added)
    streams = [drawn(training.finish()) for training in both]
    assert streams[0] == streams[1]
    cluster.signal(added, signal.SIGTERM)
    cluster.wait_until_gone(added)


def test_a_node_that_is_drained_changes_nothing(cluster: Cluster, undisturbed: list[Drawn]) -> None:
    leaving = cluster.add()
    training = TrainingProcess(cluster.place, cluster.address, nodes=[leaving])
    training.until_from(leaving)
    cluster.drain(leaving, DRAIN_SECONDS)
    time.sleep(DRAIN_SECONDS)  # until the deadline of the drain
    if leaving in cluster.raylets():  # the node may have ended by itself
        cluster.signal(leaving, signal.SIGKILL)
    assert drawn(training.finish()) == undisturbed
    cluster.wait_until_gone(leaving)


@pytest.mark.parametrize(
    "options",
    [
        {"label_selector": {"kind": "!training"}},
        {"resources": {"lasting": 1}},
    ],
    ids=["label", "resource"],
)
def test_nodes_are_chosen_by_label_or_resource(
    cluster: Cluster, undisturbed: list[Drawn], options: dict[str, object]
) -> None:
    other = cluster.add("--num-cpus=4", "--num-gpus=1", "--labels=kind=training")
    result = TrainingProcess(cluster.place, cluster.address, worker_options=options).finish()
    assert drawn(result) == undisturbed
    assert nodes_in(result).isdisjoint({other, cluster.head})
    cluster.signal(other, signal.SIGTERM)
    cluster.wait_until_gone(other)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_stage_runs_on_the_nodes_that_it_selects(
    cluster: Cluster, undisturbed: list[Drawn], gpus: int
) -> None:
    other = cluster.add("--num-cpus=2", f"--num-gpus={gpus}", "--labels=kind=selected")
    unwanted = cluster.add("--num-cpus=1", "--num-gpus=3")
    stage = {"label_selector": {"kind": "selected"}, "num_gpus": gpus}
    result = TrainingProcess(
        cluster.place,
        cluster.address,
        worker_options={"label_selector": {"kind": "!selected"}},
        stamped=stage,
    ).finish()
    assert drawn(result) == undisturbed
    assert nodes_in(result) == {other}
    for node in (other, unwanted):
        cluster.signal(node, signal.SIGTERM)
        cluster.wait_until_gone(node)


def nodes_of_one_worker(cluster: Cluster, options: dict[str, Any]) -> list[str]:
    """Return the node of each sample of an epoch of one logical worker, in several leases."""
    length = SEVERAL_LEASES * LENGTH
    alone = TrainingProcess(
        cluster.place, cluster.address, num_workers=1, worker_options=options, length=length
    )
    return [node for *_, node in alone.finish()["samples"]]


@pytest.mark.long
def test_preferred_nodes_come_first_and_others_where_these_are_busy(cluster: Cluster) -> None:
    other = cluster.add("--num-cpus=4", "--labels=kind=spare")
    options = {
        "label_selector": {"kind": "lasting"},  # has one CPU
        "fallback_strategy": [{"label_selector": {"kind": "spare"}}],
    }
    nodes = nodes_of_one_worker(cluster, options)
    # Another process's task may still have the preferred CPU. Then the other node has one lease.
    assert nodes.count(other) < len(nodes) / 4
    # Long enough for the first worker process of a node to import torch.
    several = TrainingProcess(
        cluster.place, cluster.address, worker_options=options, length=50 * LENGTH
    )
    several.until_from(other)
    several.process.kill()
    cluster.signal(other, signal.SIGTERM)
    cluster.wait_until_gone(other)


@pytest.mark.long
@pytest.mark.parametrize("first", ["yes", "!yes"])
def test_the_training_process_s_node_comes_first_or_last(first: str) -> None:
    then = {"yes": "!yes", "!yes": "yes"}[first]
    options = {
        "label_selector": {"training": first},
        "fallback_strategy": [{"label_selector": {"training": then}}],
    }
    with workplace() as place:
        cluster = Cluster(place, head_options=("--num-cpus=2", "--labels=training=yes"))
        other = cluster.add("--num-cpus=2")
        nodes = nodes_of_one_worker(cluster, options)
        at_home = nodes.count(cluster.head)
        assert (at_home > len(nodes) / 2) == (first == "yes"), at_home
        # Long enough for the first worker process of a node to import torch.
        several = TrainingProcess(
            place, cluster.address, worker_options=options, length=50 * LENGTH
        )
        several.until_from(cluster.head)
        several.until_from(other)


@pytest.mark.long
def test_two_jobs_on_one_cluster_do_not_disturb_one_another(
    cluster: Cluster, undisturbed: list[Drawn]
) -> None:
    both = [TrainingProcess(cluster.place, cluster.address) for _ in range(2)]
    for training in both:
        training.until(0)
    for training in both:
        training.go()
    for training in both:
        assert drawn(training.finish()) == undisturbed


@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        pytest.param("raylet", RAYLET_LOST_SECONDS, marks=pytest.mark.long),
        ("gcs_server", HEAD_LOST_SECONDS),
    ],
)
def test_a_training_process_that_loses_its_ray_ends_and_resumes_with_another(
    what: str, seconds: float, cluster: Cluster, undisturbed: list[Drawn]
) -> None:
    with workplace() as place:
        checkpoint = str(place / "checkpoint")
        with workplace() as lost:
            ray = Cluster(lost)
            ray.add()
            training = TrainingProcess(lost, ray.address, checkpoint=checkpoint)
            training.until(20)
            ray.kill_head(what)
            assert training.process.wait(seconds) != 0
        again = TrainingProcess(place, cluster.address, checkpoint=checkpoint).finish()
    assert drawn(again) == undisturbed
    assert len(again["waits"]) == LENGTH // 10 - 21


@pytest.mark.parametrize("what", [pytest.param("raylet", marks=pytest.mark.long), "gcs_server"])
def test_a_training_process_that_loses_its_local_ray_learns_of_it(what: str) -> None:
    with workplace() as place:
        training = TrainingProcess(place, "local", length=50 * LENGTH)
        training.until(20)
        [pid] = [p for p, c in processes_in(place).items() if c.split()[0].endswith(f"/{what}")]
        os.kill(pid, signal.SIGKILL)
        training.go()
        assert training.process.wait(LOCAL_RAY_ENDS_SECONDS) != 0


def test_a_training_process_that_is_killed_takes_nothing_with_it(
    cluster: Cluster, undisturbed: list[Drawn]
) -> None:
    killed, other = (TrainingProcess(cluster.place, cluster.address) for _ in range(2))
    for training in (killed, other):
        training.until(20)
    killed.process.kill()
    assert drawn(other.finish()) == undisturbed
