"""What the figures of two revisions say of each other: the order of turns, the rule, its chance.

It imports nothing of torch and Ray, and starts nothing.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["old", "new"]
Verdict = Literal["worse", "better", "within"]


@dataclass(frozen=True)
class Figure:
    """A number that each turn of a case gives.

    Attributes:
        name: What is measured, with its unit.
        more_is_better: Whether a greater value is the better one.
        form: Format of a value in the table.
    """

    name: str
    more_is_better: bool
    form: str = ".2f"


def turns(rounds: int, warm_ups: int = 0) -> Iterator[tuple[int, Side]]:
    """Order the turns so that neither side always runs first.

    Args:
        rounds: Counted rounds.
        warm_ups: Rounds before them that do not count.

    Yields:
        The number of the round, below 1 if it does not count, and the side whose turn it is.
    """
    for number in range(1 - warm_ups, rounds + 1):
        sides: tuple[Side, Side] = ("old", "new") if number % 2 else ("new", "old")
        for side in sides:
            yield number, side


def verdict(figure: Figure, old: Sequence[float], new: Sequence[float]) -> Verdict:
    """Compare the median of the new rounds with the range of the old ones.

    Args:
        figure: What the values are of.
        old: One value for each round of the old revision.
        new: The same of the new one.

    Returns:
        ``"worse"`` or ``"better"`` if the new median lies outside of the range of the old rounds,
        on its bad or its good side; else ``"within"``.
    """
    median = statistics.median(new)
    if min(old) <= median <= max(old):
        return "within"
    return "better" if (median > max(old)) == figure.more_is_better else "worse"


def chance_of_worse(rounds: int) -> float:
    """Return how probable ``"worse"`` is for one figure if old and new are the same code.

    With an odd number of rounds, the new median is on the bad side of all old values exactly if
    more than half of the new values are. All orders of the values are equally probable.

    Args:
        rounds: Of each side; for an even number the result is an upper bound.
    """
    chance = 1.0
    for place in range((rounds + 1) // 2):
        chance *= (rounds - place) / (2 * rounds - place)
    return chance
