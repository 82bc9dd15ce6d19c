"""Processes that see another machine than this one: namespaces of their own.

It takes root, or leave to make them.
"""

from __future__ import annotations

import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest


def namespace(*options: str) -> tuple[str, ...]:
    """A command in front of another that gives it namespaces of its own; skips where it cannot."""
    command = ("unshare", *options)
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs namespaces: {error}")
    return command


def hiding(*hidden: Path, more: str = ":") -> tuple[str, ...]:
    """A command in front of another that sees empty directories in the place of these."""
    mounts = "".join(f"mount -t tmpfs none '{directory}'\n" for directory in hidden)
    script = f'set -e\nmount --make-rprivate /\n{mounts}{more}\nexec "$@"'
    return (*namespace("--mount"), "sh", "-c", script, "sh")


def installed(name: str) -> tuple[Path, Path]:
    """The directories of a distribution's package and of its metadata."""
    package = Path(str(distribution(name).locate_file(name)))
    [metadata] = package.parent.glob(f"{name}-*.dist-info")
    return package, metadata
