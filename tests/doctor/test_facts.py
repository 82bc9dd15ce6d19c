"""Tests of the lines of ``dpex doctor``."""

from __future__ import annotations

import io

import pytest

from dpex.doctor.facts import Fact, Output

LONG = Fact("sample", "11 ms in one worker process: " + "reading 100%, " * 10, "sample")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_wrapped_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    file, terminal = io.StringIO(), Terminal()
    for out in (file, terminal):
        Output(out, out, as_json=False).write(LONG)
    assert file.getvalue() == f"sample          {LONG.text}\n"
    first, *others = terminal.getvalue().splitlines()
    assert first.startswith("sample          11 ms")
    assert len(others) > 1
    assert all(line.startswith(" " * 16) and len(line) <= 60 for line in others)
