"""Token authentication; without it, anyone who reaches Ray's ports can run code in that Ray."""

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
    "token_hint",
    "token_variables",
]

MODE = "RAY_AUTH_MODE"
FILE = "auth_token"
_TOKEN = "RAY_AUTH_TOKEN"
_PATH = "RAY_AUTH_TOKEN_PATH"

# The user's values of the variables that dpex currently overrides; None for an unset variable.
_users: dict[str, str | None] = {}


def token_variables(directory: Path) -> dict[str, str]:
    """Choose the token of a local Ray: the user's token, or a new one.

    A token in ``~/.ray/auth_token`` counts only if no other user has access to the file.

    Args:
        directory: Directory for the file of a new token, which only this user can read.

    Returns:
        Environment variables that lead Ray's processes to the token.

    Source:
        Ray's documentation of token authentication: ``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN``,
        ``RAY_AUTH_TOKEN_PATH``, and ``~/.ray/auth_token`` if neither of the last two is set.
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


def token_hint() -> str:
    """Return advice for a cluster that may have refused this process's token."""
    if os.environ.get(MODE) != "token":
        return (
            "If the cluster uses token authentication, set RAY_AUTH_MODE=token, and provide its "
            "token"
        )
    sent = next((name for name in (_TOKEN, _PATH) if os.environ.get(name)), "~/.ray/auth_token")
    return f"This process sends the token of {sent}, and the cluster may have another"


def require_token(variables: Mapping[str, str]) -> None:
    """Require a token in this process and in the Ray that it starts.

    Args:
        variables: Environment variables that lead Ray to the token. They replace the user's values
            until ``hide_token`` or ``forget_token`` is called.
    """
    _set(variables)
    if "ray" in sys.modules and not authentication.reread():
        # Ray keeps the mode that it read at import, so its processes must have the same mode.
        _restore([MODE])


def hide_token() -> None:
    """Restore the user's environment variables while this process's Ray keeps the token.

    Ray reads the environment again after its shutdown.
    """
    if _users and authentication.on_shutdown(authentication.reread):
        _restore(list(_users))


def forget_token() -> None:
    """Undo ``require_token``, because the next Ray has another token or none."""
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
