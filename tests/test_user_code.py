"""Tests of the user's line: which code in a stack is neither dpex nor a library."""

from __future__ import annotations

import contextlib
import functools
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import dpex
from dpex.user_code import stacklevel

OURS = str(Path(dpex.__file__).with_name("dataloader.py"))
LIBRARIES = [
    OURS,
    contextlib.__file__,
    sysconfig.get_path("purelib") + "/lightning/loop.py",
    "/home/user/.local/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
    "/usr/lib/python3/dist-packages/torch/utils/data/dataloader.py",
    "<frozen runpy>",
]
USERS = ["/home/user/train.py", "/home/user/dpex/train.py", "<stdin>"]


def function_of(file: str, body: str) -> Callable[..., None]:
    """Return a function of a file; its body, on the second line, may call ``inner``."""
    names = {"warnings": warnings, "stacklevel": stacklevel}
    exec(compile(f"def function(inner=None):\n    {body}", file, "exec"), names)
    return names["function"]  # type: ignore[return-value]


def place_of_warning(*files: str) -> tuple[str, int]:
    """Return the place of a warning of dpex, which a call through the files reaches in order."""
    call = function_of(OURS, "warnings.warn('text', stacklevel=stacklevel())")
    for file in reversed(files):
        call = functools.partial(function_of(file, "inner()"), call)
    with pytest.warns(UserWarning, match="text") as caught:
        call()
    return caught[0].filename, caught[0].lineno


@pytest.mark.parametrize("user", USERS)
def test_a_warning_names_the_user_s_line(user: str) -> None:
    assert place_of_warning(user, *LIBRARIES) == (user, 2)
    assert place_of_warning("/home/user/main.py", *LIBRARIES, user, *LIBRARIES) == (user, 2)
