"""Token authentication, without which anybody who reaches a Ray's ports can run code in it."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from pathlib import Path

from dpex.errors import ClusterError

__all__ = ["require_token", "runtime_directory", "stop_requiring_token"]

_MODE = "RAY_AUTH_MODE"
# What stood there before, while ours stands there.
_former_modes: list[str | None] = []

# A socket's path has 107 at the most; Ray adds some 70.
_MOST_CHARACTERS = 37


def require_token() -> None:
    """Have this process, and a Ray that it starts, deal only with who has this user's token.

    Ray's ports are open to every user of this host, and where a Ray cannot be kept to the loopback
    address, to others.

    Source:
        Ray's documentation of token authentication: ``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN``,
        ``RAY_AUTH_TOKEN_PATH``, and ``~/.ray/auth_token`` where neither of these is set.
    """
    if os.environ.get(_MODE) != "token":
        _former_modes.append(os.environ.get(_MODE))
    os.environ[_MODE] = "token"
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        try:
            path = Path.home() / ".ray" / "auth_token"
            _provide(path)
            found_by_ray = "HOME" in os.environ
        except (OSError, RuntimeError):  # no home, or not ours to write to
            path = runtime_directory() / "auth_token"
            _provide(path)
            found_by_ray = False
        if not found_by_ray:
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    _tell_ray()


def stop_requiring_token() -> None:
    """Take ``require_token`` back: another Ray may do without tokens."""
    while _former_modes:
        mode = _former_modes.pop()
        if mode is None:
            os.environ.pop(_MODE, None)
        else:
            os.environ[_MODE] = mode
        _tell_ray()


def _tell_ray() -> None:
    if "ray" in sys.modules:  # which reads its settings when it is imported
        from dpex.compat.local_ray import reread_environment

        reread_environment()


def _provide(path: Path) -> None:
    """See to it that there is a token, and that nobody else can read it (Ray's may be read)."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # readable by us alone
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(file.name, path)
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)


def runtime_directory() -> Path:
    """A directory of this user alone, with a name short enough for the sockets of a Ray in it.

    Raises:
        ClusterError: There is one by its name that others can access.
    """
    directory = Path(tempfile.gettempdir(), f"dpex-{os.getuid()}")
    if len(str(directory)) > _MOST_CHARACTERS:
        directory = Path("/tmp", directory.name)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
        raise ClusterError(f"{directory} must be a directory that only this user can access")
    return directory
