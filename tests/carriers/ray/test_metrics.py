"""Tests of the metrics that Ray's nodes export."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import ray
from cluster_programs import PROGRAMS, environment, workplace
from cluster_programs.environments import environment_above

SUMS = {
    "batches": "batches",
    "samples": "samples",
    "size_bytes": "size_bytes",
    "seconds": "seconds",
    "waiting_s": "waiting_seconds",
    "read_s": "read_seconds",
    "decode_s": "decode_seconds",
}


@pytest.mark.extended
@pytest.mark.multiprocess
def test_what_stats_says_is_exported(tmp_path: Path) -> None:
    """Ray exports the numbers of ``stats()``.

    Ray's agents must run in no other test, so this test installs them in its own environment.
    """
    python, pip = environment_above(tmp_path / "installed")
    subprocess.run([*pip, f"ray[default]=={ray.__version__}"], check=True, timeout=200)
    with workplace() as place:
        run = subprocess.run(
            [python, PROGRAMS / "metrics_program.py"],
            cwd=place,
            env=environment(place),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stderr.splitlines()[-1])
    assert report["exported"].keys() == report["counted"].keys()
    for loader, epochs in report["counted"].items():
        exported = report["exported"][loader]
        for field, name in SUMS.items():
            counted = sum(epoch[field] for epoch in epochs)
            assert exported[f"{name}_total"] == pytest.approx(counted, rel=1e-6), name
        assert exported["in_flight"] == 0
        assert exported["first_batch_seconds"] == pytest.approx(epochs[-1]["first_batch_s"])
        assert "skipped_total" not in exported
