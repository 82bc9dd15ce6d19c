"""Messages to the user: the logger ``dpex``, and warnings at the user's line."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings

from dpex import user_code

__all__ = ["announce", "announce_once", "show_messages", "waits", "warn", "warn_once"]

logger = logging.getLogger("dpex")
waits = logging.getLogger("dpex.waits")
"""Logs that a batch, or a step before the first batch, is late."""


class _Stderr(logging.Handler):
    """Writes messages to stderr with the prefix ``dpex:`` unless the program configures logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or _configured():  # None: the program runs without the stream
            return
        text = f"dpex: {self.format(record)}\n"
        with contextlib.suppress(OSError, ValueError):  # nobody reads the pipe, or it is closed
            sys.stderr.write(text)


def _configured() -> bool:
    own = [handler for handler in logger.handlers if not isinstance(handler, _Stderr)]
    return bool(own or logging.root.handlers or not logger.propagate)


def show_messages() -> None:
    """Make the messages of the logger ``dpex`` visible in a program that configures no logging."""
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())


def announce(text: str) -> None:
    """Log a message at level INFO, which is visible even if the program configures no logging.

    ``logging.getLogger("dpex").setLevel(logging.WARNING)`` hides it.
    """
    if logger.level == logging.NOTSET and not _configured():
        logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))
    else:
        logger.info("%s", text)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the user's line."""
    warnings.warn(f"dpex: {text}", category, stacklevel=user_code.stacklevel())


_warned: set[str] = set()


def warn_once(text: str, key: str = "") -> None:
    """Issue a warning once in this process.

    Args:
        text: The warning.
        key: What the warning is about, if its text varies.
    """
    if (key or text) not in _warned:
        _warned.add(key or text)
        warn(text)


announce_once = functools.cache(announce)
"""``announce``, once for each text in this process."""
