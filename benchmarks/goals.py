"""The goals of the benchmarks and their verdicts: the ``"goals"`` of every record."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["ratio", "seconds", "ms", "percent", "MB", "kB", "count"]
Relation = Literal[">=", "<="]

UNITS: Mapping[Form, str] = {
    "ratio": "",
    "seconds": " s",
    "ms": " ms",
    "percent": " %",
    "MB": " MB",
    "kB": " kB",
    "count": "",
}
DECIMALS: Mapping[Form, int] = {
    "ratio": 2,
    "seconds": 2,
    "ms": 1,
    "percent": 1,
    "MB": 0,
    "kB": 0,
    "count": 0,
}

# Part of a goal's note if the busy machine, and not dpex, determined the figure.
VOID = "void, for the machine was busy"


@dataclass(frozen=True)
class Goal:
    """A figure with its bound.

    Attributes:
        what: Description of the figure.
        value: The measured value, usually the median.
        min: Smallest value of all rounds.
        max: Largest value of all rounds.
        goal: The bound.
        relation: On which side of the bound the value must be.
        form: Unit of the numbers. 3 % is 3.0 with ``"percent"``; MB are 10**6 bytes, and kB are
            10**3.
        note: Information that a reader of the figure needs.
    """

    what: str
    value: float
    min: float
    max: float
    goal: float
    relation: Relation
    form: Form
    note: str | None = None

    @classmethod
    def of(
        cls,
        what: str,
        values: Sequence[float],
        relation: Relation,
        goal: float,
        form: Form,
        note: str | None = None,
    ) -> "Goal":
        """Make a goal from some values; the value that counts is their median."""
        return cls(
            what,
            statistics.median(values),
            min(values),
            max(values),
            goal,
            relation,
            form,
            note,
        )

    @property
    def met(self) -> bool:
        """Whether the value is on the right side of the bound, without rounding."""
        return self.value >= self.goal if self.relation == ">=" else self.value <= self.goal

    @property
    def void(self) -> bool:
        """Whether the figure says nothing about dpex; it is then neither met nor missed."""
        return self.note is not None and VOID in self.note

    @property
    def verdict(self) -> str:
        """``"met"``, ``"missed"`` or ``"void"``."""
        if self.void:
            return "void"
        return "met" if self.met else "missed"

    @property
    def figure(self) -> str:
        """The value with its range and unit; with one more digit if it rounds to the goal."""
        decimals = DECIMALS[self.form]
        same = rounded(self.value, decimals) == rounded(self.goal, decimals)
        if same and self.value != self.goal:
            decimals += 1
        value, least, most = (rounded(v, decimals) for v in (self.value, self.min, self.max))
        return f"{value} [{least}, {most}]{UNITS[self.form]}"

    @property
    def bound(self) -> str:
        """The bound as text, with relation and unit."""
        sign = "≥" if self.relation == ">=" else "≤"
        return f"{sign} {rounded(self.goal, DECIMALS[self.form])}{UNITS[self.form]}"


def rounded(value: float, decimals: int) -> str:
    """Format a number with this many decimals."""
    return f"{value:,.{decimals}f}"


def goals_of(record: Mapping[str, Any]) -> list[Goal]:
    """Return the goals of a record, as read from JSON."""
    return [Goal(**goal) for goal in record.get("goals", ())]


def goals_table(records: Iterable[Mapping[str, Any]], folder: str | None = None) -> str:
    """Return the table of all goals of some records, with their verdicts.

    Args:
        records: Records, as the benchmarks write them.
        folder: Folder of their JSON, for a link in each row; None for no links.

    Returns:
        Markdown, one row per goal; empty if there are no goals.
    """
    rows = []
    for record in records:
        case = record["case"]
        name = case if folder is None else f"[`{case}.json`]({folder}/{case}.json)"
        for goal in goals_of(record):
            note = f"; {goal.note}" if goal.note else ""
            verdict = "**missed**" if goal.verdict == "missed" else goal.verdict
            rows.append(
                f"| {goal.what}{note} | {goal.figure} | {goal.bound} | {verdict} | {name} |"
            )
    head = ["| what | median [range] | goal | verdict | record |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) if rows else ""
