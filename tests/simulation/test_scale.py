"""Tests of the simulation of many nodes, at a small size."""

from __future__ import annotations

import json

import pytest

from simulation import scale
from simulation.scale import Setting, Times, play_loader, play_loss, play_ranks


@pytest.fixture(scope="module")
def times() -> Times:
    return Times.measured()


def test_a_loader_delivers_what_its_workers_make(times: Times) -> None:
    found = play_loader(Setting(nodes=4, cores=2, rounds=16), times)
    assert 0.8 < found["batches_per_s"] / found["ideal_per_s"] <= 1.05
    assert 0 < found["actor_busy"] < 0.5


def test_a_busy_pipeline_actor_limits_the_rate(times: Times) -> None:
    found = play_loader(Setting(nodes=16, cores=2, work=0.05, rounds=12), times)
    assert found["actor_busy"] > 0.8
    assert found["batches_per_s"] <= 1.1 / (times.request_s + times.block_s)


def test_a_longer_window_hides_stragglers(times: Times) -> None:
    rates = [
        play_loader(Setting(2, 4, 1.0, True, factor, rounds=48), times)["batches_per_s"]
        for factor in (1, 8)
    ]
    assert rates[0] < rates[1]


def test_the_batches_of_a_lost_node_are_delivered(times: Times) -> None:
    found = play_loss(Setting(4, 2, load=0.8, rounds=12), times)
    assert found["lost"] > 0
    assert found["repaired_s"] > scale.NOTICE_S
    assert found["longest_wait_s"] > 0


def test_ranks_wait_for_the_slowest_one(times: Times) -> None:
    setting = Setting(1, 4, stragglers=True, load=0.8, rounds=12)
    found = play_ranks(setting, times, ranks=3)
    assert found["wait_s"]["99"] >= found["rank_wait_s"]["99"]
    alone = play_ranks(setting, times, ranks=1)
    assert alone["wait_s"] == alone["rank_wait_s"]
    assert found["mean_wait_s"] >= alone["mean_wait_s"]


def test_a_quantile_lies_between_the_measured_ones(times: Times) -> None:
    record = json.loads((scale.RESULTS / "simulated/service_times.json").read_text())
    measured = record["seconds"]["call_s"]
    assert times.at("call_s", 0.0) == measured["0"]
    assert times.at("call_s", 1.0) == measured["100"]
    assert measured["50"] <= times.at("call_s", 0.55) <= measured["60"]
