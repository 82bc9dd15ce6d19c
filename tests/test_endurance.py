"""Test that no resource use grows from epoch to epoch; a short form of ``make endurance``."""

import sys

import endurance
import pytest

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_nothing_grows_from_epoch_to_epoch() -> None:
    assert endurance.grown(endurance.run(epochs=60, batches=50)) == []
