"""Tests of a pipeline's Ray Dataset and of the jobs in the object store."""

from __future__ import annotations

import multiprocessing
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("shared_ray")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_cpus": 2, "memory": 1 << 20, "resources": {"disk": 1}},
    {"label_selector": {"kind": "cpu"}, "fallback_strategy": [{"label_selector": {}}]},
    {"accelerator_type": "A100", "runtime_env": {"env_vars": {"A": "1"}}},
]


@pytest.mark.parametrize("in_actors", [False, True])
@pytest.mark.parametrize(("leases", "further"), [(1, False), (0, True), (3, True)])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_ray_warns_of_no_deprecated_option(
    options: dict[str, Any], leases: int, further: bool, in_actors: bool
) -> None:
    import ray.data

    from dpex.carriers.ray.ray_dataset import LaterStage, PipelineSpec, build

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.data.DataContext.get_current()  # on creation, Ray sets deprecated settings itself
    later = tuple(
        LaterStage([], "key", {"num_cpus": 3}, 2, capped=True, keeps_processes=keeps)
        for keeps in (False, True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stages in ((), later):
            spec = PipelineSpec(
                [], "key", "actor", options=options, later=stages, in_actors=in_actors
            )
            build(spec, leases=leases, further=further, started=1)


def test_pipelines_in_actors_need_no_tasks_of_ray_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.data

    from dpex.carriers.ray.ray_dataset import LaterStage, PipelineSpec, build

    monkeypatch.delattr(ray.data, "TaskPoolStrategy")
    later = (LaterStage([], "key", {}, 2, capped=True, keeps_processes=False),)
    for stages in ((), later):
        spec = PipelineSpec([], "key", "actor", later=stages, in_actors=True)
        build(spec, leases=1, further=bool(stages), started=1)
    with pytest.raises(ImportError, match="TaskPoolStrategy"):
        build(replace(spec, in_actors=False), leases=1, further=True, started=1)


@pytest.mark.parametrize("same_host", [True, False])
def test_the_authentication_key_of_multiprocessing_stays_on_its_machine(same_host: bool) -> None:
    import ray

    from dpex.carriers.ray.ray_dataset import store_job
    from dpex.wire.pickling import Pickled

    key = bytes(multiprocessing.current_process().authkey)
    stored = ray.get(store_job(Pickled(b"job"), same_host=same_host))
    assert (key in pickle.dumps(stored)) is same_host
