"""The code in the guides runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster_programs import ROOT, run_program, workplace

GUIDES = ["datasets.md", "running.md", "stages.md", "trainers.md"]


def code_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", GUIDES)
def test_the_code_of_a_guide_runs(name: str) -> None:
    blocks = code_of(ROOT / "docs" / name)
    assert blocks
    with workplace() as place:
        program = place / "guide.py"
        program.write_text("\n".join(blocks))
        done = run_program(program, place=place, seconds=140)
        assert done.returncode == 0, done.stdout + done.stderr
