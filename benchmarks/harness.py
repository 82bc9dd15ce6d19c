"""The clock of every benchmark: interleaved epochs, the JSON record, the table of ratios.

Peers take turns, one epoch each (A B A B), in one process tree, because a shared machine drifts by
more than the peers differ: only neighbours compare, so the verdict is the median of the ratios of
neighbours and not the ratio of two medians. The first epoch of each is its start-up and is
reported apart.

``python -m benchmarks.harness build/bench/*.json`` prints the table of what was recorded.
"""

import os

# Before torch and Ray load, so that every worker inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import importlib.metadata
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

RECORDED_PACKAGES = ("dpex", "torch", "torchvision", "ray", "pyarrow", "numpy", "pillow")
PAGE_SIZE_BYTES = 4_096
SETTLE_S = 0.5


@dataclass(frozen=True)
class Epoch:
    """One pass over a loader, as its consumer saw it.

    Attributes:
        seconds: From ``iter()`` to the end.
        first_batch_s: From ``iter()`` to the first batch.
        waiting_s: The part of ``seconds`` spent inside ``iter()`` and ``next()``.
        samples: How many samples came.
        samples_per_s: Their rate over ``seconds``.
    """

    seconds: float
    first_batch_s: float
    waiting_s: float
    samples: int
    samples_per_s: float


@dataclass(frozen=True)
class Case:
    """What one throughput benchmark runs.

    Attributes:
        name: Of the workload, and of its JSON file.
        dataset: Read by every peer alike.
        batch_size: In samples.
        shuffle: Whether the sampler is random; every peer gets the same order.
        inline_batches: How many batches the single process takes that gives the limit; it needs
            fewer to be exact, since it starts nothing.
    """

    name: str
    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool
    inline_batches: int


def arguments(description: str | None, case: str, argv: Sequence[str] | None = None) -> Any:
    """Parse the command line that all benchmarks share.

    Args:
        description: What the benchmark says of itself.
        case: Its name; the default of ``--out`` follows from it.
        argv: The command line; the process's own when None.

    Returns:
        A namespace with ``out``, ``rounds``, ``workers`` and ``peers``.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(f"build/bench/{case}.json"))
    parser.add_argument("--rounds", type=int, default=7, help="counted epochs of each peer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--peers", nargs="+", default=["torch", "dpex"], help="torch, dpex")
    return parser.parse_args(argv)


def make_loader(
    peer: str,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    num_workers: int,
    sampler: Iterable[int] | None = None,
    shuffle: bool = False,
) -> DataLoader[Any]:
    """Make the loader of one peer; nothing starts yet.

    Args:
        peer: ``"inline"`` (this process alone), ``"torch"`` (forked workers) or ``"dpex"``.
        dataset: What it reads.
        batch_size: In samples.
        num_workers: Of torch and of dpex; both keep their workers from epoch to epoch.
        sampler: The order of indices, instead of ``shuffle``.
        shuffle: Whether the order is random, from a generator seeded alike for every peer.

    Returns:
        The loader.

    Raises:
        ValueError: No such peer.
    """
    shared: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle if sampler is None else None,
        "sampler": sampler,
        "generator": torch.Generator().manual_seed(0),
    }
    if peer == "inline":
        return DataLoader(dataset, **shared)
    if peer == "torch":
        return DataLoader(
            dataset,
            num_workers=num_workers,
            persistent_workers=True,
            multiprocessing_context="fork",
            **shared,
        )
    if peer == "dpex":
        from dpex import DpexDataLoader

        return DpexDataLoader(
            dataset,
            num_workers=num_workers,
            persistent_workers=True,
            distribute_mode=True,
            head_address="local",
            **shared,
        )
    raise ValueError(f"peer must be 'inline', 'torch' or 'dpex', was {peer!r}")


def close(loader: DataLoader[Any]) -> None:
    """Release what a loader holds, if it is of a kind that can."""
    if hasattr(loader, "close"):
        loader.close()


def touch(batch: Any) -> float:
    """Read one element of every memory page of a batch's tensors, as a training step would.

    A loader that hands over memory which nobody has mapped yet would otherwise look faster than
    one that hands over memory which is ready.

    Args:
        batch: Tensors, or lists, tuples and mappings of them.

    Returns:
        The sum of what was read.
    """
    if isinstance(batch, torch.Tensor):
        flat = batch.reshape(-1)
        return float(flat[:: max(1, PAGE_SIZE_BYTES // flat.element_size())].sum())
    if isinstance(batch, Mapping):
        return sum(touch(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(touch(value) for value in batch)
    return 0.0


def count_samples(batch: Any) -> int:
    """Give the length of the first tensor of a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def time_epoch(loader: Iterable[Any], max_batches: int | None = None) -> Epoch:
    """Take every batch of a loader, touch it, and measure.

    Args:
        loader: Iterated once.
        max_batches: Where to stop early; None for never.

    Returns:
        The measurement.
    """
    waiting_s = first_batch_s = 0.0
    samples = 0
    started = asked = time.perf_counter()
    for batch in itertools.islice(loader, max_batches):
        got = time.perf_counter()
        waiting_s += got - asked
        first_batch_s = first_batch_s or got - started
        samples += count_samples(batch)
        touch(batch)
        asked = time.perf_counter()
    ended = time.perf_counter()
    waiting_s += ended - asked
    seconds = ended - started
    return Epoch(seconds, first_batch_s, waiting_s, samples, samples / seconds)


def compare(case: Case, options: Any) -> dict[str, Any]:
    """Run one workload through every peer in turn and record all of it.

    Args:
        case: The workload.
        options: What :func:`arguments` gave.

    Returns:
        The record, as written to ``options.out``.
    """
    torch.set_num_threads(1)
    record = describe_machine(case.name)
    record["settings"] = {
        "batch_size": case.batch_size,
        "num_workers": options.workers,
        "samples": len(case.dataset),  # type: ignore[arg-type]
        "shuffle": case.shuffle,
    }
    # torch comes first: it forks its workers, once, before Ray's threads are here.
    loaders = {
        peer: make_loader(
            peer,
            case.dataset,
            batch_size=case.batch_size,
            num_workers=options.workers,
            shuffle=case.shuffle,
        )
        for peer in (*options.peers, "inline")
    }
    limits = {peer: case.inline_batches if peer == "inline" else None for peer in loaders}
    cold = {peer: time_epoch(loader, limits[peer]) for peer, loader in loaders.items()}
    for peer, epoch in cold.items():
        say(f"{case.name} start-up {peer}: first batch after {epoch.first_batch_s:.2f} s")
    runs: dict[str, list[Epoch]] = {peer: [] for peer in loaders}
    for round_number in range(options.rounds):
        for peer, loader in loaders.items():
            time.sleep(SETTLE_S)  # what a peer tidies up after its epoch is not the next one's cost
            runs[peer].append(time_epoch(loader, limits[peer]))
        rates = ", ".join(
            f"{peer} {epochs[-1].samples_per_s:,.0f}" for peer, epochs in runs.items()
        )
        say(f"{case.name} round {round_number + 1}/{options.rounds}, samples/s: {rates}")
    for loader in loaders.values():
        close(loader)

    record["cold"] = {peer: asdict(epoch) for peer, epoch in cold.items()}
    record["runs"] = {peer: [asdict(epoch) for epoch in epochs] for peer, epochs in runs.items()}
    record["samples_per_s"] = {
        peer: summarise([epoch.samples_per_s for epoch in epochs]) for peer, epochs in runs.items()
    }
    record["first_batch_s"] = {
        peer: summarise([epoch.first_batch_s for epoch in epochs]) for peer, epochs in runs.items()
    }
    record["limit_samples_per_s"] = record["samples_per_s"]["inline"]["median"] * record["cores"]
    if {"torch", "dpex"} <= runs.keys():
        record["dpex_over_torch"] = summarise(
            [
                dpex.samples_per_s / torch_.samples_per_s
                for dpex, torch_ in zip(runs["dpex"], runs["torch"], strict=True)
            ]
        )
    write(record, options.out)
    return record


def summarise(values: Sequence[float]) -> dict[str, Any]:
    """Give the median and the spread of some values, with the values."""
    lower, median, upper = (
        statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    )
    return {
        "median": median,
        "quartiles": [lower, upper],
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def describe_machine(case: str) -> dict[str, Any]:
    """Begin a record: what ran, where, and how busy it was there."""
    versions: dict[str, str | None] = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "case": case,
        "python": platform.python_version(),
        "versions": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg(),
    }


def cpu_model() -> str:
    """Give the processor's name as Linux knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def write(record: dict[str, Any], path: Path) -> None:
    """Close a record and write it as JSON."""
    record["load_after"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    say(f"wrote {path}")


def say(line: str) -> None:
    """Report progress, apart from the results on stdout."""
    print(line, file=sys.stderr, flush=True)


def spread(summary: Mapping[str, Any], form: str = ".2f") -> str:
    """Write a summary as its median and its range."""
    return f"{summary['median']:{form}} [{summary['min']:{form}}, {summary['max']:{form}}]"


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """Lay records out as a table of ratios.

    Args:
        records: As :func:`compare` and ``benchmark_tax`` write them.

    Returns:
        Markdown, one row a record; throughput first, the tax on the trainer after it.
    """
    rates = [
        "| workload | dpex/torch, median [range] | torch, samples/s | dpex, samples/s "
        "| dpex of limit | first batch warm, torch / dpex | start-up, torch / dpex |",
        "|---|---|---|---|---|---|---|",
    ]
    taxes = [
        "| beside the training loop | slower by, median [range] | best against best "
        "| inside next() | of it blocked |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        if "slowdown" in record:
            taxes += [
                f"| {peer} | {spread(record['slowdown'][peer], '.1%')} "
                f"| {record['slowdown_of_best'][peer]:.1%} "
                f"| {record['next_share'][peer]['median']:.1%} "
                f"| {record['waiting_share'][peer]['median']:.1%} |"
                for peer in record["slowdown"]
            ]
        elif "dpex_over_torch" in record:
            rate, first = record["samples_per_s"], record["first_batch_s"]
            rates.append(
                f"| {record['case']} | {spread(record['dpex_over_torch'])} "
                f"| {rate['torch']['median']:,.0f} | {rate['dpex']['median']:,.0f} "
                f"| {rate['dpex']['median'] / record['limit_samples_per_s']:.2f} "
                f"| {first['torch']['median'] * 1e3:.0f} / {first['dpex']['median'] * 1e3:.0f} ms "
                f"| {record['cold']['torch']['first_batch_s']:.1f} "
                f"/ {record['cold']['dpex']['first_batch_s']:.1f} s |"
            )
    return "\n".join([*(rates if rates[2:] else []), "", *(taxes if taxes[2:] else [])]).strip()


if __name__ == "__main__":
    print(table(json.loads(Path(path).read_text()) for path in sys.argv[1:]))
