"""Tests of ranks of a launcher: each reads the shard that torch gives it, from one shared Ray."""

import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
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
from ddp_program import CASES, EPOCHS
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

GONE_SECONDS = 60
# Time in which a rank reads the rest after another rank has been killed.
END_SECONDS = 150


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((torchrun, 2, False), id="2 ranks"),
        pytest.param((torchrun, 3, False), id="3 ranks", marks=pytest.mark.extended),
        pytest.param(
            (torchrun, 4, False), id="4 ranks", marks=[pytest.mark.extended, pytest.mark.long]
        ),
        pytest.param((torchrun, 2, True), id="2 ranks on a cluster", marks=pytest.mark.extended),
        pytest.param(
            (deepspeed, 2, False),
            id="2 ranks of DeepSpeed's launcher",
            marks=[
                pytest.mark.extended,
                pytest.mark.skipif(
                    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
                ),
            ],
        ),
    ],
)
def reports(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Yield the report of each rank, and then wait until their shared local Ray has ended."""
    launch, ranks, on_cluster = request.param
    with workplace() as place:
        address, variables = "auto", {}
        if on_cluster:
            cluster = Cluster(place)
            for _ in range(2):
                cluster.add("--num-cpus=2")
            address, variables = cluster.address, cluster.variables
        program = PROGRAMS / "ddp_program.py"
        arguments = (program, str(place), address)
        run = launch(*arguments, ranks=ranks, place=place, seconds=PROGRAM_SECONDS, **variables)
        assert run.returncode == 0, run.stdout
        reports = [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        assert address in {"auto", *(report["address"] for report in reports)}
        yield reports
        if not on_cluster:
            wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the shared Ray")


def case(report: dict[str, Any], length: int, batch_size: int, drop_last: bool) -> dict[str, Any]:
    wanted = {"length": length, "batch_size": batch_size, "drop_last": drop_last}
    [found] = [stream for stream in report["streams"] if wanted.items() <= stream.items()]
    return found


def test_ranks_share_one_ray(reports: list[dict[str, Any]]) -> None:
    ranks = len(reports)
    assert len({report["pid"] for report in reports}) == ranks
    assert len({report["address"] for report in reports}) == 1
    assert len({report["node"] for report in reports}) == 1
    assert len({report["job"] for report in reports}) == ranks


def test_ranks_divide_the_cores(reports: list[dict[str, Any]]) -> None:
    cores = len(os.sched_getaffinity(0))
    for report in reports:
        assert report["cores"] <= max(1, cores // len(reports))


def test_ranks_come_and_give_up_when_they_like(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["after_breaks"]["dpex"] == report["after_breaks"]["torch"]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "batch_size"), CASES)
def test_every_rank_gets_what_torch_gives_it(
    reports: list[dict[str, Any]], length: int, batch_size: int, drop_last: bool
) -> None:
    for report in reports:
        streams = case(report, length, batch_size, drop_last)
        assert streams["dpex"] == streams["torch"]
        assert len(streams["dpex"]) == EPOCHS


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "batch_size"), CASES)
def test_shards_are_disjoint_and_complete(
    reports: list[dict[str, Any]], length: int, batch_size: int, drop_last: bool
) -> None:
    ranks = len(reports)
    orders = []
    for epoch in range(EPOCHS):
        shards = [
            list(chain.from_iterable(indices for indices, _ in stream[epoch]))
            for stream in (
                case(report, length, batch_size, drop_last)["dpex"] for report in reports
            )
        ]
        assert len({len(shard) for shard in shards}) == 1
        counts = Counter(chain.from_iterable(shards))
        assert set(counts) <= set(range(length))
        if drop_last:
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
        # Start the ranks in turn, so that rank 0 starts the local Ray that both share.
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
        wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the ranks' shared Ray")
