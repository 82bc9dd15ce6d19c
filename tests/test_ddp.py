"""Tests of ranks of a launcher: each reads the shard that torch gives it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cluster_programs import (
    PROGRAM_SECONDS,
    PROGRAMS,
    deepspeed,
    processes_in,
    rank_variables,
    torchrun,
    wait_until,
    workplace,
)
from cluster_programs.clusters import Cluster
from cluster_programs.training_process import LENGTH, TrainingProcess
from ddp_program import CASES, EPOCHS, NUM_WORKERS
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

pytestmark = [
    pytest.mark.timeout(PROGRAM_SECONDS + 60),
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

GONE_SECONDS = 60
# Time in which a rank reads the rest after another rank has been killed.
END_SECONDS = 150


@dataclass(frozen=True)
class Launch:
    """How the ranks are started.

    Attributes:
        launcher: Function that runs a program in several ranks.
        ranks: Number of ranks.
        nodes: Options of the nodes of their cluster, of which the first is the head; without any,
            each rank starts worker processes.
        address: The ranks' ``head_address``; the cluster's own address if None.
        cases: Number of ``CASES`` that each rank reads.
    """

    launcher: Callable[..., subprocess.CompletedProcess[str]] = torchrun
    ranks: int = 2
    nodes: tuple[str, ...] = ()
    address: str | None = "auto"
    cases: int = len(CASES)


LAUNCHES = [
    pytest.param(Launch(), id="2 ranks"),
    pytest.param(Launch(ranks=3), id="3 ranks", marks=pytest.mark.extended),
    pytest.param(Launch(ranks=4), id="4 ranks", marks=[pytest.mark.extended, pytest.mark.long]),
    pytest.param(
        Launch(deepspeed),
        id="2 ranks of DeepSpeed's launcher",
        marks=[
            pytest.mark.extended,
            pytest.mark.skipif(
                importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
            ),
        ],
    ),
    pytest.param(
        Launch(nodes=("--num-cpus=2",), cases=1), id="2 ranks on the Ray of `ray start --head`"
    ),
    pytest.param(
        Launch(ranks=3, nodes=("--num-cpus=2",)),
        id="3 ranks on the Ray of `ray start --head`",
        marks=pytest.mark.extended,
    ),
    pytest.param(
        Launch(nodes=("--num-cpus=0", "--num-cpus=2", "--num-cpus=2"), address=None),
        id="2 ranks on a cluster",
        marks=pytest.mark.extended,
    ),
]


def started(place: Path, head: str, *others: str) -> Cluster:
    """Start a cluster with the given options of its nodes."""
    cluster = Cluster(place, head_options=(head,))
    for options in others:
        cluster.add(options)
    return cluster


@pytest.fixture(scope="module", params=LAUNCHES)
def launch(request: pytest.FixtureRequest) -> Launch:
    launch: Launch = request.param
    return launch


@pytest.fixture(scope="module")
def reports(launch: Launch) -> Iterator[list[dict[str, Any]]]:
    """Yield the report of each rank, and then wait until their worker processes have ended."""
    with workplace() as place:
        address, variables = launch.address or "", {}
        if launch.nodes:
            cluster = started(place, *launch.nodes)
            address, variables = launch.address or cluster.address, cluster.variables
        run = launch.launcher(
            *(PROGRAMS / "ddp_program.py", str(place), address, str(launch.cases)),
            ranks=launch.ranks,
            place=place,
            seconds=PROGRAM_SECONDS,
            **variables,
        )
        assert run.returncode == 0, run.stdout
        yield [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(launch.ranks)]
        if not launch.nodes:
            wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the processes")


def test_ranks_share_the_ray_that_runs_or_use_none(
    launch: Launch, reports: list[dict[str, Any]]
) -> None:
    rays = [report["ray"] for report in reports]
    assert len({report["pid"] for report in reports}) == launch.ranks
    if launch.nodes:
        assert len({ray["address"] for ray in rays}) == 1
        assert len({ray["node"] for ray in rays}) == 1
        assert len({ray["job"] for ray in rays}) == launch.ranks
    else:
        assert rays == [None] * launch.ranks


def test_every_rank_has_worker_processes_of_its_own(
    launch: Launch, reports: list[dict[str, Any]]
) -> None:
    workers = [pid for report in reports for pid, _ in report["workers"]]
    assert len(set(workers)) == len(workers)
    for report in reports:
        assert report["pid"] not in workers
        if not launch.nodes:  # as many as torch starts, however many ranks share the cores
            assert len(report["workers"]) == NUM_WORKERS
            assert {parent for _, parent in report["workers"]} == {report["pid"]}


def test_ranks_come_and_give_up_when_they_like(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["after_breaks"]["dpex"] == report["after_breaks"]["torch"]


def test_every_rank_gets_what_torch_gives_it(launch: Launch, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["streams"]) == 2 * launch.cases
        for stream in report["streams"]:
            assert stream["dpex"] == stream["torch"], stream
            assert len(stream["dpex"]) == EPOCHS


def test_shards_are_disjoint_and_complete(reports: list[dict[str, Any]]) -> None:
    for streams in zip(*(report["streams"] for report in reports), strict=True):
        check_shards(streams)


def check_shards(streams: tuple[dict[str, Any], ...]) -> None:
    """Check the shards of all ranks in one case."""
    ranks, first = len(streams), streams[0]
    length, batch_size = first["length"], first["batch_size"]
    orders = []
    for epoch in range(EPOCHS):
        shards = [
            list(chain.from_iterable(indices for indices, _ in stream["dpex"][epoch]))
            for stream in streams
        ]
        assert len({len(shard) for shard in shards}) == 1
        counts = Counter(chain.from_iterable(shards))
        assert set(counts) <= set(range(length))
        if first["drop_last"]:
            # Samples that do not fill a batch of every rank are dropped, and no sample repeats.
            assert len(shards[0]) == length // ranks // batch_size * batch_size
            assert max(counts.values(), default=1) == 1
        else:
            # A rank that lacks one sample repeats a sample of another rank.
            assert set(counts) == set(range(length))
            assert counts.total() == -(-length // ranks) * ranks
        orders.append(shards)
    if length // ranks >= batch_size:
        assert orders[0] != orders[1], "set_epoch changed nothing"


def torchs(rank: int) -> list[list[int]]:
    """Return torch's batches of indices for a rank of ``epoch_program.py``."""
    sampler = DistributedSampler(range(LENGTH), 2, rank)
    return list(DataLoader(range(LENGTH), 10, sampler=sampler, collate_fn=list))


@pytest.mark.extended
@pytest.mark.parametrize("dying", [0, 1], ids=["the first dies", "the late one dies"])
def test_a_rank_that_is_killed_takes_nothing_from_the_other(dying: int) -> None:
    with workplace() as place:
        started(place, "--num-cpus=2")
        ranks = []
        for number in range(2):
            ranks.append(TrainingProcess(place, "auto", rank_variables(place, number)))
            ranks[number].until(5)
        assert len([c for c in processes_in(place).values() if "/gcs_server " in c]) == 1
        ranks[1 - dying].go()
        ranks[dying].process.kill()
        ranks[dying].process.wait()
        left = ranks[1 - dying].finish(END_SECONDS)
        batches: dict[int, list[int]] = {}
        for batch, index, *_ in left["samples"]:
            batches.setdefault(batch, []).append(index)
        assert list(batches.values()) == torchs(1 - dying)


NEEDS_RAY = """
import os, sys
from pathlib import Path
from dpex import DpexDataLoader
from dpex.errors import ClusterError
from dpex.transforms import MappedDataset, Stage

ours = dict(num_workers=2, distribute_mode=True)
staged = MappedDataset(range(4), Stage(abs, resources={"disk": 1}))
for loader in (
    DpexDataLoader(range(4), head_address="local", **ours),
    DpexDataLoader(staged, **ours),
):
    try:
        iter(loader)
    except ClusterError as error:
        with Path(f"rank{os.environ['RANK']}").open("a") as file:
            print(error, file=file)
"""


def test_a_rank_that_needs_a_local_ray_is_told_how_ranks_get_one() -> None:
    with workplace() as place:
        (place / "program.py").write_text(NEEDS_RAY)
        run = torchrun(place / "program.py", ranks=2, place=place, seconds=PROGRAM_SECONDS)
        assert run.returncode == 0, run.stdout
        for rank in range(2):
            asked, needed = (place / f"rank{rank}").read_text().splitlines()
            assert asked == needed
            assert "one of 2 ranks" in asked
            assert "`ray start --head`" in asked
            assert "head_address='processes'" in asked
        assert not processes_in(place)
