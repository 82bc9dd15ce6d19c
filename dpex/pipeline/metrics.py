"""A loader's statistics as metrics of Ray's, which its nodes export for Prometheus.

They do where ``ray[default]`` is installed; elsewhere nobody asks for what is published.
"""

from __future__ import annotations

import functools
import re
from dataclasses import fields

from ray.util.metrics import Counter, Gauge, Metric

from dpex.stats import LoaderStats

__all__ = ["publish"]

# What is no sum.
_GAUGES = {"first_batch_s", "in_flight"}


def publish(stats: LoaderStats, before: LoaderStats, *, loader: str) -> None:
    """Publish what has come to an epoch's statistics.

    Args:
        stats: The epoch's.
        before: What was published of it before.
        loader: The metrics' tag.
    """
    tags = {"loader": loader}
    for field in fields(stats):
        value = getattr(stats, field.name)
        metric = _metric(field.name)
        if isinstance(metric, Gauge):
            metric.set(value, tags=tags)  # None is no value, and no error
        elif isinstance(metric, Counter) and value > getattr(before, field.name):
            metric.inc(value - getattr(before, field.name), tags=tags)


@functools.cache
def _metric(name: str) -> Metric:
    return (Gauge if name in _GAUGES else Counter)(
        "dpex_" + re.sub("_s$", "_seconds", name),
        description=f"LoaderStats.{name} of dpex",
        tag_keys=("loader",),
    )
