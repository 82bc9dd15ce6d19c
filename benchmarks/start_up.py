"""A training script up to its first batches; ``cold``, ``widen`` and ``exit`` run it.

Each run is a fresh process.

It imports only what a training script imports, because the time of all imports counts.
"""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.addresses import address_of
from benchmarks.fresh import since_start_s
from benchmarks.workloads import JpegFiles, SleepingSamples, TinyImages

RATE_WINDOW_S = 1.0
# What ``eight_batches`` prints before it waits for Ctrl-C, and for how long it waits.
WAITS = "waits for Ctrl-C"
WAIT_S = 60.0


def first_jpeg_batch(peer: str, folder: str, batch_size: int, workers: int) -> dict[str, float]:
    """Load photographs, and measure the time to the first batch.

    Args:
        peer: ``"torch fork"``, ``"torch spawn"``, ``"dpex"`` or ``"local"``.
        folder: Folder of the files.
        batch_size: Samples in a batch.
        workers: Number of workers.

    Returns:
        Times since the start of the process: ``imported_s``, ``iterated_s`` (``iter()`` has
        returned) and ``first_batch_s``.
    """
    batches, moments = start(peer, JpegFiles(Path(folder)), batch_size, workers)
    # Read the whole epoch: spawned workers that are interrupted may abort and print errors.
    for _ in batches:
        pass
    return moments


def first_sleeping_batch(
    peer: str, sleep_s: float, batch_size: int, workers: int, ramp_share: float, give_up_s: float
) -> dict[str, float | None]:
    """Load samples that sleep, and measure the time to the first batch and to the full rate.

    Args:
        peer: ``"torch fork"``, ``"torch spawn"``, ``"dpex"`` or ``"local"``.
        sleep_s: Seconds that a sample takes.
        batch_size: Samples in a batch.
        workers: Number of workers.
        ramp_share: Share of the workers' ideal rate to wait for; 0 for no wait.
        give_up_s: Age of the process at which the wait ends.

    Returns:
        As :func:`first_jpeg_batch`, and ``full_rate_s``; None if the rate was not reached.
    """
    ideal_per_s = workers / sleep_s
    dataset = SleepingSamples(int(ideal_per_s * give_up_s), sleep_s)
    batches, moments = start(peer, dataset, batch_size, workers)
    full_rate_s = None
    if ramp_share:
        full_rate_s = reach_rate(batches, ramp_share * ideal_per_s, give_up_s)
    return {**moments, "full_rate_s": full_rate_s}


def two_epochs(peer: str, samples: int, batch_size: int, workers: int) -> dict[str, float]:
    """Load two epochs of small pictures with persistent workers.

    Args:
        peer: ``"torch fork"`` or ``"dpex"``.
        samples: Samples in an epoch.
        batch_size: Samples in a batch.
        workers: Number of workers.

    Returns:
        Times since the start of the process, when an epoch has ended: ``first_epoch_s`` and
        ``second_epoch_s``.
    """
    loader, _ = make(peer, TinyImages(samples), batch_size, workers, persistent_workers=True)
    ends = []
    for _ in range(2):
        for _ in loader:
            pass
        ends.append(since_start_s())
    return {"first_epoch_s": ends[0], "second_epoch_s": ends[1]}


def eight_batches(peer: str, batch_size: int, workers: int, wait: bool) -> None:
    """Load eight batches of small pictures, and end.

    Args:
        peer: ``"torch fork"``, ``"dpex"`` or ``"local"``.
        batch_size: Samples in a batch.
        workers: Number of workers.
        wait: Whether to say so after four batches, and then to wait for Ctrl-C.
    """
    loader, _ = make(peer, TinyImages(8 * batch_size), batch_size, workers)
    for number, _ in enumerate(loader, 1):
        if wait and number == 4:
            print(WAITS, flush=True)
            time.sleep(WAIT_S)


def first_ray_task() -> dict[str, float]:
    """Start a local Ray without dpex, and call one method of an actor: the least for ``"local"``.

    Returns:
        Times since the start of the process: ``started_s`` (Ray has started) and ``first_call_s``
        (the call has been answered).
    """
    import ray

    class Actor:
        def call(self) -> int:
            return 1

    ray.init(
        "local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    started_s = since_start_s()
    ray.get(ray.remote(Actor).remote().call.remote())
    return {"started_s": started_s, "first_call_s": since_start_s()}


def make(
    peer: str, dataset: Dataset[Any], batch_size: int, workers: int, **more: Any
) -> tuple[DataLoader[Any], float]:
    """Return a peer's loader, and the age of the process when all imports were done."""
    torch.set_num_threads(1)
    shared: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
    if peer in {"dpex", "local"}:
        from dpex import DpexDataLoader

        imported_s = since_start_s()
        address = address_of(peer)
        dpex = DpexDataLoader(dataset, distribute_mode=True, head_address=address, **shared, **more)
        return dpex, imported_s
    imported_s = since_start_s()
    start_method = peer.removeprefix("torch ")
    return DataLoader(dataset, multiprocessing_context=start_method, **shared, **more), imported_s


def start(
    peer: str, dataset: Dataset[Any], batch_size: int, workers: int
) -> tuple[Iterator[Any], dict[str, float]]:
    """Make a peer's loader and read its first batch; return the other batches and the times."""
    loader, imported_s = make(peer, dataset, batch_size, workers)
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
    """Read batches until the rate of the last second reaches a bound.

    Args:
        batches: Batches, each one tensor.
        samples_per_s: The bound.
        give_up_s: Age of the process at which to stop.

    Returns:
        Age of the process when the rate reached the bound; None if it did not.
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
