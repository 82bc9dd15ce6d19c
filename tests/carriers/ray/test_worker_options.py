"""Tests of ``worker_options``: dpex reports malformed options, and options that no node meets."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cluster_programs import PROGRAM_SECONDS, run_program, workplace
from cluster_programs.clusters import Cluster
from living import Plain

from dpex import DpexDataLoader, WorkerOptions
from dpex.carriers.ray.worker_options import check, unmet

NODES = [
    {
        "Alive": True,
        "Resources": {"CPU": 4.0, "memory": 8e9, "decoder": 2.0, "accelerator_type:T4": 1.0},
        "Labels": {"disk": "fast", "zone": "a"},
    },
    {"Alive": True, "Resources": {"CPU": 16.0, "memory": 4e9}, "Labels": {"disk": "slow"}},
    {"Alive": False, "Resources": {"CPU": 64.0, "decoder": 9.0}, "Labels": {"zone": "c"}},
]


def test_the_type_has_the_options_that_dpex_knows() -> None:
    with pytest.raises(ValueError, match="Accepted") as info:
        check({"num_gpus": 1})
    names = ", ".join(sorted(WorkerOptions.__annotations__))
    assert str(info.value).endswith(f"Accepted: {names}")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (["num_cpus"], TypeError, "must be a dict"),
        (
            {"num_gpus": 1},
            ValueError,
            r"does not accept 'num_gpus'\. .*Stage\(fn, num_gpus=1\)\. Accepted: .*label_selector",
        ),
        (
            {"scheduling_strategy": "SPREAD"},
            ValueError,
            r"does not accept 'scheduling_strategy'\. .*label_selector\. Accepted: ",
        ),
        ({"cpus": 1}, ValueError, r"does not accept 'cpus'\. Accepted: "),
        (
            {"num_cpus": "two"},
            TypeError,
            r"\['num_cpus'\] must be a number, got 'two'",
        ),
        ({"num_cpus": True}, TypeError, "must be a number, got True"),
        ({"num_cpus": -1}, ValueError, "asks for -1 of 'CPU'"),
        ({"memory": "2GB"}, TypeError, "must be a number of bytes, got '2GB'"),
        ({"resources": ["decoder"]}, TypeError, "must be a dict of numbers"),
        ({"resources": {"decoder": "1"}}, TypeError, r"\['decoder'\] must be a number, got '1'"),
        ({"resources": {"CPU": 1}}, ValueError, "Pass worker_options={'num_cpus': 1}"),
        ({"label_selector": "fast"}, TypeError, "must be a dict of strings"),
        ({"fallback_strategy": {}}, TypeError, "must be a list of dicts"),
        ({"accelerator_type": 4}, TypeError, "must be a string"),
    ],
)
def test_what_is_not_well_formed_is_refused_by_the_constructor(
    options: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        DpexDataLoader(Plain(), num_workers=2, distribute_mode=True, worker_options=options)


def test_what_ray_takes_is_well_formed() -> None:
    check(None)
    check({"num_cpus": 0.5, "memory": 2e9, "resources": {"decoder": 1}, "runtime_env": None})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_cpus": 16},
        {"num_cpus": 0, "resources": {"decoder": 2}},
        {"memory": 8e9},
        {"accelerator_type": "T4"},
        {"label_selector": {"disk": "fast"}},
        {"label_selector": {"disk": "!fast"}, "num_cpus": 16},
        {"label_selector": {"zone": "in(a, b)"}},
        {"label_selector": {"zone": "!in(b,c)"}},
        {"label_selector": {"zone": "c"}, "fallback_strategy": [{"label_selector": {"zone": "a"}}]},
        {"label_selector": {"disk": "like(f*)"}},  # unknown syntax, as of a later Ray
    ],
    ids=str,
)
def test_what_a_node_has_is_met(options: dict[str, Any]) -> None:
    assert unmet(options, NODES) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_cpus": 64}, "{'CPU': 64}, but no node has all of it. The most on any node: "),
        ({"resources": {"decoder": 3}}, "on any node: {'decoder': 2.0, 'CPU': 16.0}"),
        ({"memory": 1e13}, "on any node: {'CPU': 16.0, 'memory': 8000000000.0}"),
        ({"num_cpus": 16, "resources": {"decoder": 1}}, "but no node has all of it"),
        ({"accelerator_type": "A100"}, "accelerator_type:A100"),
        ({"label_selector": {"disk": "none"}}, "label_selector={'disk': 'none'}, but nodes have"),
        ({"label_selector": {"disk": "fast"}, "num_cpus": 16}, "labels [{'disk': 'slow'}]"),
        ({"label_selector": {"zone": "c"}}, "label_selector={'zone': 'c'}"),
    ],
    ids=str,
)
def test_what_no_node_has_is_said(options: dict[str, Any], text: str) -> None:
    assert text in str(unmet(options, NODES))


PROGRAM = """
import torch
from torch.utils.data import TensorDataset
from dpex import ClusterError, DpexDataLoader

for options in ({"resources": {"decoder": 1}}, {"label_selector": {"disk": "fast"}},
                {"memory": 10**13}, {"num_cpus": 1000}):
    loader = DpexDataLoader(TensorDataset(torch.arange(100)), 4, num_workers=2,
                            distribute_mode=True, head_address="local", worker_options=options)
    try:
        iter(loader)
    except ClusterError as error:
        print(next(iter(options)), "is refused:", error)
"""


WAITING = """
import sys
import torch
from torch.utils.data import TensorDataset
from dpex import ClusterError, DpexDataLoader, tuning

tuning.NODE_JOINS_S = 10
loader = DpexDataLoader(TensorDataset(torch.arange(100)), 4, num_workers=2, distribute_mode=True,
                        head_address=sys.argv[1], worker_options={"resources": {"decoder": 1}})
try:
    next(iter(loader))
except ClusterError as error:
    print("given up:", error)
"""


@pytest.mark.multiprocess
@pytest.mark.extended
@pytest.mark.long
def test_a_cluster_is_given_time_to_get_such_a_node() -> None:
    with workplace() as place:
        cluster = Cluster(place)
        cluster.add("--num-cpus=2")
        program = place / "program.py"
        program.write_text(WAITING)
        done = run_program(
            program, cluster.address, place=place, seconds=PROGRAM_SECONDS, **cluster.variables
        )
    assert "worker_options asks for {'decoder': 1, 'CPU': 1}" in done.stderr
    assert "The loader waits until such a node joins" in done.stderr
    assert re.search(r"^dpex: no batch for 5 s\. Ray at .*: 2 nodes, 2 CPUs", done.stderr, re.M)
    assert "given up: worker_options asks for {'decoder': 1, 'CPU': 1}" in done.stdout
    assert "the cluster has no autoscaler" in done.stdout


@pytest.mark.multiprocess
def test_a_ray_of_this_process_refuses_at_iter_what_it_has_not() -> None:
    with workplace() as place:
        program = place / "program.py"
        program.write_text(PROGRAM)
        said = run_program(program, place=place, seconds=PROGRAM_SECONDS).stdout
    assert said.count("is refused: worker_options asks for") == 4
    assert "{'decoder': 1, 'CPU': 1}, but no node has all of it" in said
