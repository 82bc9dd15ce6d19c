"""Tests of ``.ci/prose``: the problems that it finds, and text that passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_programs import ROOT

LONG = "word " * 36


def problems(path: Path, text: str) -> list[str]:
    path.write_text(text)
    command = [sys.executable, str(ROOT / ".ci" / "prose"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == bool(done.stdout), done.stderr
    return [line.partition(": ")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{LONG}.", ["36 words: word word word word word word word word ..."]),
        (f"{LONG.strip()[:-5]}. Another one.", []),
        (f"| a | {LONG} |\n\n```\n{LONG}\n```\n\n`{LONG}`", []),
        (
            f"One line\nof {LONG}\n\nand more.",
            ["39 words: One line of word word word word word ..."],
        ),
    ],
)
def test_a_page(tmp_path: Path, text: str, found: list[str]) -> None:
    assert problems(tmp_path / "page.md", text) == found


def test_a_module(tmp_path: Path) -> None:
    text = f'''
"""A module."""

STRING = "{LONG}"  # a comment: {LONG}


def first() -> None:
    """Do it.

    Args:
        name: {LONG}.
    """
    raise ValueError(f"{{name}} has a value. {LONG}")
'''
    assert problems(tmp_path / "module.py", text) == [
        "37 words: name word word word word word word word ...",
        "38 words: a comment word word word word word word ...",
        "36 words: word word word word word word word word ...",
        "36 words: word word word word word word word word ...",
    ]
