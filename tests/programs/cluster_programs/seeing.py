"""Namespaces in which a process sees other files or processes than those of this machine.

They need root, or permission to create namespaces.
"""

from __future__ import annotations

import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest


def namespace(*options: str) -> tuple[str, ...]:
    """Return a prefix that runs a command in new namespaces; skip the test if that fails."""
    command = ("unshare", *options)
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs namespaces: {error}")
    return command


def hiding(*hidden: Path, more: str = ":") -> tuple[str, ...]:
    """Return a prefix that runs a command in a namespace where these directories are empty."""
    mounts = "".join(f"mount -t tmpfs none '{directory}'\n" for directory in hidden)
    script = f'set -e\nmount --make-rprivate /\n{mounts}{more}\nexec "$@"'
    return (*namespace("--mount"), "sh", "-c", script, "sh")


def installed(name: str) -> tuple[Path, Path]:
    """Return the directories of a distribution's package and of its metadata."""
    package = Path(str(distribution(name).locate_file(name)))
    [metadata] = package.parent.glob(f"{name}-*.dist-info")
    return package, metadata
