"""Which command made each record: as the record says, or as what it holds tells."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness import command, comparisons

if TYPE_CHECKING:
    from benchmarks.archive import Run

# Counted epochs of each round, where there are several.
EPOCHS_A_ROUND = {"scale": 2}
WITHOUT_ALL_PEERS = {"torch", "dpex", "inline"}

Record = Mapping[str, Any]


def commands_table(records: Iterable[Record], others: "Iterable[Run]", folder: str) -> str:
    """Lay out the command that makes each record, beside those of other runs.

    Args:
        records: The present ones.
        others: Runs of other days or processors.
        folder: Where the present ones are, as seen from the page.

    Returns:
        Markdown, one row a record.
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
    """Give the command of a record; one from before commands were recorded has its rounds."""
    if "command" in record:
        return str(record["command"])
    argv = ["--rounds", str(rounds_of(record))]
    peers = {peer for _, part in comparisons(record) for peer in part["samples_per_s"]}
    return command(record["case"], [*argv, "--all-peers"] if peers - WITHOUT_ALL_PEERS else argv)


def rounds_of(record: Record) -> int:
    """Count the rounds of a record: some figures have several values a round, some have one."""
    fewest = min(len(values) for values in summarised(record))
    return fewest // EPOCHS_A_ROUND.get(record["case"], 1)


def summarised(part: Record) -> Iterator[Sequence[float]]:
    """Give the values behind every summary of a record."""
    if "all" in part:
        yield part["all"]
    for inner in part.values():
        if isinstance(inner, Mapping):
            yield from summarised(inner)
