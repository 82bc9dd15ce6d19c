"""Frames of the user's code: not of dpex, installed packages or the standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

__all__ = ["stacklevel", "traceback_from"]

_LIBRARIES = (str(Path(__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<frozen")
_INSTALLED = {"site-packages", "dist-packages"}


def stacklevel() -> int:
    """Return the ``stacklevel`` at which ``warnings.warn`` in the caller names the user's line.

    If the stack has no code of the user, the level is that of the outermost frame.
    """
    frame, level = sys._getframe(1), 1
    while _is_library(frame.f_code.co_filename) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def traceback_from(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of the user's code on, or None without one."""
    while trace is not None and _is_library(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(Path(path).parts)
