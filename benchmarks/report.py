"""The report on all records in the documentation: goals, rates and figures.

``python -m benchmarks.report`` reads ``benchmarks/results``. It replaces the text between the
markers in ``docs/benchmarks.md``, ``docs/scaling.md``, ``docs/faults.md`` and both READMEs. Nobody
edits that text by hand. With ``--check``, the program changes nothing, and fails if a page is out
of date.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.archive import RESULTS, Run, read_archive, rows_of, runs_of
from benchmarks.commands import commands_table
from benchmarks.fault_tables import endurance_table, faults_table
from benchmarks.goals import by_subject, goals_report, goals_table
from benchmarks.harness import comparisons
from benchmarks.peers import TURN_ORDER
from benchmarks.plots import overview, scaling
from benchmarks.scaling_model import scaling_table
from benchmarks.simulation_tables import simulation_names, simulation_table
from benchmarks.training_tables import accuracy_table, speed_table

ROOT = Path(__file__).parents[1]
OVERVIEW = "overview.svg"
SCALING = "scaling.svg"
FAULTS = RESULTS / "faults"
SIMULATED = RESULTS / "simulated/scale.json"
# These cases come first, in this order.
FIRST_CASES = ("tiny", "jpeg", "null", "ragged", "tabular", "latency", "tax")
# Heads of the short report, in the page's language. The last one is repeated for each processor.
SHORT_HEADS = {
    "README.md": (
        "workload",
        "torch, samples/s",
        "dpex, samples/s",
        "dpex/torch, median [range], {cpu}",
    ),
    "README.zh-CN.md": (
        "负载",
        "torch (样本/秒)",
        "dpex (样本/秒)",
        "dpex/torch: 中位数 [范围], {cpu}",
    ),
}

# The note above that table if records of the former design are in it.
FORMER_DESIGN = {
    "README.md": (
        "**The figures of dpex are those of its former design**, whose workers on one machine were "
        "forks under a local Ray. Processes of this machine have not been measured yet."
    ),
    "README.zh-CN.md": (
        "**dpex 的数值来自以前的设计**:当时本机的 worker 是本地 Ray 下的 fork。"
        "本机进程方式尚未重新测量。"
    ),
}

# Cases that measure dpex on a cluster.
ON_CLUSTERS = {"on_node", "scale"}

# Figures that a user may want, and that no benchmark or no record has.
NOT_MEASURED = (
    "The time that a GPU is idle: `make bench-gpu` needs a CUDA device, and has no record yet.",
)

Record = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if that would")
    check = parser.parse_args().check
    records = load(RESULTS)
    if not check:
        overview(records, RESULTS / OVERVIEW)
        [scale] = [record for record in records if record["case"] == "scale"]
        scaling(scale, RESULTS / SCALING)
    for page, name, text in reported(records):
        path = ROOT / page
        found = path.read_text()
        page_filled = filled(found, name, text)
        if page_filled == found:
            continue
        if check:
            sys.exit(f"{page} is not what the records say: run `python -m benchmarks.report`")
        path.write_text(page_filled)


def reported(records: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    """Yield all texts of the report.

    Args:
        records: All records.

    Yields:
        A page's path in the repository, the name of the markers there, and the Markdown.
    """
    others = read_archive()
    yield "docs/benchmarks.md", "goals", full_report(records, others, "../benchmarks/results")
    for page, heads in SHORT_HEADS.items():
        note = FORMER_DESIGN[page]
        yield page, "figures", short_report(records, others, "benchmarks/results", heads, note)
    by_case = {record["case"]: record for record in records}
    if "scale" in by_case:
        yield "docs/scaling.md", "scale", goals_table([by_case["scale"]])
        yield "docs/scaling.md", "model", scaling_table(by_case)
    simulated = json.loads(SIMULATED.read_text())
    for name in simulation_names():
        yield "docs/scaling.md", f"simulated {name}", simulation_table(name, simulated)
    yield "docs/faults.md", "faults", faults_table(json.loads((FAULTS / "soak.json").read_text()))
    endurance = json.loads((FAULTS / "endurance.json").read_text())
    yield "docs/faults.md", "endurance", endurance_table(endurance)


def load(folder: Path) -> list[Record]:
    """Return all records, the best-known cases first."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rank = {case: place for place, case in enumerate(FIRST_CASES)}
    return sorted(records, key=lambda record: rank.get(record["case"], len(rank)))


def filled(page: str, name: str, text: str) -> str:
    """Replace the text between the two markers of a page.

    Args:
        page: Markdown.
        name: Name of the markers, ``<!-- name: begin -->`` and ``<!-- name: end -->``.
        text: The new text.

    Returns:
        The page with the new text.

    Raises:
        ValueError: The page lacks a marker.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page must have {begin} and, behind it, {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def full_report(records: Sequence[Record], others: Sequence[Run], folder: str) -> str:
    """Return the report on all goals, rates, trainings and commands.

    Args:
        records: The present records.
        others: Runs of other days or processors.
        folder: Path of the present records, relative to the page.

    Returns:
        Markdown.
    """
    by_case = {record["case"]: record for record in records}
    goals = [goal for pairs in by_subject(records).values() for _, goal in pairs]
    verdicts = Counter(goal.verdict for goal in goals)
    void = verdicts["void"]
    parts = [
        "## Goals",
        former_design(records),
        f"{verdicts['met']} of {len(goals) - void} met, {void} void. {settings(records)}",
        goals_report(records, folder),
        "### Not measured yet",
        "\n".join(f"- {line}" for line in NOT_MEASURED),
        "## The same on other days and processors",
        other_runs(records, others),
        "## Samples per second",
        peers_table(records),
        "\n".join(absentees(records)),
        "## Accuracy",
        accuracy_table(by_case["accuracy"]),
        "## Training time",
        speed_table(by_case["training_speed"]),
        "## Commands",
        commands_table(records, others, folder),
        "## Figure",
        f"![dpex over torch]({folder}/{OVERVIEW})",
    ]
    return "\n\n".join(part for part in parts if part)


def other_runs(records: Sequence[Record], others: Sequence[Run]) -> str:
    """Return a table of each goal's figures in this run and in other runs.

    Args:
        records: The present records.
        others: Runs of other days or processors.

    Returns:
        Markdown, one row per goal and one column per run.
    """
    bounds = {goal.what: goal.bound for pairs in by_subject(records).values() for _, goal in pairs}
    runs = [*others, *runs_of(rows_of("present", records))]
    heads = [f"{', '.join(sorted(run.dates))}, {', '.join(sorted(run.cpus))}" for run in runs]
    rows = [
        f"| what | goal | {' | '.join(heads)} | verdict |",
        f"|---|---|{'---|' * len(heads)}---|",
    ]
    for what, bound in bounds.items():
        figures = [run.goals.get(what, ("", ""))[0] for run in runs]
        verdicts = [run.goals[what][1] for run in runs if what in run.goals]
        same = len(set(verdicts)) == 1
        verdict = verdicts[0] if same else f"**{', '.join(verdicts)}**"
        rows.append(f"| {what} | {bound} | {' | '.join(figures)} | {verdict} |")
    return "\n".join(rows)


def settings(records: Sequence[Record]) -> str:
    """Return the days, the machines, the versions and the load of the records, as Markdown."""
    places = {
        f"{record['cores']} cores ({record['cpu']}), Python {record['python']}, "
        f"torch {record['versions']['torch']}, Ray {record['versions']['ray']}"
        for record in records
    }
    loads = [record["load_before"][0] for record in records]
    listed = "\n".join(f"- {place}" for place in sorted(places))
    return (
        f"Measured on {days(records)}.\n\n"
        f"{listed}\n\n"
        f"The load average before each was {min(loads):.1f} to {max(loads):.1f}."
    )


def former_design(records: Iterable[Record]) -> str:
    """Return a paragraph about the records of the former design; empty if there are none.

    Their workers on one machine were Ray's. New records say where the workers of dpex run.
    """
    cases = sorted(r["case"] for r in records if "dpex_address" not in r and on_one_machine(r))
    if not cases:
        return ""
    named = ", ".join(f"`{case}`" for case in cases)
    return (
        "**These figures of dpex are those of its former design**, whose workers on one machine "
        "were forks under a local Ray. Now they are processes of this machine without Ray, and "
        f"these cases have not been measured again: {named}."
    )


def on_one_machine(record: Record) -> bool:
    """Return whether the workers of a record's dpex were those of one machine without a cluster."""
    return record["case"] not in ON_CLUSTERS


def days(records: Iterable[Record]) -> str:
    """Return the days on which some records were made, as text."""
    return ", ".join(sorted({record["date"] for record in records}))


def processors(records: Iterable[Record]) -> str:
    """Return the processors on which some records were made, as text."""
    return ", ".join(sorted({record["cpu"] for record in records}))


def peers_table(records: Iterable[Record]) -> str:
    """Return the table of every peer's median rate, one row per comparison."""
    parts = [part for record in records for part in comparisons(record)]
    peers = [peer for peer in TURN_ORDER if any(peer in part["samples_per_s"] for _, part in parts)]
    rows = [
        f"| workload | {' | '.join(f'`{peer}`' for peer in peers)} | limit |",
        f"|---|{'---|' * (len(peers) + 1)}",
    ]
    for name, part in parts:
        rates = [part["samples_per_s"].get(peer) for peer in peers]
        cells = [f"{rate['median']:,.0f}" if rate else "" for rate in rates]
        limit = part["limit_samples_per_s"]
        cells.append(f"{limit:,.0f}" if limit else "")
        rows.append(f"| `{name}`: {part['title']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def absentees(records: Iterable[Record]) -> list[str]:
    """Return a line for each peer that could not take part, with the reason."""
    return [
        f"- `{name}` without `{peer}`: {reason}"
        for record in records
        for name, part in comparisons(record)
        for peer, reason in part["peers_absent"].items()
    ]


def short_report(
    records: Sequence[Record],
    others: Sequence[Run],
    folder: str,
    heads: Sequence[str],
    note: str,
) -> str:
    """Return the table of dpex's ratios to torch, and the overview figure.

    Args:
        records: The present records, whose rates are shown.
        others: Runs of other days or processors; the last run of each processor counts.
        folder: Path of the present records, relative to the page.
        heads: Heads of the table.
        note: Paragraph above the table if some records are those of the former design.

    Returns:
        Markdown.
    """
    present = {
        name: part
        for record in records
        for name, part in comparisons(record)
        if "torch" in part["dpex_over"]
    }
    latest: dict[str, dict[str, str]] = {}
    for row in rows_of("present", records):
        latest.setdefault(row.cpu, {})
        if row.kind == "ratio":
            latest[row.cpu].setdefault(row.name, row.value)
    for run in reversed(others):
        for cpu in sorted(run.cpus):
            latest[cpu] = run.ratios.get(cpu, {}) | latest.get(cpu, {})
    *first, ratio = heads
    columns = [*first, *(ratio.format(cpu=cpu) for cpu in latest)]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, part in present.items():
        rates = [f"{part['samples_per_s'][peer]['median']:,.0f}" for peer in ("torch", "dpex")]
        ratios = [ratios_of_cpu.get(name, "") for ratios_of_cpu in latest.values()]
        rows.append(f"| {' | '.join([part['title'], *rates, *ratios])} |")
    parts = ["\n".join(rows), f"![dpex over torch]({folder}/{OVERVIEW})"]
    if former_design(records):
        parts.insert(0, note)
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
