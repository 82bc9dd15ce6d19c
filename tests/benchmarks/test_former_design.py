"""Tests of the report's note on records of dpex's former design."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import former_design

NEW: dict[str, Any] = {"case": "tiny", "dpex_address": "processes"}
OLD: dict[str, Any] = {"case": "jpeg"}
ON_A_CLUSTER: dict[str, Any] = {"case": "scale"}


@pytest.mark.parametrize("records", [[], [NEW], [NEW, ON_A_CLUSTER]])
def test_new_records_and_those_of_clusters_need_no_note(records: list[dict[str, Any]]) -> None:
    assert former_design(records) == ""


def test_a_record_of_the_former_design_is_named() -> None:
    note = former_design([NEW, OLD, ON_A_CLUSTER])
    assert "`jpeg`" in note
    assert "tiny" not in note
    assert "scale" not in note
