"""Tests of the choice between processes of this machine and a Ray."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from cluster_programs import processes_in, rank_variables, run_program, wait_until, workplace

from dpex import log
from dpex.carriers.choice import Demand, new_session
from dpex.cluster.machine_share import usable_cores
from dpex.transforms import Stage

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux"),
]

CORES = f"on {usable_cores()} core{'s' * (usable_cores() != 1)} of this machine"
TWO_PROCESSES = f"dpex: no Ray cluster found: 2 worker processes {CORES}"
# No server listens there, because the system uses this port for its own purposes.
NOBODY = "127.0.0.1:1"

COMMON = """
import os, sys, threading
import torch
from dpex import ClusterError, DataLoader
from dpex.transforms import MappedDataset, Stage

class Parents:
    # Samples tell whether their process is a child of the training process.
    def __init__(self): self.training = os.getpid()
    def __len__(self): return 16
    def __getitem__(self, index):
        return index, os.getppid() == self.training, "ray" in sys.modules

def on_processes(loader):
    indices, children, _ = map(torch.cat, zip(*loader))
    assert indices.tolist() == list(range(16))
    assert children.all() or not children.any()
    return bool(children.all())

def loader_of(**options):
    return DataLoader(Parents(), batch_size=4, num_workers=2, **options)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


def run(place: Path, code: str, **variables: str) -> CompletedProcess[str]:
    program = place / "program.py"
    program.write_text(COMMON + code)
    done = run_program(program, place=place, seconds=170, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def said(done: CompletedProcess[str]) -> list[str]:
    """Return dpex's lines, without those that a busy machine adds."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("dpex: ")]
    return [line for line in lines if not line.startswith("dpex: no batch for")]


WITHOUT_CLUSTER = """
loader = loader_of()
loader.warm_up(wait=True)
for _ in range(2):
    assert on_processes(loader)
assert not any(loaded for *_, batch in loader for loaded in batch)
assert "ray" not in sys.modules
"""


@pytest.mark.multiprocess
def test_auto_without_a_cluster_is_processes_and_imports_no_ray(place: Path) -> None:
    done = run(place, WITHOUT_CLUSTER)
    assert said(done) == [TWO_PROCESSES]
    assert not (place / "ray").exists()
    wait_until(lambda: not processes_in(place), 20, "end of the worker processes")


NOBODY_ANSWERS = """
for _ in range(2):
    try:
        iter(loader_of())
    except ClusterError as error:
        print(error, flush=True)
    else:
        raise AssertionError("the loader uses another carrier")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("address", [NOBODY, f"ray://{NOBODY}"])
def test_a_ray_that_is_named_and_does_not_answer_is_an_error(place: Path, address: str) -> None:
    done = run(place, NOBODY_ANSWERS, RAY_ADDRESS=address)
    assert done.stdout.count(f"answers at RAY_ADDRESS='{address}'") == 2, done.stdout
    assert done.stderr == ""


RAY_OF_THE_PROGRAM = """
import logging

class Ray(threading.Thread):
    # A Ray ends with the thread that started it.
    def __init__(self):
        super().__init__(daemon=True)
        self.started = threading.Event()

    def run(self):
        import ray
        ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
        self.started.set()
        threading.Event().wait()

loader = loader_of()
batches = iter(loader)
indices = next(batches)[0].tolist()
program = Ray()
program.start()
indices += [index for batch in batches for index in batch[0].tolist()]
assert indices == list(range(16))
program.started.wait()
assert on_processes(loader), "the choice is for the loader's life"
assert on_processes(loader_of(head_address="processes"))
other = loader_of()
assert not on_processes(other)
print("shutdown", file=sys.stderr, flush=True)
import ray
ray.shutdown()
assert on_processes(loader)
assert on_processes(other), "a loader whose Ray is gone chooses again"
"""


@pytest.mark.multiprocess
def test_a_ray_that_starts_later_is_for_later_loaders(place: Path) -> None:
    done = run(place, RAY_OF_THE_PROGRAM, RAY_AUTH_MODE="disabled")
    lines = said(done)
    assert lines[0] == TWO_PROCESSES
    assert lines[1] == f"dpex: 2 worker processes {CORES}"
    assert "(this process was connected to it): 1 node, 2 CPUs" in lines[2]
    assert lines[3].startswith("dpex: the Ray of this loader has ended, and there is no other")
    assert len(lines) == 4, done.stderr


NEEDS_RAY = """
loader = loader_of(worker_options={"runtime_env": {"env_vars": {"KIND": "set"}}})
for _ in range(2):
    assert not on_processes(loader)
    import ray
    ray.shutdown()
"""


@pytest.mark.multiprocess
def test_options_that_need_ray_start_a_local_ray(place: Path) -> None:
    done = run(place, NEEDS_RAY)
    reason = "dpex: no Ray cluster found, and worker_options['runtime_env'] needs Ray: a local Ray"
    lines = said(done)
    assert lines[0] == f"{reason} starts"
    assert lines[1:] == [f"dpex: local Ray on {usable_cores()} cores"] * 2, done.stderr


STAGE_OF_A_RANK = """
stage = Stage(lambda sample: sample, resources={"decoder": 1})
for _ in range(2):
    try:
        iter(DataLoader(MappedDataset(Parents(), [stage]), num_workers=2))
    except ClusterError as error:
        print(error, flush=True)
assert on_processes(loader_of())
"""


@pytest.mark.multiprocess
def test_a_rank_whose_stage_needs_ray_is_told_to_start_one(place: Path) -> None:
    done = run(place, STAGE_OF_A_RANK, **rank_variables(place, 0))
    assert done.stdout.count("this is one of 2 ranks") == 2, done.stdout
    assert done.stdout.count("`ray start --head`") == 2
    assert "resources={'decoder': 1}" in done.stderr.splitlines()[0]
    assert not list(place.glob("dpex-*"))


def demand(options: dict[str, Any], *stages: Stage, address: str = "processes") -> Demand:
    return Demand(address, options, stages, 2, persistent=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "stages", "named"),
    [
        ({"resources": {"decoder": 1}}, [], "worker_options['resources']"),
        ({"accelerator_type": "A100"}, [], "worker_options['accelerator_type']"),
        ({"label_selector": {"kind": "x"}}, [], "worker_options['label_selector']"),
        ({"fallback_strategy": [{"label_selector": {}}]}, [], "['fallback_strategy']"),
        ({"runtime_env": {"pip": []}}, [], "worker_options['runtime_env']"),
        ({}, [Stage(abs, num_gpus=1)], "num_gpus=1"),
        ({}, [Stage(abs, resources={"decoder": 1})], "resources={'decoder': 1}"),
        ({}, [Stage(abs), Stage(abs, label_selector={"kind": "x"})], "label_selector={'kind'"),
    ],
    ids=str,
)
def test_processes_refuse_what_only_ray_can_meet(
    options: dict[str, Any], stages: list[Stage], named: str
) -> None:
    asked = demand(options, *stages)
    assert len(asked.only_ray) == 1
    with pytest.raises(ValueError, match=r"head_address='processes' cannot meet") as caught:
        new_session(asked, "processes")
    assert named in str(caught.value)
    assert 'head_address="local"' in str(caught.value)


def test_processes_warn_once_of_what_they_ignore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_warned", set())
    given = demand(
        {"num_cpus": 2, "memory": 1 << 30}, Stage(abs, max_workers=3), Stage(abs, num_cpus=2)
    )
    with pytest.warns(UserWarning, match="worker processes of this machine ignore") as caught:
        new_session(given, "processes")
    [warning] = caught
    for named in ("['num_cpus']", "['memory']", "max_workers of Stage", "num_cpus of Stage"):
        assert named in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new_session(given, "processes")
        new_session(demand({}, Stage(abs)), "processes")
