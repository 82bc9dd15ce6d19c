"""The common parts of all benchmarks: command line, clock, JSON record and tables.

``python -m benchmarks.harness build/bench/*.json`` prints the tables of existing records.
"""

import os

# Set this before torch and Ray are imported, so that every worker inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import datetime
import importlib.metadata
import itertools
import json
import platform
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.addresses import address_of
from benchmarks.goals import Subject, goals_table

RECORDED_PACKAGES = (
    "dpex",
    "torch",
    "torchvision",
    "ray",
    "pyarrow",
    "numpy",
    "pillow",
    "torchdata",
    "spdl-core",
    "rpcdataloader",
)
PAGE_SIZE_BYTES = 4_096
SETTLE_S = 0.5


@dataclass(frozen=True)
class Epoch:
    """One pass over a loader, as its consumer sees it.

    Attributes:
        seconds: Time from ``iter()`` to the end.
        first_batch_s: Time from ``iter()`` to the first batch.
        waiting_s: Part of ``seconds`` in ``iter()`` and ``next()``.
        samples: Number of samples.
        samples_per_s: Number of samples divided by ``seconds``.
    """

    seconds: float
    first_batch_s: float
    waiting_s: float
    samples: int
    samples_per_s: float


@dataclass(frozen=True)
class Case:
    """The workload and the goals of one throughput benchmark.

    Attributes:
        name: Name of the workload and of its JSON file.
        title: Description of a sample, for tables and figures.
        dataset: Dataset that every peer reads.
        batch_size: Samples in a batch.
        shuffle: Whether the order is random; every peer gets the same permutations.
        persistent_workers: Whether workers outlive an epoch.
        collate_fn: ``collate_fn`` of every peer that collates; None for torch's default.
        worker_init_fn: ``worker_init_fn`` of every peer that takes torch's arguments.
        inline_batches: Number of batches that the single process reads to determine the limit. It
            starts nothing, so fewer batches than an epoch suffice. 0 omits the limit.
        peers: All useful peers, in the order of their turns.
        goals_over: For some peers, the goal for dpex's rate over the peer's.
        goal_of_limit: Goal for dpex's rate over the limit, if there is one.
        goal_first_batch_ms: Goal for how much later than torch's the first batch of a warm epoch
            comes, if there is one.
        subject: Subject of the goals for rates.
    """

    name: str
    title: str
    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool = True
    persistent_workers: bool = True
    collate_fn: Callable[[list[Any]], Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    inline_batches: int = 0
    peers: tuple[str, ...] = ("torch", "dpex")
    goals_over: Mapping[str, float] = field(default_factory=dict)
    goal_of_limit: float | None = None
    goal_first_batch_ms: float | None = None
    subject: Subject = "throughput"


def arguments(description: str | None, case: str, argv: Sequence[str] | None = None) -> Any:
    """Parse the command line that all benchmarks share.

    Args:
        description: Docstring of the benchmark. Its first line is the description.
        case: Name of the benchmark; it determines the default of ``--out``.
        argv: The command line; None for that of the process.

    Returns:
        A namespace with ``out``, ``rounds``, ``workers``, ``peers`` and ``all_peers``.
    """
    # On SIGTERM, exit through sys.exit, so that the benchmark stops its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(f"build/bench/{case}.json"))
    parser.add_argument("--rounds", type=int, default=7, help="counted epochs of each peer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--peers", nargs="+", default=["torch", "dpex"], help="torch, dpex")
    parser.add_argument("--all-peers", action="store_true", help="all that make sense here")
    return parser.parse_args(argv)


def make_loader(
    peer: str,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    num_workers: int,
    sampler: Iterable[int] | None = None,
    shuffle: bool = False,
    persistent_workers: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> DataLoader[Any]:
    """Make a loader that takes torch's arguments, without starting it.

    Args:
        peer: ``"inline"`` (this process alone), ``"torch"`` (forked workers), ``"spawn"`` (torch's
            with spawned workers), ``"stateful"`` (torchdata's), ``"dpex"`` (as a user gets it by
            default) or ``"local"`` (dpex on a local Ray).
        dataset: Dataset that the loader reads.
        batch_size: Samples in a batch.
        num_workers: Number of workers; ``"inline"`` has none.
        sampler: Order of the indices, instead of ``shuffle``.
        shuffle: Whether the order is random. The generator has the same seed for every peer.
        persistent_workers: Whether workers outlive an epoch.
        collate_fn: torch's default if None.
        worker_init_fn: Called in each worker; ``"inline"`` has none.

    Returns:
        The loader. If it needs Ray, Ray has started for it.

    Raises:
        ValueError: There is no such peer.
    """
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle if sampler is None else None,
        "sampler": sampler,
        "collate_fn": collate_fn,
        "generator": torch.Generator().manual_seed(0),
    }
    if peer == "inline":
        return DataLoader(dataset, **options)
    options |= {
        "num_workers": num_workers,
        "persistent_workers": persistent_workers,
        "worker_init_fn": worker_init_fn,
    }
    if peer == "torch":
        return DataLoader(dataset, multiprocessing_context="fork", **options)
    if peer == "spawn":
        return DataLoader(dataset, multiprocessing_context="spawn", **options)
    if peer == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        stateful: DataLoader[Any] = StatefulDataLoader(
            dataset, multiprocessing_context="fork", **options
        )
        return stateful
    if peer in {"dpex", "local"}:
        from dpex import DpexDataLoader

        loader: DpexDataLoader[Any] = DpexDataLoader(
            dataset,
            multiprocessing_context="fork",
            distribute_mode=True,
            head_address=address_of(peer),
            **options,
        )
        wait_for_ray(loader)
        return loader
    raise ValueError(
        f"peer must be 'inline', 'torch', 'spawn', 'stateful', 'dpex' or 'local', was {peer!r}"
    )


def wait_for_ray(loader: Any) -> None:
    """Start Ray for a loader that needs it, so that no measured epoch includes the start."""
    if hasattr(loader, "warm_up"):  # earlier revisions started Ray in ``iter()``
        loader.warm_up(wait=True)


def close(loader: DataLoader[Any]) -> None:
    """Close a loader if it has a ``close`` method."""
    if hasattr(loader, "close"):
        loader.close()


def touch(batch: Any) -> float:
    """Read one element of every memory page of a batch's tensors, as a training step would.

    Otherwise, a loader that returns memory which is not mapped yet would look faster than one that
    returns ready memory.

    Args:
        batch: Tensors, or lists, tuples and mappings of them.

    Returns:
        The sum of these elements.
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
    """Return the length of the first tensor of a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def time_epoch(
    loader: Iterable[Any],
    max_batches: int | None = None,
    step: Callable[[Any], object] = touch,
) -> Epoch:
    """Read every batch of a loader, touch it, and measure.

    Args:
        loader: Loader that is read once.
        max_batches: Number of batches after which to stop; None for all.
        step: Called with each batch, instead of touching it.

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
        step(batch)
        asked = time.perf_counter()
    ended = time.perf_counter()
    waiting_s += ended - asked
    seconds = ended - started
    return Epoch(seconds, first_batch_s, waiting_s, samples, samples / seconds)


def take_turns(
    loaders: Mapping[str, DataLoader[Any]],
    rounds: int,
    title: str,
    watch: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, list[float]]:
    """Run one epoch of each loader in turn, several times.

    Args:
        loaders: Loaders by name.
        rounds: Number of counted epochs of each loader. One more epoch comes first, which starts
            workers and fills caches.
        title: Title of the progress lines.
        watch: Given a loader's name, returns the context in which its epoch runs. Entering and
            leaving it is not timed.

    Returns:
        The samples per second of every counted epoch, by name.
    """
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        for name, loader in loaders.items():
            time.sleep(SETTLE_S)
            with watch(name):
                rate = time_epoch(loader).samples_per_s
            if number:
                rates[name].append(rate)
        last = {name: rate[-1:] for name, rate in rates.items()}
        say(f"{title} {number}/{rounds}: {last}")
    return rates


def summarise(values: Sequence[float]) -> dict[str, Any]:
    """Return median, quartiles and range of some values, with the values."""
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
    """Start a record: case, command, date, versions, machine and its load.

    ``dpex_address`` is the ``head_address`` of the peer ``"dpex"``. Records of the former design,
    whose workers on one machine were Ray's, do not have it.
    """
    versions: dict[str, str | None] = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "case": case,
        "command": command(case, sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "dpex_address": address_of("dpex"),
        "python": platform.python_version(),
        "versions": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg(),
    }


def command(case: str, argv: Sequence[str]) -> str:
    """Return the ``make`` command that runs a benchmark like a given command line.

    Args:
        case: Name of the benchmark.
        argv: The command line. ``--out`` is left out, because the make target sets it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out")
    given = shlex.join(parser.parse_known_args(argv)[1])
    return f"make bench-{case}" + (f' BENCH_ARGS="{given}"' if given else "")


def cpu_model() -> str:
    """Return the name of the processor, on Linux from ``/proc/cpuinfo``."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def write(record: dict[str, Any], path: Path) -> None:
    """Complete a record and write it as JSON, one line per key."""
    record["load_after"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    say(f"wrote {path}")


def say(line: str) -> None:
    """Print progress to stderr; results go to stdout."""
    print(line, file=sys.stderr, flush=True)


def spread(summary: Mapping[str, Any], form: str = ".2f") -> str:
    """Format a summary as its median and its range."""
    return f"{summary['median']:{form}} [{summary['min']:{form}}, {summary['max']:{form}}]"


def comparisons(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the comparisons of peers in a record, with their names.

    A record has no comparison, one, or one for each of its parts.
    """
    for name, part in record.get("parts", {"": record}).items():
        if "limit_samples_per_s" in part:
            yield f"{record['case']} {name}".strip(), part


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of some records.

    Args:
        records: Records, as the benchmarks write them.

    Returns:
        Markdown: the tables of throughput, overhead on the training loop, and goals, without empty
        tables.
    """
    tables = (rates_table(records), taxes_table(records), goals_table(records))
    return "\n\n".join(part for part in tables if part)


def rates_table(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of the rates of torch and dpex, one row per comparison."""
    head = [
        "| workload | dpex/torch, median [range] | torch, samples/s | dpex, samples/s "
        "| dpex of limit | first batch warm, torch / dpex | start-up, torch / dpex |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = []
    for name, part in (comparison for record in records for comparison in comparisons(record)):
        if "torch" not in part["dpex_over"]:
            continue
        rate, first, cold = part["samples_per_s"], part["first_batch_s"], part["cold"]
        limit = part["limit_samples_per_s"]
        of_limit = f"{rate['dpex']['median'] / limit:.2f}" if limit else "-"
        rows.append(
            f"| {name} | {spread(part['dpex_over']['torch'])} "
            f"| {rate['torch']['median']:,.0f} | {rate['dpex']['median']:,.0f} | {of_limit} "
            f"| {first['torch']['median'] * 1e3:.0f} / {first['dpex']['median'] * 1e3:.0f} ms "
            f"| {cold['torch']['first_batch_s']:.1f} / {cold['dpex']['first_batch_s']:.1f} s |"
        )
    return "\n".join([*head, *rows]) if rows else ""


def taxes_table(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of the overhead on the training loop, one row per loader."""
    head = [
        "| beside the training loop | slower by, median [range] | at work / at rest "
        "| at rest / before | inside next() | of it blocked |",
        "|---|---|---|---|---|---|",
    ]
    rows = [
        f"| {peer} | {spread(record['slowdown'][peer], '.1%')} "
        f"| {spread(record['at_work_over_at_rest'][peer])} "
        f"| {spread(record['at_rest_over_before'][peer])} "
        f"| {record['next_share'][peer]['median']:.1%} "
        f"| {record['waiting_share'][peer]['median']:.1%} |"
        for record in records
        for peer in record.get("slowdown", ())
    ]
    return "\n".join([*head, *rows]) if rows else ""


if __name__ == "__main__":
    print(table([json.loads(Path(path).read_text()) for path in sys.argv[1:]]))
