"""Several trainers on a cluster with fewer CPUs than they have workers: none is left behind."""

import json
import sys
from pathlib import Path

import pytest
from cluster_programs import environment, spawn, workplace
from cluster_programs.clusters import Cluster
from even_program import BATCHES

PROGRAM = Path(__file__).with_name("even_program.py")
RANKS = 4


@pytest.mark.timeout(240)
@pytest.mark.multiprocess
@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_trainers_that_share_cpus_come_on_evenly() -> None:
    with workplace() as place:
        cluster = Cluster(place)
        cluster.add("--num-cpus=2")
        trainers = [
            spawn(
                [sys.executable, str(PROGRAM), cluster.address, str(place), str(rank), str(RANKS)],
                place,
                env=environment(place, RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1"),
            )
            for rank in range(RANKS)
        ]
        assert [trainer.wait(200) for trainer in trainers] == [0] * RANKS
        ended = [json.loads((place / f"ended{rank}.json").read_text()) for rank in range(RANKS)]
    batches = min(ended, key=sum)  # when the first one ended
    assert max(batches) == BATCHES
    assert min(batches) >= BATCHES / 2, batches
