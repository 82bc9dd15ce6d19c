"""A program that checks that nothing grows in a long run: ``make endurance``.

It runs 300 epochs, and one epoch of 100,000 batches, on a local Ray and on processes. It measures
the processes ten times in each run, and writes all measurements to ``--out``.
``python -m benchmarks.report`` makes the table of ``docs/faults.md`` from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cluster_programs import run_program, workplace

PROGRAM = Path(__file__).parent / "endurance_program.py"
RUNS = {
    "300 epochs of 200 batches": (300, 200, "local"),
    "an epoch of 100,000 batches": (1, 100_000, "local"),
    "300 epochs of 200 batches, on processes": (300, 200, "processes"),
    "an epoch of 100,000 batches, on processes": (1, 100_000, "processes"),
}
RUN_SECONDS = 3_600
# Allowed growth: allocators keep some memory, and Ray keeps some threads and connections.
MEMORY_SHARE, MEMORY_BYTES, OTHERS = 0.1, 10 << 20, 8
COUNTED = ("threads", "files", "processes", "actors", "groups", "jobs", "workers", "tasks", "keys")


def run(epochs: int, batches: int, head_address: str) -> list[dict[str, Any]]:
    """Run the program, and return its measurements."""
    with workplace() as place:
        out = place / "looks.json"
        arguments = (PROGRAM, str(epochs), str(batches), str(out), head_address)
        run_program(*arguments, place=place, seconds=RUN_SECONDS).check_returncode()
        looks: list[dict[str, Any]] = json.loads(out.read_text())
        return looks


def grown(looks: list[dict[str, Any]]) -> list[str]:
    """Return the growth from the first measurement, after a tenth of the run, to the last."""
    found = []
    first, last = looks[0]["held"], looks[-1]["held"]
    for kind, after in last.items():
        before = first[kind]
        found += [
            f"{what} of {kind}: {before[what]} to {after[what]}"
            for what in COUNTED
            if after.get(what, 0) > before.get(what, 0) + OTHERS
        ]
        if after["bytes"] > (1 + MEMORY_SHARE) * before["bytes"] + MEMORY_BYTES:
            found.append(f"memory of {kind}: {before['bytes']:,} to {after['bytes']:,} bytes")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether anything grows.")
    parser.add_argument("--out", type=Path, required=True, help="the record, JSON")
    out: Path = parser.parse_args().out
    records = {name: run(*given) for name, given in RUNS.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(records, indent=1) + "\n")
    if found := [f"{name}: {what}" for name, looks in records.items() for what in grown(looks)]:
        sys.exit(f"has grown: {', '.join(found)}")


if __name__ == "__main__":
    main()
