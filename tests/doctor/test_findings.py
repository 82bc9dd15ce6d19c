"""Tests of the conclusions of ``dpex doctor --loader``, from measurements that are made up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dpex.doctor.findings import Measurements, conclude, describe_sample, describe_speed
from dpex.doctor.fixed_part import FixedPart, RandomSample
from dpex.doctor.loader_trial import Speed
from dpex.doctor.sample_costs import SampleCosts

COMPUTES = SampleCosts(
    samples=100,
    wall_s=0.01,
    cpu_s=0.01,
    queued_s=0.0,
    read_s=0.006,
    transform_s=0.003,
    collate_s=0.001,
    batch_samples=50.0,
    skipped=0,
    fixed=None,
)
WAITS = dataclasses.replace(COMPUTES, cpu_s=0.001)
FIXED = FixedPart(
    transforms=("Resize",),
    has_chain=True,
    later_transforms=1,
    samples=8,
    make_s=0.007,
    load_s=0.001,
    size_bytes=1 << 20,
)


def speed(samples_per_s: float) -> Speed:
    return Speed(
        samples_per_s=samples_per_s,
        counts="steady",
        first_batch_s=2.0,
        later_first_batch_s=0.2,
        epoch_s=None,
        samples=1000,
        encode_s=0.0001,
        receive_s=0.0002,
    )


def found(**changes: Any) -> Measurements:
    usual = Measurements(
        num_workers=2,
        given_workers=2,
        persistent_workers=False,
        length=1024,
        cpus=2,
        nodes=1,
        costs=COMPUTES,
        torch=speed(180),
        dpex=speed(190),
        step_s=None,
    )
    return dataclasses.replace(usual, **changes)


def concluded(**changes: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the facts' values and texts, by key."""
    facts = list(conclude(found(**changes)))
    values = {fact.key: fact.value for fact in facts}
    assert json.loads(json.dumps(values)) == values
    return values, {fact.key: fact.text for fact in facts}


def test_samples_that_compute_are_limited_by_the_cores() -> None:
    values, texts = concluded()
    assert values["limits"]["cpus_samples_per_s"] == pytest.approx(200)
    assert values["limits"]["workers_samples_per_s"] == pytest.approx(200)
    assert values["bound"] == {
        "by": "cpus",
        "loader": "dpex's loader",
        "share": pytest.approx(0.95),
    }
    assert texts["bound"] == "2 cores: dpex's loader reaches 95% of the lower limit"
    assert "step" not in values
    assert "cache" not in values
    assert [line.partition(":")[0] for line in values["advice"]] == ["more nodes"]


def test_samples_that_wait_are_limited_by_num_workers() -> None:
    values, _ = concluded(costs=WAITS)
    assert values["bound"]["by"] == "num_workers"
    assert values["limits"]["cpus_samples_per_s"] == pytest.approx(2000)
    assert values["limits"]["workers_for_all_cpus"] == 20
    [advice] = values["advice"]
    assert advice.startswith("more workers: each adds up to 100 samples/s, until 20 keep all")
    [advice] = concluded(costs=WAITS, step_s=0.1)[0]["advice"]
    assert advice.startswith("num_workers=5;"), "a step of 50 samples in 0.1 s uses 500 samples/s"


def test_a_worker_without_a_core_does_not_wait_for_data() -> None:
    queued = dataclasses.replace(COMPUTES, wall_s=0.04, queued_s=0.03)
    values, _ = concluded(costs=queued)
    assert values["limits"]["workers_samples_per_s"] == pytest.approx(200)
    assert values["bound"]["by"] == "cpus"
    assert "has no core 75%" in describe_sample(queued).text
    assert values["busy"]["queued_share"] == pytest.approx(0.75)
    assert "busy" not in concluded()[0]


def test_a_loader_below_both_limits_is_limited_by_neither() -> None:
    values, texts = concluded(dpex=speed(40), torch=speed(40))
    assert values["bound"]["by"] == "neither"
    assert "0.1 ms to pickle, and this process 0.2 ms to receive" in texts["bound"]


def test_short_epochs_are_limited_by_their_start() -> None:
    short = dataclasses.replace(speed(40), counts="epochs", epoch_s=0.6)
    values, texts = concluded(dpex=short, torch=None)
    assert values["bound"]["by"] == "start"
    assert "dpex's loader has the first batch after 0.20 s of 0.60 s" in texts["bound"]
    assert values["advice"][0].startswith("persistent_workers=True")
    assert not any(
        "persistent" in line
        for line in concluded(dpex=short, torch=None, persistent_workers=True)[0]["advice"]
    )
    long = dataclasses.replace(short, epoch_s=6.0)
    assert concluded(dpex=long, torch=None)[0]["bound"]["by"] == "neither"


def test_on_one_node_the_faster_loader_counts() -> None:
    values, _ = concluded(dpex=speed(100))
    assert values["bound"]["loader"] == "torch's loader"
    assert values["bound"]["by"] == "cpus"
    values, _ = concluded(dpex=speed(100), nodes=2, cpus=4)
    assert values["bound"]["loader"] == "dpex's loader"


def test_a_rate_above_the_limits_says_that_samples_became_cheaper() -> None:
    values, texts = concluded(dpex=speed(500))
    assert values["bound"]["by"] == "unknown"
    assert texts["bound"].startswith("unknown: dpex's loader makes 2.5 times the lower limit")
    assert [line.partition(":")[0] for line in values["advice"]] == ["dpex"]


def test_the_largest_gain_comes_first() -> None:
    costs = dataclasses.replace(WAITS, fixed=FIXED)  # a cache saves 60 %, workers give 10 times
    workers, cache = concluded(costs=costs)[0]["advice"]
    assert workers.startswith("more workers")
    assert "up to 2.5 times the rate for cached samples" in cache
    costs = dataclasses.replace(COMPUTES, cpu_s=0.007, fixed=FIXED)  # workers give 1.5 times
    cache, workers = concluded(costs=costs)[0]["advice"]
    assert workers.startswith("more workers")


def test_of_what_is_enough_for_the_step_the_least_effort_comes_first() -> None:
    whole = dataclasses.replace(
        FIXED, make_s=0.01, load_s=1e-5, transforms=(), has_chain=False, later_transforms=0
    )
    costs = dataclasses.replace(WAITS, fixed=whole)
    cache, workers = concluded(costs=costs)[0]["advice"]
    assert workers.startswith("more workers")
    workers, cache = concluded(costs=costs, step_s=0.1)[0]["advice"]
    assert workers.startswith("num_workers=5")
    assert cache.startswith("cached(dataset)")


def test_a_sample_that_is_random_as_a_whole_may_be_split() -> None:
    *_, last = concluded(costs=dataclasses.replace(COMPUTES, fixed=RandomSample()))[0]["advice"]
    assert last.startswith("MappedDataset(cached(reading), [random transforms]), if only a part")


def test_what_a_cache_saves() -> None:
    costs = dataclasses.replace(COMPUTES, fixed=FIXED)
    values, texts = concluded(costs=costs)
    assert values["cache"]["saved_seconds"] == pytest.approx(0.006)
    assert values["cache"]["size_bytes"] == 1 << 30
    assert texts["cache"].startswith("reading, Resize: the same with two seeds in 8 samples.")
    assert "6 ms of 10 ms" in texts["cache"]
    assert "1.0 GiB" in texts["cache"]
    code = "MappedDataset(cached(MappedDataset(source, [Resize])), [the other transforms])"
    assert values["advice"][0].startswith(code)
    whole = dataclasses.replace(FIXED, transforms=(), has_chain=False, later_transforms=0)
    values, _ = concluded(costs=dataclasses.replace(COMPUTES, fixed=whole))
    assert values["advice"][0].startswith("cached(dataset):")
    little = dataclasses.replace(FIXED, make_s=0.0015)
    assert "cache" not in concluded(costs=dataclasses.replace(COMPUTES, fixed=little))[0]
    tiny = dataclasses.replace(FIXED, make_s=1e-5, load_s=1e-6)
    costs = dataclasses.replace(COMPUTES, wall_s=2e-5, cpu_s=2e-5, fixed=tiny)
    assert "cache" not in concluded(costs=costs)[0], "the lookup takes longer"


def test_what_a_training_step_needs() -> None:
    values, texts = concluded(step_s=0.05)
    assert values["step"] == {
        "needed_samples_per_s": pytest.approx(1000),
        "torch_waiting_share": pytest.approx(0.82),
        "dpex_waiting_share": pytest.approx(0.81),
        "nodes_like_this": 6,
    }
    assert "6 nodes like this one" in texts["step"]
    assert values["advice"][-1].startswith("6 nodes like this one:")
    values, _ = concluded(step_s=1.0)
    assert values["advice"] == ["torch's own loader with num_workers=2: it is as fast as the step"]
    values, _ = concluded(step_s=0.27)
    assert values["advice"] == ["dpex with num_workers=2: it is as fast as the step"]


def test_on_a_cluster_the_limit_is_that_of_all_nodes() -> None:
    values, texts = concluded(
        cpus=64, nodes=4, num_workers=64, given_workers=64, dpex=speed(6000), step_s=0.005
    )
    assert values["limits"]["cpus_samples_per_s"] == pytest.approx(6400)
    assert texts["bound"].startswith("64 CPUs of 4 nodes: dpex's loader reaches 94%")
    assert "nodes_like_this" not in values["step"]
    assert values["advice"][0].startswith("dpex: 33.33 times the rate of torch's loader")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"given_workers": 0}, "num_workers=2: with 0, the training loop"),
        ({"torch": speed(100)}, "dpex: 1.90 times the rate of torch's loader"),
        ({"dpex": speed(80), "torch": speed(190)}, "torch's own loader on one node: dpex reaches"),
        ({"dpex": None}, "more nodes"),
    ],
)
def test_advice(changes: dict[str, Any], said: str) -> None:
    assert concluded(**changes)[0]["advice"][0].startswith(said)


def test_without_any_loader_that_works_there_are_still_limits() -> None:
    values, _ = concluded(torch=None, dpex=None)
    assert "limits" in values
    assert "bound" not in values
    assert values["advice"] == ["nothing: no setting that this report measures helps"]


def test_costs_that_no_sample_has_are_not_named() -> None:
    text = describe_sample(dataclasses.replace(COMPUTES, transform_s=0.0)).text
    assert "10 ms in one worker process: reading 60%, collate_fn 10%." in text
    assert "computes 100%" in text
    assert "transforms" not in text
    assert "waits" not in text
    text = describe_sample(dataclasses.replace(WAITS, skipped=3)).text
    assert "waits 90%" in text
    assert "; 3 skipped" in text


def test_a_speed_says_how_it_was_counted() -> None:
    fact = describe_speed("dpex", speed(1234.5), num_workers=2)
    assert fact.label == "dpex's loader"
    assert fact.text == (
        "1,234 samples/s after the first batches, num_workers=2; first batch after 2.00 s, in "
        "later epochs after 0.20 s"
    )
    assert fact.value["samples_per_s"] == 1234.5
    assert describe_speed("given", speed(1), num_workers=0).label == "as given"
