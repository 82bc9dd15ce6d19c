"""The tables of ``docs/faults.md``, from the records of ``make soak`` and ``make endurance``."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

__all__ = ["endurance_table", "faults_table"]

_PROCESS_COLUMNS = ("threads", "files", "processes")
_RAY_TABLES = ("actors", "groups", "jobs", "workers", "tasks", "keys")


def faults_table(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of the runs with faults, one row for each kind of fault."""
    rows = [
        "| fault | runs | batches compared | lost | delivered twice | changed "
        "| recovery, median (most) |",
        "|---|---|---|---|---|---|---|",
    ]
    by_fault: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_fault.setdefault(run["fault"], []).append(run)
    for fault, its_runs in by_fault.items():
        waits = [run["recovery_s"] for run in its_runs]
        counts = ("batches", "lost", "doubled", "changed")
        sums = (f"{sum(run[count] for run in its_runs):,}" for count in counts)
        recovery = f"{median(waits):.1f} s ({max(waits):.1f} s)"
        rows.append(f"| {fault} | {len(its_runs)} | {' | '.join(sums)} | {recovery} |")
    return "\n".join(rows)


def endurance_table(looks_by_run: Mapping[str, list[Mapping[str, Any]]]) -> str:
    """Return a table with the first and the last snapshot of each kind of process."""
    rows = [
        "| run | kind of process | own memory, the most of one | threads | files | processes "
        "| entries in Ray's tables |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, looks in looks_by_run.items():
        first, last = looks[0]["held"], looks[-1]["held"]
        for kind, after in last.items():
            before = first[kind]
            cells = [f"{before['bytes'] / 1e6:,.0f} → {after['bytes'] / 1e6:,.0f} MB"]
            cells += [f"{before[column]} → {after[column]}" for column in _PROCESS_COLUMNS]
            tables = [table for table in _RAY_TABLES if table in after]
            cells.append(", ".join(f"{t} {before[t]} → {after[t]}" for t in tables))
            rows.append(f"| {run} | {kind} | {' | '.join(cells)} |")
    return "\n".join(rows)
