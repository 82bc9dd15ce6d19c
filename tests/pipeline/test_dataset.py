"""Tests of a pipeline's Ray Dataset: dpex uses no deprecated option of Ray."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("shared_ray")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_cpus": 2, "memory": 1 << 20, "resources": {"disk": 1}},
    {"label_selector": {"kind": "cpu"}, "fallback_strategy": [{"label_selector": {}}]},
    {"accelerator_type": "A100", "runtime_env": {"env_vars": {"A": "1"}}},
]


@pytest.mark.parametrize(("first", "further"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_ray_warns_of_no_deprecated_option(
    options: dict[str, Any], first: bool, further: bool
) -> None:
    import ray.data

    from dpex.pipeline.dataset import LaterStage, PipelineSpec, build

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
            spec = PipelineSpec([], "key", "actor", options=options, later=stages)
            build(spec, first=first, further=further)
