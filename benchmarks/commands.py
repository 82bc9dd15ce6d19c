"""The command that made each record: as recorded, or derived from the figures of the record."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness import command, comparisons

if TYPE_CHECKING:
    from benchmarks.archive import Run

# Number of counted epochs in a round, for cases with more than one.
EPOCHS_A_ROUND = {"scale": 2}
WITHOUT_ALL_PEERS = {"torch", "dpex", "inline"}

Record = Mapping[str, Any]


def commands_table(records: Iterable[Record], others: "Iterable[Run]", folder: str) -> str:
    """Return the table of the commands of all records, beside those of other runs.

    Args:
        records: The present records.
        others: Runs of other days or processors.
        folder: Path of the present records, relative to the page.

    Returns:
        Markdown, one row per record.
    """
    runs = [{case: f"`{made_by}`" for case, made_by in run.commands.items()} for run in others]
    rows = ["| record | command | in other runs |", "|---|---|---|"]
    for record in records:
        case, now = record["case"], f"`{command_of(record)}`"
        before = ["the same" if run[case] == now else run[case] for run in runs if case in run]
        beside = "the same" if set(before) == {"the same"} else ", ".join(before)
        rows.append(f"| [`{case}.json`]({folder}/{case}.json) | {now} | {beside} |")
    return "\n".join(rows)


def command_of(record: Record) -> str:
    """Return the command of a record; if it has none, derive the command from the figures."""
    if "command" in record:
        return str(record["command"])
    argv = ["--rounds", str(rounds_of(record))]
    peers = {peer for _, part in comparisons(record) for peer in part["samples_per_s"]}
    return command(record["case"], [*argv, "--all-peers"] if peers - WITHOUT_ALL_PEERS else argv)


def rounds_of(record: Record) -> int:
    """Return the number of rounds of a record.

    Some figures have several values per round, and others have one. So the smallest number counts.
    """
    fewest = min(len(values) for values in summarised(record))
    return fewest // EPOCHS_A_ROUND.get(record["case"], 1)


def summarised(part: Record) -> Iterator[Sequence[float]]:
    """Yield the values of every summary in a record."""
    if "all" in part:
        yield part["all"]
    for inner in part.values():
        if isinstance(inner, Mapping):
            yield from summarised(inner)
