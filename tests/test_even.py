"""Several trainers on a cluster with fewer CPUs than they have workers: none is left behind."""

import json
import sys
from pathlib import Path

import pytest
from cluster_programs import environment, spawn, workplace
from cluster_programs.clusters import Cluster
from even_program import BATCHES, WORKERS

PROGRAM = Path(__file__).with_name("even_program.py")
RANKS = {"samples": 4, "streams": 2}


@pytest.mark.timeout(240)
@pytest.mark.multiprocess
@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", RANKS)
def test_trainers_that_share_cpus_come_on_evenly(kind: str) -> None:
    ranks = RANKS[kind]
    with workplace() as place:
        cluster = Cluster(place)
        cluster.add("--num-cpus=2")
        arguments = [sys.executable, str(PROGRAM), cluster.address, str(place)]
        trainers = [
            spawn(
                [*arguments, str(rank), str(ranks), kind],
                place,
                env=environment(place, RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1"),
            )
            for rank in range(ranks)
        ]
        assert [trainer.wait(200) for trainer in trainers] == [0] * ranks
        ended = [json.loads((place / f"ended{rank}.json").read_text()) for rank in range(ranks)]
        begun = [path.read_text() for path in place.glob("streams*/*")]
    batches = min(ended, key=sum)  # when the first one ended
    assert max(batches) == BATCHES[kind]
    assert min(batches) >= BATCHES[kind] / 2, batches
    # A stream that gives its CPU back goes on where it was.
    assert begun == ["."] * (ranks * WORKERS[kind] if kind == "streams" else 0)
