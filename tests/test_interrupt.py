"""Ctrl-C, as a terminal sends it: to the training process and to all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_programs import environment, run_program, wait_until, workplace

PROGRAM = Path(__file__).with_name("interrupt_program.py")
EARLY_PROGRAM = Path(__file__).with_name("interrupt_early_program.py")


@pytest.mark.extended
@pytest.mark.multiprocess
def test_the_loader_is_usable_after_an_interrupt_and_after_ray_s_end() -> None:
    with workplace() as place:
        waiting = place / "waiting"
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(waiting)],
            cwd=place,
            env=environment(place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(waiting.exists, 90, "sample that waits")
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=80)
        assert process.returncode == 0, out + errors
        assert [line for line in out.splitlines() if not line.startswith("batch")] == [
            "interrupted",
            *["complete"] * 3,
        ], out + errors


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_ray_is_started_whole_or_not_at_all() -> None:
    with workplace() as place:
        done = run_program(EARLY_PROGRAM, place=place, seconds=150)
    assert done.stdout.splitlines() == ["interrupted", "complete"], done.stdout + done.stderr
