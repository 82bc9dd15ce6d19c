"""A program for ``test_metrics.py``: it prints the metrics that Ray exports for two loaders."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from dataclasses import asdict
from typing import Any

import ray
import torch
from torch.utils.data import TensorDataset

from dpex import DpexDataLoader

EPOCHS = 3
SECONDS = 60
SAMPLE = re.compile(r'^ray_dpex_(\w+)\{.*\bloader="(\d+)".*\} (\S+)$', re.MULTILINE)


def exported() -> dict[str, dict[str, float]]:
    """Return the exported metrics of each loader."""
    port = ray.nodes()[0]["MetricsExportPort"]
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    found: dict[str, dict[str, float]] = {}
    for name, loader, value in SAMPLE.findall(page):
        found.setdefault(loader, {})[name] = float(value)
    return found


def main() -> None:
    """Read some epochs, and wait until the metrics contain the last loader's batches."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    dataset = TensorDataset(torch.rand(90, 4))
    counted: dict[str, list[dict[str, Any]]] = {}
    for number, persistent in enumerate((False, True)):
        loader = DpexDataLoader(
            dataset, 10, num_workers=2, persistent_workers=persistent, distribute_mode=True
        )
        for _ in range(EPOCHS):
            list(loader)
            counted.setdefault(str(number), []).append(asdict(loader.stats()))
    batches = sum(epoch["batches"] for epoch in counted["1"])
    deadline = time.monotonic() + SECONDS
    while (found := exported()).get("1", {}).get("batches_total") != batches:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    print(json.dumps({"exported": found, "counted": counted}), file=sys.stderr)


if __name__ == "__main__":
    main()
