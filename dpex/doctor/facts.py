"""The facts of a report, as lines of text or as one JSON object."""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import dataclass
from typing import Any, TextIO

__all__ = ["Fact", "Output", "Problem"]

_WIDTH = 16


@dataclass(frozen=True)
class Fact:
    """One line of the report.

    Attributes:
        label: The line's first word.
        text: The rest of the line. If it has several lines, each gets the label.
        key: Key of the fact in the JSON object.
        value: Its value there: the same numbers as in the text. None stands for the text.
    """

    label: str
    text: str
    key: str
    value: Any = None


class Problem(Exception):
    """A problem to report.

    Args:
        text: The report's line.
        details: A traceback of the user's code, if that helps.
    """

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


class Output:
    """Writes facts: each as soon as it is known, or all together as JSON.

    Lines for a terminal are wrapped to its width.

    Args:
        out: The file to write to.
        details: The file for tracebacks.
        as_json: Whether to write one JSON object at the end.
    """

    def __init__(self, out: TextIO, details: TextIO, *, as_json: bool) -> None:
        self._out = out
        self._as_json = as_json
        self._facts: dict[str, Any] = {}
        self.details = details

    def write(self, fact: Fact) -> None:
        """Write a fact."""
        self._facts[fact.key] = fact.text if fact.value is None else fact.value
        for line in fact.text.split("\n"):
            self._line(fact.label, line)

    def finish(self, verdicts: list[str], *, ok: bool) -> None:
        """Write the verdicts, which end the report."""
        for verdict in verdicts:
            self._line("verdict", verdict)
        if self._as_json:
            json.dump({**self._facts, "verdict": verdicts, "ok": ok}, self._out, indent=2)
            self._out.write("\n")
            self._out.flush()

    def _line(self, label: str, text: str) -> None:
        if not self._as_json:
            line = f"{label:<{_WIDTH}}{text}"
            if self._out.isatty():
                columns = max(2 * _WIDTH, shutil.get_terminal_size().columns)
                line = textwrap.fill(
                    line, columns, subsequent_indent=" " * _WIDTH, break_on_hyphens=False
                )
            self._out.write(f"{line}\n")
            self._out.flush()
