"""A training script as far as its first batches; ``cold`` and ``widen`` run it in fresh processes.

It imports what a training script imports and no more, since all of that is on the clock.
"""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.fresh import since_start_s
from benchmarks.workloads import JpegFiles, SleepingSamples

RATE_WINDOW_S = 1.0


def first_jpeg_batch(peer: str, folder: str, batch_size: int, workers: int) -> dict[str, float]:
    """Load photographs until the first batch is there.

    Args:
        peer: ``"torch fork"``, ``"torch spawn"`` or ``"dpex"``.
        folder: Where the files are.
        batch_size: In samples.
        workers: Number of workers.

    Returns:
        Since the start of the process: ``imported_s``, ``iterated_s`` (``iter()`` has returned)
        and ``first_batch_s``.
    """
    batches, moments = start(peer, JpegFiles(Path(folder)), batch_size, workers)
    # Spawned workers that are interrupted in the middle of an epoch may abort, and say so.
    for _ in batches:
        pass
    return moments


def first_sleeping_batch(
    peer: str, sleep_s: float, batch_size: int, workers: int, ramp_share: float, give_up_s: float
) -> dict[str, float | None]:
    """Load samples that sleep until the first batch is there, and perhaps until the rate is full.

    Args:
        peer: ``"torch fork"``, ``"torch spawn"`` or ``"dpex"``.
        sleep_s: What a sample takes.
        batch_size: In samples.
        workers: Number of workers.
        ramp_share: Which part of the workers' ideal rate to wait for; 0 for none.
        give_up_s: The age of the process at which not to wait any longer.

    Returns:
        As :func:`first_jpeg_batch`, and ``full_rate_s``; None if it did not come to that.
    """
    ideal_per_s = workers / sleep_s
    dataset = SleepingSamples(int(ideal_per_s * give_up_s), sleep_s)
    batches, moments = start(peer, dataset, batch_size, workers)
    full_rate_s = None
    if ramp_share:
        full_rate_s = reach_rate(batches, ramp_share * ideal_per_s, give_up_s)
    return {**moments, "full_rate_s": full_rate_s}


def start(
    peer: str, dataset: Dataset[Any], batch_size: int, workers: int
) -> tuple[Iterator[Any], dict[str, float]]:
    """Make a peer's loader, take its first batch, and note the moments on the way."""
    torch.set_num_threads(1)
    shared: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
    loader: DataLoader[Any]
    if peer == "dpex":
        from dpex import DpexDataLoader

        imported_s = since_start_s()
        loader = DpexDataLoader(dataset, distribute_mode=True, head_address="local", **shared)
    else:
        imported_s = since_start_s()
        start_method = peer.removeprefix("torch ")
        loader = DataLoader(dataset, multiprocessing_context=start_method, **shared)
    batches = iter(loader)
    iterated_s = since_start_s()
    next(batches)
    moments = {
        "imported_s": imported_s,
        "iterated_s": iterated_s,
        "first_batch_s": since_start_s(),
    }
    return batches, moments


def reach_rate(batches: Iterator[Any], samples_per_s: float, give_up_s: float) -> float | None:
    """Take batches until so many samples a second came in the last second.

    Args:
        batches: Each one tensor.
        samples_per_s: The rate to wait for.
        give_up_s: The age of the process at which to stop.

    Returns:
        The age at which it was reached; None if it was not.
    """
    recent: deque[tuple[float, int]] = deque()
    samples, begun = 0, time.monotonic()
    for batch in batches:
        now = time.monotonic()
        recent.append((now, len(batch)))
        samples += len(batch)
        while recent[0][0] < now - RATE_WINDOW_S:
            samples -= recent.popleft()[1]
        if now - begun >= RATE_WINDOW_S and samples >= samples_per_s * RATE_WINDOW_S:
            return since_start_s()
        if since_start_s() > give_up_s:
            break
    return None
