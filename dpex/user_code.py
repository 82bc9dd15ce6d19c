"""The user's code in a stack: what is neither dpex nor installed nor in the standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

__all__ = ["stacklevel"]

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


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(Path(path).parts)
