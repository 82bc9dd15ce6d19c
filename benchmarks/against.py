"""Comparison of the working tree with another revision, on the same machine in the same minutes.

``make bench-against REV=HEAD~1`` compares only ``dpex/``: the benchmarks of the working tree
measure both revisions. Each measurement runs in a fresh process. That process and its workers
import ``dpex`` of their revision. The revisions alternate: old new, new old, old new.

A case such as ``tiny`` measures what a user gets on one machine: processes, or a local Ray in
revisions without a choice of a carrier. ``tiny-local`` measures a local Ray in both.
"""

import argparse
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

import dpex
from benchmarks import (
    benchmark_cold,
    benchmark_jpeg,
    benchmark_latency,
    benchmark_memory,
    benchmark_null,
    benchmark_ragged,
    benchmark_tabular,
    benchmark_tiny,
    benchmark_widen,
    benchmark_worker_init,
    in_memory,
)
from benchmarks.fresh import run_fresh
from benchmarks.harness import (
    SETTLE_S,
    Case,
    close,
    describe_machine,
    make_loader,
    say,
    spread,
    summarise,
    write,
)
from benchmarks.start_up import first_jpeg_batch, first_sleeping_batch
from benchmarks.throughput import measure
from benchmarks.verdicts import Figure, Side, chance_of_worse, turns, verdict
from benchmarks.workloads import make_jpegs

ROOT = Path(__file__).parents[1]
DEFAULT_CASES = ("tiny", "jpeg", "null", "cold", "widen")
# Enough for a median. The process needs two to four times as long before these epochs.
EPOCHS = 3
MEMORY_WORKERS = 8
# As in the memory benchmark, but with fewer objects: five million objects take 7 GB.
MEMORY_ROWS = {
    "array": benchmark_memory.GIB // in_memory.ROW_BYTES,
    "objects": 1_000_000,
}

OVER_TORCH = Figure("dpex/torch", more_is_better=True)
RATE = Figure("dpex, samples/s", more_is_better=True, form=",.0f")
WARM_FIRST_BATCH = Figure("dpex, first batch of an epoch, ms", more_is_better=False, form=",.0f")
FIRST_BATCH = Figure("process start to first batch, s", more_is_better=False)
NARROWEST = Figure(f"first batch, {benchmark_widen.WORKERS[0]} workers, s", more_is_better=False)
WIDEST = Figure(f"first batch, {benchmark_widen.WORKERS[-1]} workers, s", more_is_better=False)
WIDEST_OVER_NARROWEST = Figure(
    f"first batch, {benchmark_widen.WORKERS[-1]} workers / {benchmark_widen.WORKERS[0]}",
    more_is_better=False,
)
MEMORY = {
    name: Figure(f"PSS of {MEMORY_WORKERS} workers, {name}, MB", more_is_better=False, form=",.0f")
    for name in MEMORY_ROWS
}

# The workload and the number of workers of each throughput benchmark.
THROUGHPUT: Mapping[str, tuple[Callable[[], Case], int]] = {
    "tiny": (benchmark_tiny.case, 2),
    "jpeg": (benchmark_jpeg.case, 2),
    "null": (benchmark_null.case, 2),
    "ragged": (benchmark_ragged.case, 2),
    "tabular": (benchmark_tabular.case, 2),
    **{
        f"latency-{workers}": (partial(benchmark_latency.case, workers), workers)
        for workers in benchmark_latency.WORKERS
    },
    "worker_init": (benchmark_worker_init.case, 8),
}
# Suffix of a throughput case that measures dpex on a local Ray in both revisions.
ON_LOCAL = "-local"


@dataclass(frozen=True)
class Turn:
    """One measurement of one side.

    Attributes:
        figures: The values that are compared.
        detail: All measured values, for the record.
    """

    figures: Mapping[Figure, float]
    detail: Any


@dataclass(frozen=True)
class Comparison:
    """The method that measures a case.

    Attributes:
        turn: Measures one side, given its tree.
        warm_ups: Number of rounds that do not count.
    """

    turn: Callable[[Path], Turn]
    warm_ups: int = 0


def main() -> None:
    options = arguments()
    revision = git("rev-parse", "--verify", f"{options.revision}^{{commit}}")
    record = describe_machine("against")
    record["command"] = command(options)
    record["revisions"] = {"old": revision, "new": git("describe", "--always", "--dirty")}
    record["rounds"], record["epochs"] = options.rounds, options.epochs
    record["new_env"] = options.new_env
    started = time.monotonic()
    with two_trees(revision) as trees:
        for tree in trees.values():
            run_fresh(check_workers, tree=tree)
        new_env = dict(setting.split("=", 1) for setting in options.new_env)
        record["cases"] = {
            name: compare(name, trees, options.rounds, new_env, options.epochs)
            for name in options.cases
        }
    record["seconds"] = time.monotonic() - started
    write(record, options.out)
    print(report(record))


def arguments() -> Any:
    """Parse the command line."""
    # SIGTERM ends the run like Ctrl-C, so that the trees are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="what git calls the old side, such as HEAD~1")
    parser.add_argument(
        "--cases", nargs="+", default=DEFAULT_CASES, choices=[*comparisons(EPOCHS)], metavar="CASE"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each side")
    parser.add_argument(
        "--epochs",
        type=int,
        default=EPOCHS,
        help="counted epochs of a throughput turn; their median counts",
    )
    parser.add_argument(
        "--new-env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable of the new side alone",
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench/against.json"))
    return parser.parse_args()


def command(options: Any) -> str:
    """Return the ``make`` command with the options of this command line."""
    cases = shlex.quote(" ".join(options.cases))
    more = "".join(f" --new-env {setting}" for setting in options.new_env)
    arguments = f'"--rounds {options.rounds} --epochs {options.epochs}{more}"'
    return f"make bench-against REV={options.revision} AGAINST={cases} BENCH_ARGS={arguments}"


def git(*words: str) -> str:
    """Run git in the working tree and return what it prints."""
    done = subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


# --- trees ----------------------------------------------------------------------------------------


@contextmanager
def two_trees(revision: str) -> Iterator[dict[Side, Path]]:
    """Make a tree for each side, and remove both at the end.

    A tree has ``dpex`` of its side, ``benchmarks`` of the working tree, and a link to the working
    tree's ``build``, which has the data. The code is copied, so edits during the run change
    nothing.

    Args:
        revision: Revision of the old side.
    """
    with tempfile.TemporaryDirectory(prefix="dpex-against-") as folder:
        trees: dict[Side, Path] = {"old": Path(folder, "old"), "new": Path(folder, "new")}
        with worktree(revision, Path(folder, "worktree")) as checkout:
            copy(checkout / "dpex", trees["old"] / "dpex")
        copy(ROOT / "dpex", trees["new"] / "dpex")
        (ROOT / "build").mkdir(exist_ok=True)
        for tree in trees.values():
            copy(ROOT / "benchmarks", tree / "benchmarks")
            (tree / "build").symlink_to(ROOT / "build")
        yield trees


@contextmanager
def worktree(revision: str, path: Path) -> Iterator[Path]:
    """Check a revision out into a git worktree, and remove it at the end."""
    # An interrupted "git worktree add" removes its own files.
    git("worktree", "add", "--quiet", "--detach", str(path), revision)
    try:
        yield path
    finally:
        git("worktree", "remove", "--force", str(path))


def copy(source: Path, target: Path) -> None:
    """Copy the code of a package."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "results"))


class Origins(Dataset[str]):
    """Samples that are the path of dpex in the process that reads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return dpex.__file__


def origin() -> str:
    """Return the path of dpex in this process."""
    return dpex.__file__


def check_workers() -> None:
    """Check that workers and other Ray processes import the same dpex as this process.

    :func:`benchmarks.fresh.run_fresh` checks the process itself, in every measurement.

    Raises:
        RuntimeError: A process imports another dpex.
    """
    import ray

    origins: set[str] = set()
    for peer in ("dpex", "local"):
        loader = make_loader(peer, Origins(), batch_size=2, num_workers=2)
        origins.update(path for batch in loader for path in batch)
        if peer == "local":
            # Ray starts the process of this task, like that of the pipeline actor.
            origins.add(ray.get(ray.remote(num_cpus=0)(origin).remote()))
        close(loader)
    if origins != {dpex.__file__}:
        raise RuntimeError(f"workers must import {dpex.__file__}, imported {origins}")


# --- cases ----------------------------------------------------------------------------------------


def comparisons(epochs: int) -> dict[str, Comparison]:
    """Return the method that measures each case, by the name of the case.

    Args:
        epochs: Number of counted epochs in a throughput measurement.
    """
    return {
        **{
            f"{name}{suffix}": Comparison(partial(throughput_turn, name, peer, epochs))
            for suffix, peer in (("", "dpex"), (ON_LOCAL, "local"))
            for name in THROUGHPUT
        },
        # The first round fills the page cache.
        "cold": Comparison(cold_turn, warm_ups=1),
        "widen": Comparison(widen_turn),
        "memory": Comparison(memory_turn),
    }


def throughput_turn(name: str, peer: str, epochs: int, tree: Path) -> Turn:
    """Measure torch and a peer of dpex in turn, in one fresh process."""
    measured = run_fresh(throughput, name=name, peer=peer, epochs=epochs, tree=tree)
    first_s = statistics.median(epoch["first_batch_s"] for epoch in measured["runs"][peer])
    figures = {
        OVER_TORCH: measured["dpex_over"]["torch"]["median"],
        RATE: measured["samples_per_s"][peer]["median"],
        WARM_FIRST_BATCH: 1e3 * first_s,
    }
    return Turn(figures, measured["runs"])


def throughput(name: str, peer: str, epochs: int) -> dict[str, Any]:
    """Run a workload through torch and dpex: a first epoch each, then the counted epochs."""
    make_case, workers = THROUGHPUT[name]
    case = replace(make_case(), inline_batches=0, goals_over={}, goal_first_batch_ms=None)
    options = argparse.Namespace(
        workers=workers, rounds=epochs, peers=["torch", peer], all_peers=False
    )
    return measure(case, options, peer)


def cold_turn(tree: Path) -> Turn:
    """Measure the time to the first batch of photographs, in a fresh process."""
    moments = run_fresh(
        first_jpeg_batch,
        peer="dpex",
        folder=str(make_jpegs(benchmark_cold.FOLDER.resolve())),
        batch_size=benchmark_cold.BATCH_SIZE,
        workers=2,
        tree=tree,
    )
    return Turn({FIRST_BATCH: moments["first_batch_s"]}, moments)


def widen_turn(tree: Path) -> Turn:
    """Measure the time to the first batch with the fewest and with the most workers."""
    ends = (benchmark_widen.WORKERS[0], benchmark_widen.WORKERS[-1])
    narrowest_s, widest_s = (
        run_fresh(
            first_sleeping_batch,
            peer="dpex",
            sleep_s=benchmark_widen.SLEEP_S,
            batch_size=benchmark_widen.BATCH_SIZE,
            workers=workers,
            ramp_share=0.0,
            give_up_s=benchmark_widen.GIVE_UP_S,
            tree=tree,
        )["first_batch_s"]
        for workers in ends
    )
    figures = {
        NARROWEST: narrowest_s,
        WIDEST: widest_s,
        WIDEST_OVER_NARROWEST: widest_s / narrowest_s,
    }
    return Turn(figures, None)


def memory_turn(tree: Path) -> Turn:
    """Measure the memory of all processes for each dataset, in a fresh process each."""
    runs = {
        kind: run_fresh(
            in_memory.measure,
            kind=kind,
            rows=rows,
            peer="dpex",
            workers=MEMORY_WORKERS,
            tree=tree,
        )
        for kind, rows in MEMORY_ROWS.items()
    }
    figures = {MEMORY[kind]: benchmark_memory.total_mb(run) for kind, run in runs.items()}
    return Turn(figures, runs)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start in this context."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def compare(
    name: str, trees: Mapping[Side, Path], rounds: int, new_env: Mapping[str, str], epochs: int
) -> dict[str, Any]:
    """Measure both sides of a case in turn.

    Args:
        name: Name of the case.
        trees: Tree of each side.
        rounds: Number of counted measurements of each side.
        new_env: Environment variables of the new side only.
        epochs: Number of counted epochs in a throughput measurement.

    Returns:
        The case's part of the record.
    """
    comparison = comparisons(epochs)[name]
    counted: dict[Side, list[Turn]] = {"old": [], "new": []}
    started = time.monotonic()
    load_before = os.getloadavg()
    for number, side in turns(rounds, comparison.warm_ups):
        time.sleep(SETTLE_S)
        with environment(new_env if side == "new" else {}):
            turn = comparison.turn(trees[side])
        values = ", ".join(f"{f.name} {value:{f.form}}" for f, value in turn.figures.items())
        say(f"{name} round {number}/{rounds} {side}: {values}")
        if number > 0:
            counted[side].append(turn)
    old, new = counted["old"], counted["new"]
    return {
        "figures": [
            compare_figure(
                figure,
                [turn.figures[figure] for turn in old],
                [turn.figures[figure] for turn in new],
            )
            for figure in old[0].figures
        ],
        "turns": {side: [turn.detail for turn in found] for side, found in counted.items()},
        "seconds": time.monotonic() - started,
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }


def compare_figure(figure: Figure, old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """Summarise a figure of both sides; each side has one value per round."""
    ratios = [value / other for value, other in zip(new, old, strict=True)]
    return {
        "figure": figure.name,
        "form": figure.form,
        "old": summarise(old),
        "new": summarise(new),
        "new_over_old": summarise(ratios),
        "verdict": verdict(figure, old, new),
    }


# --- report ---------------------------------------------------------------------------------------


def report(record: Mapping[str, Any]) -> str:
    """Return the table and its caption as Markdown."""
    rows = [
        "| case | figure | old, median [min, max] | new, median [min, max] "
        "| new / old, median [range] | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in record["cases"].items():
        for part in case["figures"]:
            old, new = (spread(part[side], part["form"]) for side in ("old", "new"))
            word = "**worse**" if part["verdict"] == "worse" else part["verdict"]
            rows.append(
                f"| {name} | {part['figure']} | {old} | {new} "
                f"| {spread(part['new_over_old'])} | {word} |"
            )
    old, new = record["revisions"]["old"][:12], record["revisions"]["new"]
    with_env = "".join(f", with {setting}" for setting in record["new_env"])
    loads = " and ".join(f"{record[key][0]:.1f}" for key in ("load_before", "load_after"))
    busiest = statistics.median(case["load_before"][0] for case in record["cases"].values())
    caption = (
        f"Old is {old}, new is the working tree at {new}{with_env}. Each side has "
        f"{record['rounds']} round(s), which alternate. A ratio compares the two turns of one "
        "round. "
        'A figure is "within" if its new median is inside the range of the old rounds. Outside '
        'of it, the figure is "worse" or "better". '
        f"With equal code, chance makes at most {chance_of_worse(record['rounds']):.0%} of the "
        f'figures "worse". The load average was {loads} before and after the run, {busiest:.1f} at '
        f"the start of the median case. The run took {record['seconds'] / 60:.0f} minutes on "
        f"{record['cores']} cores ({record['cpu']})."
    )
    return "\n".join([*rows, "", caption])


if __name__ == "__main__":
    main()
