"""Tests of memory that the training process shares: worker processes write to it as torch's do."""

from __future__ import annotations

import json

import pytest
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace


@pytest.mark.multiprocess
def test_memory_is_shared_as_with_torch_s_workers() -> None:
    program = PROGRAMS / "mappings_program.py"
    with workplace() as place:
        done = run_program(program, "processes", place=place, seconds=PROGRAM_SECONDS)
        assert done.returncode == 0, done.stderr
        torchs, ours = json.loads(done.stdout)
        assert ours == torchs
