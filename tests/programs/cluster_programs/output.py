"""A file for a program's replies to its test, separate from all other output."""

from __future__ import annotations

import os
from typing import TextIO


def take_stdout() -> TextIO:
    """Return standard output as a file, and redirect all other output to standard error."""
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return kept
