"""Standard streams of a process that was started without them, as some services are."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TextIO

__all__ = ["no_stream", "open_missing_streams", "stderr_for_ray"]


def open_missing_streams() -> None:
    """Open the null device in place of each standard stream that is closed, as daemons do.

    Otherwise a socket or a pipe gets the descriptor, and processes that this one starts write
    their output to it. ``sys.stdout`` and the others stay None, and so ``print()`` has no effect.
    """
    # The system gives the lowest free descriptor.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@functools.cache
def no_stream() -> TextIO:
    """Return a text stream that discards its input and stays open."""
    return Path(os.devnull).open("w")


def stderr_for_ray() -> contextlib.AbstractContextManager[object]:
    """Give this process a ``sys.stderr`` inside the context, if it has none.

    Ray passes ``sys.stderr`` to ``faulthandler.enable``, which keeps the descriptor.
    """
    none = sys.stderr is None
    return contextlib.redirect_stderr(no_stream()) if none else contextlib.nullcontext()
