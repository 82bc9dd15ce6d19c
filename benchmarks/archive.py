"""The archive of other runs: ``results/other_runs.csv``, with one row per figure.

``python -m benchmarks.archive 2026-11-26-amd`` adds the present records under that name. Run it
before new records replace them.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.commands import command_of
from benchmarks.goals import goals_of
from benchmarks.harness import comparisons, spread

RESULTS = Path(__file__).parent / "results"
ARCHIVE = RESULTS / "other_runs.csv"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A figure of a run.

    Attributes:
        run: Name of the run.
        date: Day of the record that has the figure.
        cpu: Processor of the machine.
        kind: ``"goal"``, ``"ratio"`` (dpex over torch) or ``"command"``.
        name: The goal, the workload or the case.
        value: The figure, or the command.
        verdict: Verdict on a goal; empty for other kinds.
    """

    run: str
    date: str
    cpu: str
    kind: str
    name: str
    value: str
    verdict: str = ""


@dataclass
class Run:
    """The figures of a run.

    Attributes:
        dates: Days of its records.
        cpus: Processors of its records.
        goals: Figure and verdict of each goal.
        ratios: Ratio of dpex to torch for each processor and workload.
        commands: Command of each case.
    """

    dates: set[str] = field(default_factory=set)
    cpus: set[str] = field(default_factory=set)
    goals: dict[str, tuple[str, str]] = field(default_factory=dict)
    ratios: dict[str, dict[str, str]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)


def rows_of(run: str, records: Iterable[Record]) -> Iterator[Row]:
    """Yield the figures of some records.

    Args:
        run: Name of the run that made the records.
        records: The records.
    """
    for record in records:
        where = (run, record["date"], record["cpu"])
        yield Row(*where, "command", record["case"], command_of(record))
        for goal in goals_of(record):
            yield Row(*where, "goal", goal.what, goal.figure, goal.verdict)
        for name, part in comparisons(record):
            if "torch" in part["dpex_over"]:
                yield Row(*where, "ratio", name, spread(part["dpex_over"]["torch"]))


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """Group rows by run, and return the runs in the order of their names."""
    runs: dict[str, Run] = {}
    for row in rows:
        run = runs.setdefault(row.run, Run())
        run.dates.add(row.date)
        run.cpus.add(row.cpu)
        if row.kind == "goal":
            run.goals[row.name] = row.value, row.verdict
        elif row.kind == "ratio":
            run.ratios.setdefault(row.cpu, {})[row.name] = row.value
        else:
            run.commands[row.name] = row.value
    return [runs[name] for name in sorted(runs)]


def read_archive() -> list[Run]:
    """Return the runs of the archive."""
    with ARCHIVE.open(newline="") as file:
        return runs_of(Row(**row) for row in csv.DictReader(file))


def add_to_archive(run: str, records: Sequence[Record]) -> None:
    """Append a run to the archive.

    Args:
        run: Name of the run.
        records: Its records.
    """
    new = not ARCHIVE.exists()
    with ARCHIVE.open("a", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(map(asdict, rows_of(run, records)))


if __name__ == "__main__":
    add_to_archive(sys.argv[1], [json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json"))])
