"""Tests of the report of ``dpex doctor``: facts, faults, and how to fix them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_programs import (
    Driver,
    address_of,
    environment,
    processes_in,
    start_node,
    wait_until,
    workplace,
)
from cluster_programs.seeing import hiding, installed

import dpex

pytestmark = [
    pytest.mark.extended,
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
HEAD = ("--head", "--port=0", "--include-dashboard=false")
GONE_SECONDS = 60
TOKEN = "0123456789abcdef" * 4
OTHER_TOKEN = "fedcba9876543210" * 4


def doctor(
    place: Path, *arguments: str, under: tuple[str, ...] = (), **variables: str
) -> tuple[int, dict[str, str], str]:
    """Run ``dpex doctor``; return its exit status, its lines by name, and all its output."""
    done = subprocess.run(
        [*under, sys.executable, "-m", "dpex", "doctor", *arguments],
        cwd=place,
        env=environment(place, **variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = {line[:16].rstrip(): line[16:] for line in done.stdout.splitlines()}
    return done.returncode, lines, done.stdout + done.stderr


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


@pytest.mark.parametrize("given", ["auto", "processes", "local"])
def test_all_is_well_where_nothing_is_wrong(place: Path, given: str) -> None:
    status, lines, output = doctor(place, *([] if given == "auto" else ["--head-address", given]))
    assert status == 0, output
    assert lines["verdict"].startswith("ok")
    assert lines["dpex"] == dpex.__version__
    for package in ("torch", "ray", "pyarrow", "numpy"):
        assert lines[package] == importlib.metadata.version(package)
    assert lines["cores"].startswith(f"{len(os.sched_getaffinity(0))} for this process")
    assert lines["start method"] == "fork"
    if given == "local":
        assert lines["Ray"] == "a local Ray (head_address)"
        size = f"1 node(s), 0 GPUs, {len(os.sched_getaffinity(0))} cores"
        assert lines["cluster"].startswith(size)
    else:
        why = "no cluster found" if given == "auto" else "head_address"
        assert lines["Ray"] == f"none: worker processes of this machine ({why})"
        assert "cluster" not in lines
    for loader in ("torch's loader", "dpex's loader"):
        assert socket.gethostname() in lines[loader]
    wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the doctor's Ray")


def test_tokens_are_used_and_not_shown(place: Path) -> None:
    required = {"RAY_AUTH_MODE": "token"}
    start_node(place, *HEAD, "--num-cpus=1", RAY_AUTH_TOKEN=TOKEN, **required)
    status, lines, output = doctor(place, RAY_AUTH_TOKEN=TOKEN, **required)
    assert status == 0, output
    assert lines["Ray"] == f"{address_of(place)} (found on this machine)"
    assert TOKEN not in output
    status, lines, output = doctor(
        place, RAY_ADDRESS=address_of(place), RAY_AUTH_TOKEN=OTHER_TOKEN, **required
    )
    assert status == 1, output
    assert lines["Ray"] == f"{address_of(place)} (RAY_ADDRESS)"
    assert "sends the token of RAY_AUTH_TOKEN, and the cluster may have" in lines["verdict"]
    assert TOKEN not in output
    assert OTHER_TOKEN not in output


def test_no_ray_where_there_should_be_one(place: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
    status, lines, output = doctor(place, "--head-address", address)
    assert status == 1, output
    assert lines["Ray"] == f"{address} (head_address)"
    assert f"no Ray cluster answers at head_address='{address}' (" in lines["verdict"]
    assert " 15 s" not in lines["verdict"], "a refused connection takes no time"
    assert f"`ray start --address={address} --num-cpus=0`" in lines["verdict"]
    status, lines, output = doctor(place, "--head-address", "nowhere")
    assert status == 1, output
    assert "head_address was 'nowhere'" in lines["verdict"]
    status, lines, output = doctor(place, "--head-address", "cluster")
    assert status == 1, output
    assert "Ray" not in lines
    assert "head_address='cluster'" in lines["verdict"]


def test_a_cluster_without_cpus(place: Path) -> None:
    start_node(place, *HEAD, "--num-cpus=0")
    status, lines, output = doctor(place)
    assert status == 1, output
    assert lines["cluster"] == "1 node(s), 0 GPUs, 0 CPUs"
    assert "the cluster has no CPU" in lines["verdict"]


def test_a_cluster_whose_cpus_others_hold(place: Path) -> None:
    start_node(place, *HEAD, "--num-cpus=2")
    other = Driver(place)
    other.ask("connect", head_address="auto")
    other.ask("hog", num_cpus=1)
    status, lines, output = doctor(place, "--timeout", "40")
    assert status == 1, output
    assert "timed out after 20.0 seconds" in lines["verdict"]
    assert "2 CPUs, of which 0 free" in lines["verdict"]
    assert "placement group 'reserved' reserves 1" in lines["verdict"]
    assert other.end() == 0


def test_a_node_with_another_torch(place: Path) -> None:
    _, metadata = installed("torch")
    other_torch = f"printf 'Name: torch\\nVersion: 1.0.0\\n' > '{metadata}/METADATA'"
    start_node(place, *HEAD, "--num-cpus=1", under=hiding(metadata, more=other_torch))
    status, lines, output = doctor(place)
    assert status == 1, output
    assert "has torch 1.0.0, but this process has " in lines["verdict"]
    assert "dpex's loader" in lines, "the epochs were not run"


def test_little_shared_memory(place: Path) -> None:
    small = hiding(Path("/dev/shm"), more="mount -o remount,size=64m /dev/shm")
    status, lines, output = doctor(place, "--head-address", "local", under=small)
    assert status == 1, output
    assert lines["/dev/shm"].startswith("0.1 GiB")
    assert "docker run --shm-size=" in lines["verdict"]


LOADER = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
from dpex import DpexDataLoader
from dpex.transforms import MappedDataset, Stage

class Remote(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        print("sample", index)
        if index == self.broken:
            raise ValueError("a broken file")
        time.sleep(0.01)
        return torch.tensor(index)

    broken = -1

class Broken(Remote):
    broken = 3  # in the first batch

def remote():
    return DataLoader(Remote(), batch_size=4, num_workers=2)

def with_a_stage():
    dataset = MappedDataset(Remote(), [Stage(torch.neg, label_selector={"disk": "!none"})])
    return DpexDataLoader(dataset, batch_size=4, num_workers=2)

def in_the_loop():
    return DataLoader(Remote(), batch_size=4)

def skips():
    options = {"distribute_mode": True, "head_address": "local", "on_error": "skip"}
    return DpexDataLoader(Broken(), batch_size=4, num_workers=2, **options)
"""


def timed(place: Path, function: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Time a loader of ``LOADER``; return the exit status and the JSON object."""
    (place / "loaders.py").write_text(LOADER)
    given = ("--loader", f"loaders.py:{function}", "--seconds", "4", "--json", *arguments)
    status, _, output = doctor(place, *given)
    _, brace, report = output.partition("{\n")  # the samples' lines come from standard error
    return status, json.JSONDecoder().raw_decode(brace + report)[0]


def test_a_loader_of_the_user_is_timed_beside_torch_s(place: Path) -> None:
    status, report = timed(place, "remote", "--step-ms", "1")
    assert status == 0, report
    assert report["ok"]
    assert report["ray_address"]["address"] == "processes"
    assert "cluster" not in report
    for name in ("torch_loader", "dpex_loader"):
        assert report[name]["counts"] == "steady"
        assert 0 < report[name]["samples_per_s"] <= 1.5 * 2 / 0.01
    assert report["sample"]["waiting_seconds"] >= 0.009
    assert report["bound"]["by"] in {"num_workers", "neither"}
    assert report["step"]["needed_samples_per_s"] == 4000
    assert any("keep all cores busy" in line for line in report["advice"])
    wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the doctor's Ray")


def test_a_loader_that_needs_ray_is_timed_on_a_local_ray(place: Path) -> None:
    status, report = timed(place, "with_a_stage")
    assert status == 0, report
    assert report["ray_address"]["address"] == "local"
    assert report["ray_address"]["reason"].startswith("no cluster found, and Stage(")
    assert report["cluster"]["nodes"] == 1
    assert report["dpex_loader"]["samples_per_s"] > 0
    wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the doctor's Ray")


def test_a_loader_without_workers_is_timed_as_given_and_with_workers(place: Path) -> None:
    status, report = timed(place, "in_the_loop")
    assert status == 0, report
    assert report["given_loader"]["num_workers"] == 0
    assert report["dpex_loader"]["num_workers"] == len(os.sched_getaffinity(0))
    assert "with 0, the training loop makes every batch itself" in report["advice"][0]


def test_a_loader_that_skips_samples_is_no_problem(place: Path) -> None:
    status, report = timed(place, "skips")
    assert report["loader"]["class"] == "DpexDataLoader"
    assert "torch_loader" not in report
    assert report["sample"]["skipped"] == 1
    assert status == 0, report
    [skipped] = [line for line in report["warnings"] if "sample 3 " in line]
    assert "a broken file" in skipped


def test_what_never_ends_is_cut_off(place: Path) -> None:
    # A torch whose import never ends, as on a disk that does not answer.
    package = place / "stalled" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import threading; threading.Event().wait()")
    path = f"{place / 'stalled'}{os.pathsep}{environment(place)['PYTHONPATH']}"
    status, lines, output = doctor(place, "--timeout", "10", PYTHONPATH=path)
    assert status == 1, output
    assert lines["verdict"].startswith("cut off after 10 s")
    assert "stalled/torch/__init__.py" in output
