"""Errors that are raised later than they are known.

An error that has been raised holds, through its traceback, the frames that it passed, and these
hold the iterator. Where one of them holds the error, or the iterator does, all of it stays until
the garbage collector comes: a thread that receives, tasks that go on, batches that nobody reads.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

__all__ = ["KeptError", "Reraises", "reraise"]


class Reraises(Protocol):
    """What stands where a batch would: a ``KeptError``, or torch's ``ExceptionWrapper``."""

    def reraise(self) -> None:
        """Raise the error."""


class KeptError:
    """An error of our own, to be raised as often as need be, each time as a new one.

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
    """Raise an error that stands where a batch would."""
    try:
        kept.reraise()
    except BaseException as error:
        # A frame of torch's wrapper holds the error.
        error.__traceback__ = None
        raise
