"""Token authentication, without which anybody who reaches a Ray's ports can run code in it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from dpex.compat import authentication

__all__ = [
    "FILE",
    "MODE",
    "forget_token",
    "hide_token",
    "require_token",
    "token_variables",
]

MODE = "RAY_AUTH_MODE"
FILE = "auth_token"
_TOKEN = "RAY_AUTH_TOKEN"
_PATH = "RAY_AUTH_TOKEN_PATH"

# The user's values of the variables that have ours at the moment.
_users: dict[str, str | None] = {}


def token_variables(directory: Path) -> dict[str, str]:
    """Choose the token of a local Ray: the user's, if nobody else can read it, else a new one.

    Args:
        directory: Where a new one is written, for this user alone.

    Returns:
        The variables of the environment by which Ray's processes find it.

    Source:
        Ray's documentation of token authentication: ``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN``,
        ``RAY_AUTH_TOKEN_PATH``, and ``~/.ray/auth_token`` where neither of these is set.
    """
    if _user_has_token():
        return {MODE: "token"}
    path = directory / FILE
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return {MODE: "token", _PATH: str(path)}


def _user_has_token() -> bool:
    if os.environ.get(_TOKEN) or os.environ.get(_PATH):
        return True
    try:
        path = Path(os.environ["HOME"], ".ray", "auth_token")
        return path.stat().st_mode & 0o077 == 0
    except (KeyError, OSError):
        return False


def require_token(variables: Mapping[str, str]) -> None:
    """Have this process, and a Ray that it starts, deal only with who has the token.

    Args:
        variables: Those by which Ray finds it. They replace the user's until ``hide_token`` or
            ``forget_token`` is called.
    """
    _set(variables)
    if "ray" in sys.modules and not authentication.reread():
        # Ray keeps to the mode that it was imported with, so its processes must not have another.
        _restore([MODE])


def hide_token() -> None:
    """Give the environment back to the user while this process's Ray goes on with the token."""
    if _users and authentication.on_shutdown(authentication.reread):
        _restore(list(_users))


def forget_token() -> None:
    """Take ``require_token`` back: another Ray has another token, or none."""
    if _users:
        _restore(list(_users))
        authentication.reread()


def _set(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        _users.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def _restore(names: list[str]) -> None:
    for name in names:
        value = _users.pop(name)
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
