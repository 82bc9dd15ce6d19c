"""Tests of how benchmarks compare two revisions: order of runs, verdict, and chance."""

from itertools import combinations
from statistics import mean, median

import pytest

from benchmarks.verdicts import Figure, chance_of_worse, turns, verdict

RATE = Figure("samples/s", more_is_better=True)
SECONDS = Figure("first batch, s", more_is_better=False)
OLD = [9.0, 10.0, 12.0]


def test_sides_alternate_from_round_to_round() -> None:
    assert list(turns(3)) == [
        (1, "old"),
        (1, "new"),
        (2, "new"),
        (2, "old"),
        (3, "old"),
        (3, "new"),
    ]


def test_warm_ups_come_first_and_keep_the_order_of_counted_rounds() -> None:
    found = list(turns(2, warm_ups=1))
    assert [number for number, _ in found] == [0, 0, 1, 1, 2, 2]
    assert found[2:] == list(turns(2))


@pytest.mark.parametrize(
    ("new", "of_a_rate", "of_seconds"),
    [
        ([8.0, 8.9, 30.0], "worse", "better"),
        ([1.0, 12.1, 13.0], "better", "worse"),
        ([1.0, 9.0, 30.0], "within", "within"),  # on the bound
        ([1.0, 12.0, 30.0], "within", "within"),
        (OLD, "within", "within"),
    ],
)
def test_the_new_median_is_held_to_the_old_range(
    new: list[float], of_a_rate: str, of_seconds: str
) -> None:
    assert verdict(RATE, OLD, new) == of_a_rate
    assert verdict(SECONDS, OLD, new) == of_seconds


@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_the_chance_is_the_share_of_all_orders(rounds: int) -> None:
    places = range(2 * rounds)
    worse = mean(median(new) < min(set(places) - set(new)) for new in combinations(places, rounds))
    assert chance_of_worse(rounds) == pytest.approx(worse)
