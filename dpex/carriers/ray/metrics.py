"""A loader's statistics as Ray metrics, which Ray's nodes export for Prometheus.

The nodes export metrics only if ``ray[default]`` is installed. Otherwise publishing has no effect.
"""

from __future__ import annotations

import functools
import re
from dataclasses import fields

from ray.util.metrics import Counter, Gauge, Metric

from dpex.stats import LoaderStats

__all__ = ["publish"]

# Fields that are not sums.
_GAUGES = {"first_batch_s", "in_flight"}


def publish(stats: LoaderStats, before: LoaderStats, *, loader: str) -> None:
    """Publish the increase of an epoch's statistics since the last call.

    Args:
        stats: The epoch's statistics.
        before: The statistics at the last call.
        loader: Value of the metrics' tag ``loader``.
    """
    tags = {"loader": loader}
    for field in fields(stats):
        value = getattr(stats, field.name)
        metric = _metric(field.name)
        if isinstance(metric, Gauge):
            metric.set(value, tags=tags)  # Ray ignores None
        elif isinstance(metric, Counter) and value > getattr(before, field.name):
            metric.inc(value - getattr(before, field.name), tags=tags)


@functools.cache
def _metric(name: str) -> Metric:
    return (Gauge if name in _GAUGES else Counter)(
        "dpex_" + re.sub("_s$", "_seconds", name),
        description=f"LoaderStats.{name} of dpex",
        tag_keys=("loader",),
    )
