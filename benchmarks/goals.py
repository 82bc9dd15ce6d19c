"""The goals of the benchmarks and their verdicts: the ``"goals"`` of every record."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Subject = Literal[
    "throughput", "first batch", "latency", "memory", "nodes", "training process", "storage"
]
Form = Literal["ratio", "seconds", "ms", "percent", "MB", "kB"]
Relation = Literal[">=", "<="]

# The heading of each subject, in the order of the report.
HEADINGS: Mapping[Subject, str] = {
    "throughput": "Throughput",
    "first batch": "First batch of a warm epoch",
    "latency": "Latency and start",
    "memory": "Memory",
    "nodes": "Nodes",
    "training process": "Cost for the training process",
    "storage": "Storage and cache",
}

UNITS: Mapping[Form, str] = {
    "ratio": "",
    "seconds": " s",
    "ms": " ms",
    "percent": " %",
    "MB": " MB",
    "kB": " kB",
}
DECIMALS: Mapping[Form, int] = {
    "ratio": 2,
    "seconds": 2,
    "ms": 1,
    "percent": 1,
    "MB": 0,
    "kB": 0,
}

# Part of a goal's note if the busy machine, and not dpex, determined the figure.
VOID = "void, because the machine was busy"


@dataclass(frozen=True)
class Goal:
    """A figure with its bound.

    Attributes:
        subject: What the figure is about; the report has a table for each subject.
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

    subject: Subject
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
        subject: Subject,
        what: str,
        values: Sequence[float],
        relation: Relation,
        goal: float,
        form: Form,
        note: str | None = None,
    ) -> "Goal":
        """Make a goal from some values; the value that counts is their median."""
        return cls(
            subject,
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
    def short(self) -> str:
        """The value with its unit."""
        return f"{rounded(self.value, DECIMALS[self.form])}{UNITS[self.form]}"

    @property
    def bound(self) -> str:
        """The bound as text, with relation and unit."""
        sign = "≥" if self.relation == ">=" else "≤"
        return f"{sign} {rounded(self.goal, DECIMALS[self.form])}{UNITS[self.form]}"


def rounded(value: float, decimals: int) -> str:
    """Format a number with this many decimals, and without the sign of a negative zero."""
    return f"{value:z,.{decimals}f}"


def worst(points: Mapping[str, Goal]) -> Goal:
    """Return one goal for several points of the same figure.

    Args:
        points: The goal at each point, by the name of the point. They differ only in their values
            and notes.

    Returns:
        The goal of the worst point, with the other points in its note. Void points count only if
        all points are void.
    """
    names = [name for name, goal in points.items() if not goal.void] or list(points)
    sign = 1 if points[names[0]].relation == ">=" else -1
    name = min(names, key=lambda name: sign * points[name].value)
    others = ", ".join(
        f"{other} {'void' if goal.void else goal.short}"
        for other, goal in points.items()
        if other != name
    )
    found = points[name]
    note = f"; {found.note}" if found.note else ""
    return replace(found, note=f"worst: {name}; {others}{note}")


def goals_of(record: Mapping[str, Any]) -> list[Goal]:
    """Return the goals of a record, as read from JSON."""
    return [Goal(**goal) for goal in record.get("goals", ())]


def by_subject(
    records: Iterable[Mapping[str, Any]],
) -> dict[Subject, list[tuple[str, Goal]]]:
    """Return the goals of some records by subject, each with the name of its case."""
    goals = [(record["case"], goal) for record in records for goal in goals_of(record)]
    return {
        subject: found
        for subject in HEADINGS
        if (found := [(case, goal) for case, goal in goals if goal.subject == subject])
    }


def goals_report(records: Iterable[Mapping[str, Any]], folder: str) -> str:
    """Return the tables of all goals of some records, one for each subject.

    Args:
        records: Records, as the benchmarks write them.
        folder: Folder of their JSON, for the links.

    Returns:
        Markdown: a heading and a table for each subject.
    """
    return "\n\n".join(
        f"### {HEADINGS[subject]}\n\n{table_of(goals, folder)}"
        for subject, goals in by_subject(records).items()
    )


def goals_table(records: Iterable[Mapping[str, Any]]) -> str:
    """Return one table of all goals of some records; empty if there are no goals."""
    goals = [pair for pairs in by_subject(records).values() for pair in pairs]
    return table_of(goals) if goals else ""


def table_of(goals: Iterable[tuple[str, Goal]], folder: str | None = None) -> str:
    """Return the table of some goals, with their verdicts.

    Args:
        goals: Goals, each with the name of its case.
        folder: Folder of the cases' JSON, for a link in each row; None for no links.

    Returns:
        Markdown, one row per goal.
    """
    rows = ["| what | median [range] | goal | verdict | record |", "|---|---|---|---|---|"]
    for case, goal in goals:
        name = case if folder is None else f"[`{case}.json`]({folder}/{case}.json)"
        note = f"; {goal.note}" if goal.note else ""
        verdict = "**missed**" if goal.verdict == "missed" else goal.verdict
        rows.append(f"| {goal.what}{note} | {goal.figure} | {goal.bound} | {verdict} | {name} |")
    return "\n".join(rows)
