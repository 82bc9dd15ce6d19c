"""Directories of the local Rays, closed to other users: each holds a token and a session."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path

from dpex.errors import ClusterError
from dpex.private_directory import NotPrivate, check_way, claim, make_private, remove_unused

__all__ = ["delete_ended", "make_directory", "runtime_directory"]

_VARIABLE = "RAY_TMPDIR"
_SYSTEMS = Path("/tmp")
# Most bytes in the path of a Unix socket, and the longest path that Ray and dpex append.
_SOCKET_PATH = 107 if sys.platform.startswith("linux") else 103
_RAYS_PART = "/999/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def runtime_directory() -> Path:
    """Return the directory for the files and sockets of this user's local Rays.

    Only this user can access and replace it, and its path has no symbolic links. It is in
    RAY_TMPDIR, if that is set. Otherwise it is in TMPDIR, or in ``/tmp`` if TMPDIR has a long path
    or if other users can replace it.

    Raises:
        ClusterError: Other users can access or replace the directory, or RAY_TMPDIR is too long.
        OSError: The directory cannot be created.
    """
    name = f"dpex-{os.getuid()}"
    chosen = os.environ.get(_VARIABLE)
    base = Path(chosen or tempfile.gettempdir())
    size = len(os.fsencode(base.resolve()))
    most = _SOCKET_PATH - len(f"/{name}{_RAYS_PART}")
    if chosen and size > most:
        raise ClusterError(
            f"a local Ray did not start, because {_VARIABLE}={chosen!r} has {size} bytes. The path "
            f"of a Unix socket has at most {_SOCKET_PATH} bytes, so Ray and dpex have space for "
            f"{most}. Set a shorter {_VARIABLE}"
        )
    if not chosen and (size > most or not _is_safe(base / name)):
        base = _SYSTEMS
    try:
        return make_private(base / name, sticky=base != _SYSTEMS)
    except NotPrivate as error:
        raise ClusterError(
            "a local Ray did not start, because its token must be in a private directory. "
            f"{error} with {_VARIABLE if chosen else 'TMPDIR'}"
        ) from error


def _is_safe(directory: Path) -> bool:
    try:
        check_way(directory, sticky=True)
    except OSError:
        return False
    return True


def make_directory() -> Path:
    """Create the directory of a local Ray that this process starts.

    ``delete_ended`` keeps the directory until this process ends, however it ends.

    Returns:
        A directory with a number as its name.

    Raises:
        ClusterError: As for ``runtime_directory``.
        OSError: The directory cannot be created.
    """
    runtime = runtime_directory()
    return next(filter(_is_new, (runtime / str(number) for number in itertools.count())))


def _is_new(directory: Path) -> bool:
    """Create and claim a directory, if no process has created it before."""
    try:
        directory.mkdir(mode=0o700)
        claim(directory, shared=False)
    except (FileExistsError, BlockingIOError):
        return False
    return True


def delete_ended() -> None:
    """Delete the directories of this user's local Rays whose owner processes have ended."""
    for directory in runtime_directory().iterdir():
        remove_unused(directory)
