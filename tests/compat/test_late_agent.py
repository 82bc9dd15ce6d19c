"""Test that the placeholder of an agent ends with its raylet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dpex.compat import late_agent


def test_a_placeholder_whose_raylet_has_ended_before_it_looks_ends(tmp_path: Path) -> None:
    command = [sys.executable, late_agent.__file__, str(tmp_path / "wanted"), "agent.py"]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0
