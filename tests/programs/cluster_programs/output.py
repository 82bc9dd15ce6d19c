"""What a program says to the test that started it, apart from what else is printed in it."""

from __future__ import annotations

import os
from typing import TextIO


def take_stdout() -> TextIO:
    """Keep standard output for the caller: what Ray or a task prints goes to standard error."""
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return kept
