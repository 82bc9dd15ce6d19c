"""Small pictures from an S3 store whose answers take 20 ms; 32 workers, and 2 for comparison.

The store is a real one, rclone's, on this machine, so that it takes part of its cores; how much is
reported. An epoch has as many batches for each worker, however many there are.

Where cores are few both loaders wait for the pictures' processor time and no longer for the
store. So there is a second part, in which an answer takes as many times longer as there are workers
for a core: each has as much of a core's time for a picture as if it had one for itself.
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
# The epochs of all loaders together are shorter than dpex's workers wait for their next one.
BATCHES_PER_WORKER = 8
FEW_WORKERS = 2
RUN_TIMEOUT_S = 1_800
GOAL = 0.98

# Arrow asks for an object's size before it asks for the object.
METHODS = ("HEAD", "GET")

Spent = Mapping[str, float]


class Meter:
    """What epochs take: processor time, and requests.

    Args:
        store: The server, told apart from what this process has started else.

    Attributes:
        spent: By name, for each epoch the processor seconds of the ``server``, of the ``loader``
            (trainer, workers, an embedded Ray) and of everything on the machine (``busy``), what
            it could have given (``machine``), and the number of requests of each method.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.spent: dict[str, list[Spent]] = defaultdict(list)

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Note what is spent until the context ends."""
        before = self.read()
        yield
        after = self.read()
        self.spent[name].append({what: after[what] - before[what] for what in after})

    def read(self) -> dict[str, float]:
        """Return what has been spent so far."""
        serving = self.store.processes()
        machine = psutil.cpu_times()
        idle = machine.idle + machine.iowait
        # A guest's time is in its host's too.
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
    """Serve the pictures, and let both loaders read them in turn.

    Args:
        folder: With a bucket in it, and pictures in the bucket.
        delay_s: How long an answer takes.
        workers: How many each loader has, in turn.
        rounds: Counted epochs of each.

    Returns:
        ``samples`` of an epoch, their rates, and what each epoch took, also the first, by loader.
    """
    torch.set_num_threads(1)
    with object_store(Path(folder), delay_s) as store:
        os.environ.update(store.environment)
        pictures = ImageFolder("s3://bucket/pictures", transforms.ToTensor())
        loaders, samples = {}, {}
        # Both of torch's before dpex's: its forks are then of a process without Ray.
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
    """Name a loader."""
    return f"{peer}, {workers} workers"


def sum_up(spent: Sequence[Spent], samples: int) -> dict[str, float]:
    """Give shares of the machine, and what a sample took, over some epochs.

    Args:
        spent: In each epoch, as :class:`Meter` has it.
        samples: Of an epoch.
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
    # In torch's turns dpex's workers wait, and their Ray, which its first epoch was without.
    without_ray = sum_up(found["spent"][few][:1], found["samples"][few])
    idle_percent = record["means"][few]["loader_percent"] - without_ray["loader_percent"]
    record["without_ray"] = without_ray
    record["idle_ray_percent"] = idle_percent
    over = ratios(rates[many["dpex"]], rates[many["torch"]])
    gains = {
        peer: summarise(ratios(rates[name], rates[of(peer, FEW_WORKERS)]))
        for peer, name in many.items()
    }
    record["over_torch"] = summarise(over)
    record["gain"] = gains
    torchs, ours = record["means"][many["torch"]], record["means"][many["dpex"]]
    goal = Goal.of(
        f"store, {options.workers} workers: dpex/torch",
        over,
        ">=",
        GOAL,
        "ratio",
        f"{gains['torch']['median']:.1f} and {gains['dpex']['median']:.1f} times the rate of "
        f"{FEW_WORKERS} workers; {ours['requests_per_sample']:.1f} requests a sample, for which "
        f"the server takes {ours['server_ms_per_sample']:.1f} ms of processor time; of the machine "
        f"the server has {torchs['server_percent']:.0f} and {ours['server_percent']:.0f} %, the "
        f"loader {torchs['loader_percent']:.0f} (of them dpex's, idle, {idle_percent:.0f}) and "
        f"{ours['loader_percent']:.0f} %, others {torchs['others_percent']:.0f} and "
        f"{ours['others_percent']:.0f} %",
    )
    record["spread"] = {
        "spent": spread["spent"],
        "samples_per_s": {name: summarise(rate) for name, rate in spread["rates"].items()},
        "means": means_of(spread),
    }
    torchs, ours = (record["spread"]["means"][many[peer]] for peer in ("torch", "dpex"))
    spread_goal = Goal.of(
        f"store, {options.workers} workers, answers after {1e3 * spread_delay_s:.0f} ms, so that "
        "each has as much of a core as if it had one: dpex/torch",
        ratios(spread["rates"][many["dpex"]], spread["rates"][many["torch"]]),
        ">=",
        GOAL,
        "ratio",
        "; ".join(
            f"{peer}: server {means['server_percent']:.0f}, loader {means['loader_percent']:.0f}, "
            f"others {means['others_percent']:.0f} % of the machine"
            for peer, means in (("torch", torchs), ("dpex", ours))
        ),
    )
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
    """Sum up the counted epochs of each loader, of what ``measure`` has found."""
    return {
        name: sum_up(spent[1:], found["samples"][name]) for name, spent in found["spent"].items()
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Divide turn by turn."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    main()
