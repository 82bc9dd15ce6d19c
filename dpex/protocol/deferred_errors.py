"""Errors that dpex detects first and raises later.

A raised exception holds, through its traceback, the frames that it passed, and these frames hold
the iterator. If a frame or the iterator also holds the exception, they form a reference cycle. Then
the receiver thread, the running tasks and unread batches stay until the garbage collector runs.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

__all__ = ["KeptError", "Reraises", "reraise"]


class Reraises(Protocol):
    """An error in place of a batch: a ``KeptError`` or torch's ``ExceptionWrapper``."""

    def reraise(self) -> None:
        """Raise the error."""


class KeptError:
    """A dpex error that can be raised repeatedly, each time as a new exception.

    Args:
        error: The error.
    """

    def __init__(self, error: Exception) -> None:
        self._kind = type(error)
        self._arguments = error.args

    def reraise(self) -> NoReturn:
        """Raise the error."""
        raise self._kind(*self._arguments)


def reraise(kept: Reraises) -> None:
    """Raise an error that is delivered in place of a batch."""
    try:
        kept.reraise()
    except BaseException as error:
        # A frame of torch's ``ExceptionWrapper`` holds the exception: break the cycle.
        error.__traceback__ = None
        raise
