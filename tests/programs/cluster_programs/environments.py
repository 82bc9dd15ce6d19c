"""Environments that have the packages of the one that runs the tests, and more."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def environment_above(directory: Path) -> tuple[Path, list[str]]:
    """Make an environment in a directory.

    Returns:
        Its interpreter, and the command that installs there.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    [packages] = directory.glob("lib/python*/site-packages")
    # As a directory and no more: an editable dpex there needs a .pth file that is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python, [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
