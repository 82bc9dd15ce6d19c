"""Training loops and their waiting times, for the benchmark ``training_speed``.

The step takes a tenth of a second: matrix products if there is a GPU, else a sleep. ``on_nodes``
and ``on_one_node`` simulate preprocessing by samples that wait. The waits stand for processors of
other machines, which the nodes on this machine do not have. ``on_own_cores`` decodes and augments
photographs on the cores of this machine.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.harness import close, make_loader, say, time_epoch
from benchmarks.nodes import TASKS_PER_NODE, Waiting, ray_nodes, readers_of

STEP_S = 0.1
# Four workers keep up with the step if a sample takes 25 ms.
WAITING_BATCH_SIZE = 16
WAIT_S = {"light": 0.0125, "medium": 0.0375, "heavy": 0.125}
# A multiple of 4, 8, 16 and 32, so that all workers make equally many batches.
WAITING_STEPS = 128
WARM_BATCHES_PER_WORKER = 4
MOST_WARM_EPOCHS = 20

PHOTOGRAPH_SIZE = {"light": (64, 64), "medium": (500, 375), "heavy": (1_600, 1_200)}
PHOTOGRAPHS = 256
PHOTOGRAPH_BATCH_SIZE = 64
PHOTOGRAPH_STEPS = 32
FOLDER = Path("build/bench-data/training")

CALM_PERCENT = 25.0
CALM_S = 1.0
MOST_CALMS = 60

GPU_SIDE = 4_096
GPU_PRODUCTS = 50

Run = dict[str, Any]
Step = Callable[[Any], object]


class Rounds(Sampler[int]):
    """A sampler that repeats a dataset's indices until an epoch has enough samples.

    Args:
        length: Length of the dataset.
        samples: Number of samples in an epoch; may change between epochs.
    """

    def __init__(self, length: int, samples: int) -> None:
        self.length = length
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return (position % self.length for position in range(self.samples))


def make_step() -> Step:
    """Return a step that takes ``STEP_S``: matrix products on a GPU, or a sleep without one."""
    if not torch.cuda.is_available():
        return lambda batch: time.sleep(STEP_S)
    weight = torch.eye(GPU_SIDE, device="cuda")

    def multiply(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(weight, weight)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    multiply(GPU_PRODUCTS)  # the first products load the kernels
    times = round(STEP_S * GPU_PRODUCTS / multiply(GPU_PRODUCTS))
    return lambda batch: multiply(times)


def run_epoch(loader: DataLoader[Any], step: Step) -> Run:
    """Train for an epoch.

    Returns:
        The measurement of :func:`time_epoch`, and the machine's ``busy_percent``. ``waiting_share``
        is the share of the time in ``iter()`` and ``next()``. ``stats_waiting_share`` is the same
        share from ``loader.stats()``, or None if the loader has no ``stats``.
    """
    wait_for_calm()
    epoch = time_epoch(loader, step=step)
    return {
        **asdict(epoch),
        "waiting_share": epoch.waiting_s / epoch.seconds,
        "stats_waiting_share": loader.stats().waiting_share if hasattr(loader, "stats") else None,
        "busy_percent": psutil.cpu_percent(),
    }


def wait_for_calm() -> None:
    """Wait until the machine is idle, so that earlier work does not slow down the next epoch.

    With many nodes on few cores, this takes longer than tasks wait for the next epoch. So with dpex
    on nodes, each epoch starts its tasks again.
    """
    psutil.cpu_percent()
    for _ in range(MOST_CALMS):
        time.sleep(CALM_S)
        if psutil.cpu_percent() < CALM_PERCENT:
            return


def on_one_node(workers: int, rounds: int) -> dict[str, list[Run]]:
    """Train with torch's loader on waiting samples; return the epochs by preprocessing."""

    def make(dataset: Dataset[Any], order: Sampler[int]) -> DataLoader[Any]:
        return make_loader(
            "torch",
            dataset,
            batch_size=WAITING_BATCH_SIZE,
            num_workers=workers,
            sampler=order,
        )

    return run_waiting(make, workers, rounds)


def on_nodes(nodes: int, rounds: int) -> dict[str, list[Run]]:
    """Train with dpex on waiting samples from some nodes; return the epochs by preprocessing."""
    from dpex import DpexDataLoader

    tasks = TASKS_PER_NODE * nodes
    with ray_nodes(nodes) as address:

        def make(dataset: Dataset[Any], order: Sampler[int]) -> DataLoader[Any]:
            return DpexDataLoader(
                dataset,
                batch_size=WAITING_BATCH_SIZE,
                sampler=order,
                num_workers=tasks,
                persistent_workers=True,
                distribute_mode=True,
                head_address=address,
            )

        return run_waiting(make, tasks, rounds)


def run_waiting(
    make: Callable[[Dataset[Any], Sampler[int]], DataLoader[Any]], workers: int, rounds: int
) -> dict[str, list[Run]]:
    """Train on waiting samples of every kind, after the workers have started.

    Args:
        make: Makes a loader, given a dataset and the order of its indices.
        workers: Number of workers of that loader.
        rounds: Number of counted epochs of each kind.
    """
    step = make_step()
    runs: dict[str, list[Run]] = {}
    for kind, wait_s in WAIT_S.items():
        samples = WAITING_STEPS * WAITING_BATCH_SIZE
        order = Rounds(samples, workers * WARM_BATCHES_PER_WORKER * WAITING_BATCH_SIZE)
        loader = make(Waiting(samples, wait_s), order)
        for _ in range(MOST_WARM_EPOCHS):
            if len(readers_of(loader)) >= workers:
                break
        order.samples = samples
        runs[kind] = [run_epoch(loader, step) for _ in range(rounds)]
        close(loader)
        say(f"{kind}, {workers} workers: {summary(runs[kind])}")
    return runs


def on_own_cores(kind: str, workers: int, rounds: int) -> dict[str, list[Run]]:
    """Train with both loaders on photographs, in turns; return the epochs by loader."""
    from benchmarks.workloads import JpegFiles, make_jpegs

    torch.set_num_threads(1)
    folder = make_jpegs((FOLDER / kind).resolve(), PHOTOGRAPHS, PHOTOGRAPH_SIZE[kind])
    loaders = {
        peer: make_loader(
            peer,
            JpegFiles(folder),
            batch_size=PHOTOGRAPH_BATCH_SIZE,
            num_workers=workers,
            sampler=Rounds(PHOTOGRAPHS, PHOTOGRAPH_STEPS * PHOTOGRAPH_BATCH_SIZE),
        )
        for peer in ("torch", "dpex")
    }
    step = make_step()
    runs: dict[str, list[Run]] = {peer: [] for peer in loaders}
    for loader in loaders.values():
        run_epoch(loader, step)  # start-up
    for _ in range(rounds):
        for peer, loader in loaders.items():
            runs[peer].append(run_epoch(loader, step))
    for peer, loader in loaders.items():
        close(loader)
        say(f"{kind}, {peer}: {summary(runs[peer])}")
    return runs


def summary(runs: list[Run]) -> str:
    """Format some epochs for the progress lines."""
    return ", ".join(f"{run['seconds']:.1f} s, {run['waiting_share']:.1%} waiting" for run in runs)
