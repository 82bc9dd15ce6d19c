"""Test that results are the same without private names of Ray."""

from __future__ import annotations

import pytest
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace

PROGRAM = PROGRAMS / "public_ray_program.py"


@pytest.mark.multiprocess
@pytest.mark.timeout(PROGRAM_SECONDS + 30)
def test_results_are_the_same_with_public_names_alone() -> None:
    with workplace() as place:
        done = run_program(PROGRAM, place=place, seconds=PROGRAM_SECONDS, DPEX_PUBLIC_RAY_ONLY="1")
        assert "all as it should be" in done.stdout, done.stdout[-3000:] + done.stderr[-5000:]
