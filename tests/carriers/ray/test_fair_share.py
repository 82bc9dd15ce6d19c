"""Tests of training jobs that share fewer CPUs than they have workers: all of them progress."""

import json
import sys
from pathlib import Path
from subprocess import Popen

import pytest
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, environment, spawn, wait_until, workplace
from cluster_programs.clusters import Cluster
from even_program import BATCHES, WORKERS

PROGRAM = PROGRAMS / "even_program.py"

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.extended,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def start(cluster: Cluster, place: Path, rank: int, ranks: int, kind: str) -> Popen[str]:
    arguments = [cluster.address, str(place), str(rank), str(ranks), kind]
    variables = environment(place, RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1")
    return spawn([sys.executable, str(PROGRAM), *arguments], place, env=variables)


def test_trainers_that_share_cpus_come_on_evenly() -> None:
    ranks = 4
    with workplace() as place:
        cluster = Cluster(place)
        cluster.add("--num-cpus=2")
        processes = [start(cluster, place, rank, ranks, "samples") for rank in range(ranks)]
        assert [process.wait(PROGRAM_SECONDS) for process in processes] == [0] * ranks
        ended = [json.loads((place / f"ended{rank}.json").read_text()) for rank in range(ranks)]
    # The counts at the time when the first training process ended.
    batches = min((end["batches"] for end in ended), key=sum)
    assert max(batches) == BATCHES["samples"]
    assert min(batches) >= BATCHES["samples"] / 2, batches
    # Invariant: a task that releases its CPU leaves no call at the pipeline actor. Each worker
    # process has two calls there: they wait for the ends of the iteration and of the pipeline.
    assert max(end["open"] for end in ended) <= 2 * WORKERS["samples"]


def test_streams_begin_beside_those_that_have_the_cpus() -> None:
    with workplace() as place:
        cluster = Cluster(place)
        cluster.add("--num-cpus=2")
        first = start(cluster, place, 0, 2, "streams")
        progress = place / "progress0"
        at_speed = 10 * WORKERS["streams"]
        wait_until(
            lambda: progress.exists() and progress.stat().st_size >= at_speed, 150, "first batches"
        )
        second = start(cluster, place, 1, 2, "streams")
        assert [process.wait(200) for process in (first, second)] == [0, 0]
        done, others = json.loads((place / "ended0.json").read_text())["batches"]
        begun = [path.read_text() for path in place.glob("streams*/*")]
    assert done == BATCHES["streams"]
    assert others >= at_speed, "all streams of the second job have started"
    # Each stream has started once: after it releases its CPU, it continues where it was.
    assert begun == ["."] * 2 * WORKERS["streams"]
