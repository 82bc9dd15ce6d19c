"""The verdicts of a comparison of two revisions: the order of measurements, the rule, its chance.

This module imports nothing of torch and Ray, and starts nothing.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["old", "new"]
Verdict = Literal["worse", "better", "within"]


@dataclass(frozen=True)
class Figure:
    """A number that each measurement of a case gives.

    Attributes:
        name: Description, with unit.
        more_is_better: Whether a larger value is better.
        form: Format of a value in the table.
    """

    name: str
    more_is_better: bool
    form: str = ".2f"


def turns(rounds: int, warm_ups: int = 0) -> Iterator[tuple[int, Side]]:
    """Order the measurements so that neither side always runs first.

    Args:
        rounds: Number of counted rounds.
        warm_ups: Number of rounds before them that do not count.

    Yields:
        The number of the round and the side to measure. The number is below 1 if the round does not
        count.
    """
    for number in range(1 - warm_ups, rounds + 1):
        sides: tuple[Side, Side] = ("old", "new") if number % 2 else ("new", "old")
        for side in sides:
            yield number, side


def verdict(figure: Figure, old: Sequence[float], new: Sequence[float]) -> Verdict:
    """Compare the median of the new rounds with the range of the old rounds.

    Args:
        figure: Figure that the values belong to.
        old: One value for each round of the old revision.
        new: One value for each round of the new revision.

    Returns:
        ``"worse"`` or ``"better"`` if the new median is outside the range of the old rounds, on its
        bad or its good side; else ``"within"``.
    """
    median = statistics.median(new)
    if min(old) <= median <= max(old):
        return "within"
    return "better" if (median > max(old)) == figure.more_is_better else "worse"


def chance_of_worse(rounds: int) -> float:
    """Return the probability of ``"worse"`` for one figure if old and new are the same code.

    All orders of the values are equally probable. Assume that the number of rounds is odd. Then the
    verdict is ``"worse"`` exactly if more than half of the new values are on the bad side of all
    old values.

    Args:
        rounds: Number of rounds of each side; for an even number, the result is an upper bound.
    """
    chance = 1.0
    for place in range((rounds + 1) // 2):
        chance *= (rounds - place) / (2 * rounds - place)
    return chance
