"""Test that no resource use grows from epoch to epoch; a short form of ``make endurance``."""

import sys

import endurance
import pytest

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.mark.parametrize("head_address", ["local", "processes"])
def test_nothing_grows_from_epoch_to_epoch(head_address: str) -> None:
    assert endurance.grown(endurance.run(60, 50, head_address)) == []
