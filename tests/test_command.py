"""Tests of the command ``dpex`` where no Ray is installed, and of its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_programs import environment, workplace

import dpex

WITHOUT_RAY = """
import sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoRay())
from dpex.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
LOADER = """
print("printed by the user's module")
from torch.utils.data import DataLoader

def make_loader():
    return DataLoader(list(range(4000)), batch_size=10, num_workers=1)
"""
MISSING = "ray is not installed, and dpex makes no batch here without it"


def dpex_in(
    place: Path, *arguments: str, program: tuple[str, ...] = ("-m", "dpex")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_version(tmp_path: Path) -> None:
    done = dpex_in(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, f"dpex {dpex.__version__}\n")


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "soon"])
def test_a_time_is_a_number_above_zero(tmp_path: Path, wrong: str) -> None:
    for option in ("--step-ms", "--seconds"):
        done = dpex_in(tmp_path, "doctor", option, wrong)
        assert done.returncode == 2
        assert option in done.stderr


def test_without_ray_the_doctor_examines_worker_processes() -> None:
    with workplace() as place:
        done = dpex_in(place, "doctor", program=("-c", WITHOUT_RAY))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: the same batches as torch's loader, to the bit" in done.stdout


def test_where_ray_is_needed_the_doctor_says_how_to_install_it() -> None:
    with workplace() as place:
        given = ("doctor", "--head-address", "local")
        done = dpex_in(place, *given, program=("-c", WITHOUT_RAY))
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    *facts, verdict = done.stdout.splitlines()
    assert verdict == f'verdict         {MISSING}. Install it: pip install "ray[data]"'
    assert facts[0] == f"dpex            {dpex.__version__}"


def test_without_ray_the_doctor_times_the_user_s_loader_and_torch_s() -> None:
    with workplace() as place:
        (place / "train.py").write_text(LOADER)
        given = ("doctor", "--loader", "train.py:make_loader", "--seconds", "1", "--step-ms", "2")
        there = ("--head-address", "local", "--json")
        done = dpex_in(place, *given, *there, program=("-c", WITHOUT_RAY))
    assert done.returncode == 1, done.stderr
    assert "printed by the user's module" in done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert len(report["verdict"]) == 1
    assert report["verdict"][0].startswith(MISSING)
    assert report["loader"]["length"] == 4000
    assert report["sample"]["samples"] > 0
    assert report["torch_loader"]["samples_per_s"] > 0
    assert report["step"]["needed_samples_per_s"] == 5000
    assert "dpex_loader" not in report
