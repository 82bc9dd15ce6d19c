"""The benchmark ``store``: small pictures from an S3 store whose answers take 20 ms.

It compares 32 workers with 2 workers. The store is a real server, rclone, on this machine. It uses
part of the machine's cores, and the benchmark reports how much. An epoch has the same number of
batches for each worker, with any number of workers.

On a machine with few cores, both loaders wait for the pictures' processor time, and no longer for
the store. So a second part multiplies the delay of an answer by the number of workers per core.
Then a worker has as much core time for a picture as if it had a core of its own.
"""

import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Subset
from torchvision import transforms

from benchmarks.fresh import own_processes, run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import (
    arguments,
    close,
    describe_machine,
    make_loader,
    summarise,
    take_turns,
    write,
)
from benchmarks.object_store import ObjectStore, object_store
from benchmarks.plots import bars
from benchmarks.workloads import make_jpegs
from dpex.datasets import ImageFolder

FOLDER = Path("build/bench-data/store")
CLASSES = 8
PICTURES_PER_CLASS = 512
SIZE = (64, 64)
DELAY_S = 0.02
BATCH_SIZE = 16
# Invariant: the epochs of all loaders together are shorter than dpex's tasks wait for an epoch.
BATCHES_PER_WORKER = 8
FEW_WORKERS = 2
RUN_TIMEOUT_S = 1_800
GOAL = 0.98

# Arrow asks for an object's size before it asks for the object.
METHODS = ("HEAD", "GET")

Spent = Mapping[str, float]


class Meter:
    """The processor time and the requests of epochs.

    Args:
        store: The server, which is measured separately from the other processes of this run.

    Attributes:
        spent: Measurements of each epoch, by name of the loader. ``server``, ``loader`` (training
            process, workers) and ``busy`` (all processes of the machine) are processor
            seconds. ``machine`` is the time that all cores had together. The other values are
            numbers of requests, by method.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.spent: dict[str, list[Spent]] = defaultdict(list)

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Measure the time and the requests of this context."""
        before = self.read()
        yield
        after = self.read()
        self.spent[name].append({what: after[what] - before[what] for what in after})

    def read(self) -> dict[str, float]:
        """Return the totals so far."""
        serving = self.store.processes()
        machine = psutil.cpu_times()
        idle = machine.idle + machine.iowait
        # User time includes the time of guests.
        total = sum(machine) - machine.guest - machine.guest_nice
        requests = self.store.requests()
        return {
            "server": sum(map(processor_s, serving)),
            "loader": sum(map(processor_s, set(own_processes()) - set(serving))),
            "busy": total - idle,
            "machine": total,
            **{method: requests.get(method, 0) for method in METHODS},
        }


def processor_s(process: psutil.Process) -> float:
    """Return the processor seconds of a process and of its children that have ended."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def measure(folder: str, delay_s: float, workers: Sequence[int], rounds: int) -> dict[str, Any]:
    """Serve the pictures, and read them with both loaders in turn.

    Args:
        folder: Folder of the bucket that has the pictures.
        delay_s: Delay of an answer, in seconds.
        workers: Numbers of workers; there is a loader of each kind for each number.
        rounds: Number of counted epochs of each loader.

    Returns:
        ``samples`` of an epoch, ``rates``, and ``spent`` of every epoch including the first, by
        loader.
    """
    torch.set_num_threads(1)
    with object_store(Path(folder), delay_s) as store:
        os.environ.update(store.environment)
        pictures = ImageFolder("s3://bucket/pictures", transforms.ToTensor())
        loaders, samples = {}, {}
        for peer, number in itertools.product(("torch", "dpex"), workers):
            name = of(peer, number)
            samples[name] = number * BATCHES_PER_WORKER * BATCH_SIZE
            loaders[name] = make_loader(
                peer,
                Subset(pictures, range(samples[name])),
                batch_size=BATCH_SIZE,
                num_workers=number,
                shuffle=True,
            )
        meter = Meter(store)
        try:
            rates = take_turns(loaders, rounds, "store", meter.watch)
        finally:
            for loader in loaders.values():
                close(loader)
    return {"samples": samples, "rates": rates, "spent": meter.spent}


def of(peer: str, workers: int) -> str:
    """Return the name of a loader."""
    return f"{peer}, {workers} workers"


def sum_up(spent: Sequence[Spent], samples: int) -> dict[str, float]:
    """Return shares of the machine's time, and the costs of a sample, over some epochs.

    Args:
        spent: Measurements of each epoch, as in :class:`Meter`.
        samples: Number of samples in an epoch.
    """
    total = {what: sum(epoch[what] for epoch in spent) for what in spent[0]}
    count = samples * len(spent)
    total["others"] = total["busy"] - total["server"] - total["loader"]
    shares = {who: 1e2 * total[who] / total["machine"] for who in ("server", "loader", "others")}
    return {
        **{f"{who}_percent": share for who, share in shares.items()},
        **{f"{who}_ms_per_sample": 1e3 * total[who] / count for who in ("server", "loader")},
        "requests_per_sample": sum(total[method] for method in METHODS) / count,
    }


def main() -> None:
    options = arguments(__doc__, "store", ["--workers", "32", *sys.argv[1:]])
    for number in range(CLASSES):
        make_jpegs(FOLDER / "bucket" / "pictures" / f"{number}", PICTURES_PER_CLASS, SIZE)
    record = describe_machine("store")
    folder = str(FOLDER.resolve())
    spread_delay_s = DELAY_S * options.workers / record["cores"]
    found, spread = (
        run_fresh(
            measure,
            timeout_s=RUN_TIMEOUT_S,
            folder=folder,
            delay_s=delay_s,
            workers=workers,
            rounds=options.rounds,
        )
        for delay_s, workers in (
            (DELAY_S, (FEW_WORKERS, options.workers)),
            (spread_delay_s, (options.workers,)),
        )
    )
    rates = found["rates"]
    few = of("torch", FEW_WORKERS)
    many = {peer: of(peer, options.workers) for peer in ("torch", "dpex")}
    record["settings"] = {
        "delay_s": DELAY_S,
        "spread_delay_s": spread_delay_s,
        "batch_size": BATCH_SIZE,
        "batches_per_worker": BATCHES_PER_WORKER,
        "samples": found["samples"],
    }
    record["spent"] = found["spent"]
    record["samples_per_s"] = {name: summarise(rate) for name, rate in rates.items()}
    record["means"] = means_of(found)
    # dpex's idle workers and their Ray run during torch's epochs, except the first one.
    without_ray = sum_up(found["spent"][few][:1], found["samples"][few])
    record["without_ray"] = without_ray
    record["idle_ray_percent"] = (
        record["means"][few]["loader_percent"] - without_ray["loader_percent"]
    )
    record["over_torch"] = summarise(ratios(rates[many["dpex"]], rates[many["torch"]]))
    record["gain"] = {
        peer: summarise(ratios(rates[name], rates[of(peer, FEW_WORKERS)]))
        for peer, name in many.items()
    }
    record["spread"] = {
        "spent": spread["spent"],
        "samples_per_s": {name: summarise(rate) for name, rate in spread["rates"].items()},
        "means": means_of(spread),
    }
    goal, spread_goal = goals_of_record(record, options.workers)
    record["goals"] = [asdict(goal), asdict(spread_goal)]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"Pictures from a store that answers after {DELAY_S * 1e3:.0f} ms: warm epochs",
        rates,
        "samples/s",
    )
    for name, means in {**record["means"], f"{few}, before Ray": without_ray}.items():
        print(f"{name}: " + ", ".join(f"{what} {mean:.2f}" for what, mean in means.items()))
    for each in (goal, spread_goal):
        print(f"{each.what}: {each.figure}, goal {each.bound}; {each.note}")


def means_of(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Summarise the counted epochs of each loader, given the result of ``measure``."""
    return {
        name: sum_up(spent[1:], found["samples"][name]) for name, spent in found["spent"].items()
    }


def goals_of_record(record: Mapping[str, Any], workers: int) -> tuple[Goal, Goal]:
    """Return the goals for the store's usual delay and for the longer one.

    Args:
        record: Record with the summaries of all epochs.
        workers: Number of workers of both goals.
    """
    many = {peer: of(peer, workers) for peer in ("torch", "dpex")}
    spread = record["spread"]
    spread_rates = [spread["samples_per_s"][many[peer]]["all"] for peer in ("dpex", "torch")]
    gains = ", ".join(f"{peer} {record['gain'][peer]['median']:.1f}" for peer in many)
    return (
        Goal.of(
            "storage",
            f"store, {workers} workers: dpex/torch",
            record["over_torch"]["all"],
            ">=",
            GOAL,
            "ratio",
            f"times the rate of {FEW_WORKERS} workers: {gains}; "
            f"{shares(record['means'], many)}; dpex's idle processes take "
            f"{record['idle_ray_percent']:.0f} % in torch's turns",
        ),
        Goal.of(
            "storage",
            f"store, {workers} workers, answers after "
            f"{1e3 * record['settings']['spread_delay_s']:.0f} ms: dpex/torch",
            ratios(*spread_rates),
            ">=",
            GOAL,
            "ratio",
            "each worker has as much core time for a picture as on a core of its own; "
            + shares(spread["means"], many),
        ),
    )


def shares(means: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> str:
    """Return the shares of the machine's time as text.

    Args:
        means: Means of each loader, as in :func:`sum_up`.
        names: Name of the loader of each peer.
    """
    parts = (
        f"{peer}: loader {means[name]['loader_percent']:.0f}, server "
        f"{means[name]['server_percent']:.0f}, others {means[name]['others_percent']:.0f} %"
        for peer, name in names.items()
    )
    return "of the machine, " + "; ".join(parts)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratios of two loaders' rates, round by round."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    main()
