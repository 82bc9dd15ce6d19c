"""Test of a user's Ray without free CPUs: the loader reports who holds them, and waits."""

from __future__ import annotations

import pytest
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace

PROGRAM = PROGRAMS / "busy_program.py"


@pytest.mark.extended
@pytest.mark.multiprocess
def test_a_loader_without_cpus_says_who_holds_them_and_waits() -> None:
    with workplace() as place:
        done = run_program(
            PROGRAM, place=place, seconds=PROGRAM_SECONDS, PYTHONPATH=str(PROGRAM.parent)
        )
        lines = done.stdout.splitlines()
        assert done.returncode == 0, done.stdout + done.stderr
        busy = [line for line in lines if "2 CPUs, of which 0 free" in line]
        assert any("Hog" in line for line in busy), done.stdout
        assert lines[-1] == "complete"
