"""Virtual environments that add packages to those of the tests' environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def environment_above(directory: Path) -> tuple[Path, list[str]]:
    """Create a virtual environment in a directory.

    Returns:
        The environment's interpreter, and the command that installs packages in it.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    [packages] = directory.glob("lib/python*/site-packages")
    # Python reads no .pth files in a directory that a .pth file adds. So the environment does not
    # contain an editable dpex, which needs its .pth file.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python, [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
