"""Tests of where the workers of dpex's peers run, in this revision and in earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import addresses
from benchmarks.addresses import address_of
from benchmarks.peers import START_ORDER, TURN_ORDER, WITH_RAY


def test_dpex_is_what_a_user_gets_and_local_is_the_pipeline() -> None:
    assert [address_of(peer) for peer in ("dpex", "local")] == ["processes", "local"]


def test_a_revision_without_a_choice_of_a_carrier_had_a_local_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "find_spec", lambda _: None)
    assert [address_of(peer) for peer in ("dpex", "local")] == ["local", "local"]


def test_the_module_that_it_looks_for_exists() -> None:
    source = Path(addresses.__file__).read_text()
    assert 'find_spec("dpex.carriers.choice")' in source
    assert addresses.find_spec("dpex.carriers.choice") is not None


def test_peers_with_ray_start_after_all_others() -> None:
    assert set(START_ORDER) == {*TURN_ORDER, "inline"}
    assert START_ORDER[-len(WITH_RAY) :] == WITH_RAY


def test_a_revision_without_carriers_has_a_local_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises an error for a module whose package does not exist."""

    def found(name: str) -> None:
        if name != "dpex.carriers":
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(addresses, "find_spec", found)
    assert address_of("dpex") == "local"
