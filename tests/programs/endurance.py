"""Whether anything grows in 300 epochs, and in one of 100,000 batches: ``make endurance``.

What the processes hold is looked at ten times in the course of each. The table goes into
``docs/faults.md``, every look into ``docs/endurance.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cluster_programs import ROOT, run_program, workplace
from tables import put_between

PROGRAM = Path(__file__).parent / "endurance_program.py"
RUNS = {"300 epochs of 200 batches": (300, 200), "an epoch of 100,000 batches": (1, 100_000)}
RUN_SECONDS = 3_600
# What may come and go: allocators keep some memory, and Ray some threads and connections.
MEMORY_SHARE, MEMORY_BYTES, OTHERS = 0.1, 10 << 20, 8
OF_PROCESSES = ("threads", "files", "processes")
OF_TABLES = ("actors", "groups", "jobs", "workers", "tasks", "keys")


def run(epochs: int, batches: int) -> list[dict[str, Any]]:
    """Return the looks of one run."""
    with workplace() as place:
        out = place / "looks.json"
        arguments = (PROGRAM, str(epochs), str(batches), str(out))
        run_program(*arguments, place=place, seconds=RUN_SECONDS).check_returncode()
        looks: list[dict[str, Any]] = json.loads(out.read_text())
        return looks


def rows(name: str, looks: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Lay a run out, a line for each kind of process; also returns what has grown."""
    lines: list[str] = []
    grown: list[str] = []
    # What the first tenth brings with it stays.
    first, last = looks[0]["held"], looks[-1]["held"]
    for kind, after in last.items():
        before = first[kind]
        cells = [f"{before['bytes'] / 1e6:,.0f} → {after['bytes'] / 1e6:,.0f} MB"]
        cells += [f"{before[what]} → {after[what]}" for what in OF_PROCESSES]
        tables = [what for what in OF_TABLES if what in after]
        cells.append(", ".join(f"{what} {before[what]} → {after[what]}" for what in tables))
        grown += [
            f"{name}: {what} of {kind}"
            for what in (*OF_PROCESSES, *OF_TABLES)
            if after.get(what, 0) > before.get(what, 0) + OTHERS
        ]
        if after["bytes"] > (1 + MEMORY_SHARE) * before["bytes"] + MEMORY_BYTES:
            grown.append(f"{name}: memory of {kind}")
        lines.append(f"| {name} | {kind} | {' | '.join(cells)} |")
    return lines, grown


def main() -> None:
    lines = [
        "| run | kind of process | own memory, the most of one | threads | files | processes "
        "| entries in Ray's tables |",
        "|---|---|---|---|---|---|---|",
    ]
    records, all_grown = {}, []
    for name, (epochs, batches) in RUNS.items():
        records[name] = run(epochs, batches)
        more, grown = rows(name, records[name])
        lines += more
        all_grown += grown
        print(*more, sep="\n", flush=True)
    (ROOT / "docs" / "endurance.json").write_text(json.dumps(records, indent=1) + "\n")
    put_between("endurance", "\n".join(lines), ROOT / "docs" / "faults.md")
    if all_grown:
        sys.exit(f"has grown: {', '.join(all_grown)}")


if __name__ == "__main__":
    main()
