"""Directories that no other user of the machine can access, even if others were there first.

A process may claim such a directory. A later process removes the directories whose claimants have
ended, however they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import shutil
import stat
from pathlib import Path
from typing import IO

__all__ = ["NotPrivate", "check_way", "claim", "make_private", "remove_claimed", "remove_unused"]

_LOCK = "lock"
# Never closed. A fork shares the claims of its parent: a lock of flock() belongs to the open file.
_claims: dict[Path, IO[str]] = {}


class NotPrivate(PermissionError):
    """Another user can access or replace a directory."""


def make_private(directory: Path, *, readable: bool = False, sticky: bool = False) -> Path:
    """Create a directory with mode 0700, or check the directory that exists.

    Args:
        directory: The directory. Missing parents are created.
        readable: Whether other users may be able to list an existing directory.
        sticky: As for ``check_way``.

    Returns:
        The same directory without symbolic links.

    Raises:
        NotPrivate: The directory belongs to another user, or other users can access it (write to
            it, if ``readable``), or replace it.
        OSError: The directory cannot be created.
    """
    check_way(directory, sticky=sticky)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_way(directory, sticky=sticky)  # others may have created a part of it in between
    found = directory.stat()
    what, bits = ("write to", 0o022) if readable else ("access", 0o077)
    if found.st_uid != os.geteuid() or found.st_mode & bits:
        raise NotPrivate(
            f"{directory} belongs to user {found.st_uid} and has mode {_mode(found)}. It must be a "
            f"directory that you own and that no other user can {what}, because dpex trusts its "
            f"files. Run `chmod 700 {directory}` if it is yours, or choose another directory"
        )
    return directory.resolve()


def claim(directory: Path, *, shared: bool) -> None:
    """Create a directory and claim it: no process removes it before this one and its forks end.

    Args:
        directory: The directory. A claimed one stays as it is.
        shared: Whether other processes may claim it too.

    Raises:
        BlockingIOError: Another process has claimed the directory, and ``shared`` is False.
        NotPrivate: As for ``make_private``.
        OSError: The directory cannot be created.
    """
    while directory not in _claims:
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
            make_private(directory)
            lock = opened.enter_context((directory / _LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Otherwise another process found the directory unused and removed it: try again.
            if (directory / _LOCK).stat().st_ino == os.fstat(lock.fileno()).st_ino:
                opened.pop_all()
                _claims[directory] = lock


def remove_unused(directory: Path) -> None:
    """Remove a directory with its files, if all processes that have claimed it have ended."""
    with contextlib.suppress(OSError), (directory / _LOCK).open("r+") as lock:
        _remove(directory, lock)


def remove_claimed(directory: Path) -> None:
    """Remove a directory that this process has claimed, unless a process but a fork claims it."""
    with contextlib.suppress(OSError):
        _remove(directory, _claims[directory])


def _remove(directory: Path, lock: IO[str]) -> None:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    shutil.rmtree(directory)


def check_way(path: Path, *, sticky: bool = False) -> None:
    """Check that no other user, except root, has made a path or a part of it.

    Every user can create entries of a directory that all can write to, such as ``/tmp``. So each
    entry in such a directory must belong to root or to this user. Symbolic links are followed, and
    the ways to their targets are checked too. The path need not exist.

    Args:
        path: The path.
        sticky: Whether directories that others can write to need the sticky bit. Without the bit,
            other users can replace the path later. Containers often mount ``/tmp`` and ``/dev/shm``
            without it.

    Raises:
        NotPrivate: A part of the path is another user's, or can become so. The message names it.
        OSError: The path cannot be read, for example because links form a circle.
    """
    path = path.absolute()
    if path == path.parent:
        return
    check_way(path.parent, sticky=sticky)
    with contextlib.suppress(FileNotFoundError):
        parent = path.parent.stat()
        shared = _others_can_write(parent)
        if shared and sticky and not parent.st_mode & stat.S_ISVTX:
            raise NotPrivate(
                f"Other users can replace {path}, because {path.parent} has mode {_mode(parent)}. "
                f"Run `chmod go-w {path.parent}` if it is yours, or choose another directory"
            )
        entry = path.lstat()
        if shared and entry.st_uid not in {0, os.geteuid()}:
            raise NotPrivate(
                f"{path} belongs to user {entry.st_uid}, but must be yours, because every user can "
                f"create files in {path.parent}. Choose another directory"
            )
        if stat.S_ISLNK(entry.st_mode):
            path.stat()  # an error if links form a circle
            check_way(path.parent / path.readlink(), sticky=sticky)


def _others_can_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(group: int) -> bool:
    """Return whether a group is this user's private group, which many systems create for a user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    named_alike = (found.gr_gid, found.gr_name) == (user.pw_gid, user.pw_name)
    return named_alike and set(found.gr_mem) <= {user.pw_name}


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"
