"""What a benchmark is to reach, and whether it did: the ``"goals"`` of every record."""

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

# In the note of a goal whose figure is the busy machine's and not dpex's.
VOID = "void, for the machine was busy"


@dataclass(frozen=True)
class Goal:
    """One figure beside the bound that it is held to.

    Attributes:
        what: The figure, in words.
        value: What was measured, as a rule the median.
        min: The least value of any round.
        max: The greatest.
        goal: The bound.
        relation: On which side of the bound the value must be.
        form: What the numbers are: percent are 3.0 for 3 %, MB are 10**6 bytes,
            kB 10**3.
        note: What a reader of the figure must know.
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
        """Judge the median of some values."""
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
        """Whether the value is where it must be; unrounded, whatever a table shows."""
        return self.value >= self.goal if self.relation == ">=" else self.value <= self.goal

    @property
    def void(self) -> bool:
        """Whether the figure says nothing of dpex, so that it is neither met nor missed."""
        return self.note is not None and VOID in self.note

    @property
    def verdict(self) -> str:
        """Whether it was met, in a word."""
        if self.void:
            return "void"
        return "met" if self.met else "missed"

    @property
    def figure(self) -> str:
        """The value with its range and unit; with one digit more if it is next to the goal."""
        decimals = DECIMALS[self.form]
        same = rounded(self.value, decimals) == rounded(self.goal, decimals)
        if same and self.value != self.goal:
            decimals += 1
        value, least, most = (rounded(v, decimals) for v in (self.value, self.min, self.max))
        return f"{value} [{least}, {most}]{UNITS[self.form]}"

    @property
    def bound(self) -> str:
        """The goal as one reads it."""
        sign = "≥" if self.relation == ">=" else "≤"
        return f"{sign} {rounded(self.goal, DECIMALS[self.form])}{UNITS[self.form]}"


def rounded(value: float, decimals: int) -> str:
    """Write a number with so many decimals."""
    return f"{value:,.{decimals}f}"


def goals_of(record: Mapping[str, Any]) -> list[Goal]:
    """Read the goals of a record, as JSON gave it."""
    return [Goal(**goal) for goal in record.get("goals", ())]


def goals_table(records: Iterable[Mapping[str, Any]], folder: str | None = None) -> str:
    """Lay out every goal of some records, with its verdict.

    Args:
        records: As the benchmarks write them.
        folder: Where their JSON is, for a link from each row; None for no links.

    Returns:
        Markdown, one row a goal; empty if there are none.
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
