"""One workload, all peers in turn: the figures behind every ratio.

Peers take turns, one epoch each (A B A B), in one process tree, because a shared machine drifts by
more than the peers differ: only neighbours compare, so the verdict is the median of the ratios of
neighbours and not the ratio of two medians. The first epoch of each is its start-up and is
reported apart.

An idle Ray takes a twentieth of a core, which others would miss on a small host. So Ray Data, with
a Ray of its own, starts when all others are through, and takes turns with dpex alone.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any, Self

import torch

from benchmarks.goals import Goal
from benchmarks.harness import SETTLE_S, Case, Epoch, describe_machine, say, summarise, write
from benchmarks.peers import RAY_DATA, START_ORDER, Peer, start
from benchmarks.plots import bars

# Without these there is nothing to compare, so that what goes wrong in them is an error.
REQUIRED_PEERS = {"torch", "dpex", "inline"}

Runs = Mapping[str, Sequence[Epoch]]


def compare(case: Case, options: Any) -> dict[str, Any]:
    """Run one workload through every peer in turn, record all of it, and draw it.

    Args:
        case: The workload.
        options: What :func:`benchmarks.harness.arguments` gave.

    Returns:
        The record, as written to ``options.out``.
    """
    record = describe_machine(case.name) | measure(case, options)
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        f"{case.title}: warm epochs, {options.workers} workers",
        {peer: rate["all"] for peer, rate in record["samples_per_s"].items() if peer != "inline"},
        "samples/s",
        record["limit_samples_per_s"] if case.goal_of_limit else None,
    )
    return record


def measure_apart(case: Case, options: Any) -> dict[str, Any]:
    """Do what :func:`measure` does in a process of its own, so that it forks from a clean one."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(measure, case, options).result()


def measure(case: Case, options: Any) -> dict[str, Any]:
    """Run one workload through every peer in turn.

    Args:
        case: The workload.
        options: ``workers``, ``rounds``, and ``peers`` unless ``all_peers``.

    Returns:
        The part of the record that was measured.
    """
    torch.set_num_threads(1)
    names = list(case.peers if options.all_peers else options.peers)
    if case.inline_batches:
        names.append("inline")
    with Field(case, options.workers) as field:
        field.start(name for name in names if name not in RAY_DATA)
        runs = field.take_turns([name for name in names if name in field.peers], options.rounds)
        field.start(name for name in names if name in RAY_DATA)
        late = [name for name in RAY_DATA if name in field.peers]
        late_runs = field.take_turns(["dpex", *late], options.rounds) if late else {}
    over = ratios(runs) | ratios(late_runs)
    late_dpex = late_runs.pop("dpex", [])
    record = summary(field, runs | late_runs, over)
    record["dpex_beside_raydata"] = [asdict(epoch) for epoch in late_dpex]
    return record


class Field:
    """The peers that are ready to run a workload.

    Attributes:
        case: The workload.
        num_workers: Of every peer.
        peers: Those that have started.
        cold: The first epoch of each.
        absent: Why a peer is not among them.
    """

    def __init__(self, case: Case, num_workers: int) -> None:
        self.case = case
        self.num_workers = num_workers
        self.peers: dict[str, Peer] = {}
        self.cold: dict[str, Epoch] = {}
        self.absent: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers.values():
            peer.close()

    def start(self, names: Iterable[str]) -> None:
        """Start some peers and run a first epoch of each."""
        for name in sorted(names, key=START_ORDER.index):
            try:
                self.peers[name] = start(name, self.case, self.num_workers)
                self.cold[name] = self.run(name)
            except Exception as error:
                if name in REQUIRED_PEERS:
                    raise
                if name in self.peers:
                    self.peers.pop(name).close()
                self.absent[name] = f"{type(error).__name__}: {error}"
                say(f"{self.case.name} without {name}: {self.absent[name]}")
            else:
                first_s = self.cold[name].first_batch_s
                say(f"{self.case.name} start-up {name}: first batch after {first_s:.2f} s")

    def take_turns(self, names: Sequence[str], rounds: int) -> dict[str, list[Epoch]]:
        """Run one epoch of each peer after the other, several times."""
        runs: dict[str, list[Epoch]] = {name: [] for name in names}
        for round_number in range(rounds):
            for name, epochs in runs.items():
                # What a peer tidies up after its epoch is not the next one's cost.
                time.sleep(SETTLE_S)
                epochs.append(self.run(name))
            rates = ", ".join(f"{name} {runs[name][-1].samples_per_s:,.0f}" for name in names)
            say(f"{self.case.name} round {round_number + 1}/{rounds}, samples/s: {rates}")
        return runs

    def run(self, name: str) -> Epoch:
        """Run one epoch of a peer, whole: one that leaves samples out would be fast."""
        epoch = self.peers[name].epoch()
        expected = length(self.case)
        if name == "inline":
            expected = min(expected, self.case.inline_batches * self.case.batch_size)
        if epoch.samples != expected:
            raise RuntimeError(f"{name} gave {epoch.samples} samples of {expected}")
        return epoch


def length(case: Case) -> int:
    """Give the number of samples in an epoch."""
    return len(case.dataset)  # type: ignore[arg-type]


def ratios(runs: Runs) -> dict[str, list[float]]:
    """Give dpex's rate over that of each other peer, turn by turn."""
    return {
        peer: [
            ours.samples_per_s / theirs.samples_per_s
            for ours, theirs in zip(runs["dpex"], epochs, strict=True)
        ]
        for peer, epochs in runs.items()
        if "dpex" in runs and peer != "dpex"
    }


def summary(field: Field, runs: Runs, over: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Sum up what was measured.

    Args:
        field: The workload and its peers.
        runs: The counted epochs of each peer.
        over: dpex's rate over that of each other peer, turn by turn.

    Returns:
        The part of the record that was measured.
    """
    case = field.case
    rates = {
        peer: summarise([run.samples_per_s for run in epochs]) for peer, epochs in runs.items()
    }
    firsts = {
        peer: summarise([run.first_batch_s for run in epochs]) for peer, epochs in runs.items()
    }
    cores = len(os.sched_getaffinity(0))
    record: dict[str, Any] = {
        "title": case.title,
        "settings": {
            "batch_size": case.batch_size,
            "num_workers": field.num_workers,
            "samples": length(case),
            "shuffle": case.shuffle,
        },
        "peers_absent": field.absent,
        "cold": {peer: asdict(epoch) for peer, epoch in field.cold.items()},
        "runs": {peer: [asdict(epoch) for epoch in epochs] for peer, epochs in runs.items()},
        "samples_per_s": rates,
        "first_batch_s": firsts,
        "limit_samples_per_s": rates["inline"]["median"] * cores if "inline" in rates else None,
        "dpex_over": {peer: summarise(values) for peer, values in over.items()},
    }
    if "torch" in over:
        record["dpex_over_torch"] = record["dpex_over"]["torch"]
    record["goals"] = [asdict(goal) for goal in goals(case, runs, over, cores)]
    return record


def goals(
    case: Case, runs: Runs, over: Mapping[str, Sequence[float]], cores: int
) -> Iterator[Goal]:
    """Hold the figures of a case to its goals.

    Args:
        case: The workload, with its goals.
        runs: The counted epochs of each peer.
        over: dpex's rate over that of each other peer, turn by turn.
        cores: The limit is so many times the single process's rate.

    Yields:
        One goal for each that the case has, if its peers took part.
    """
    for peer, goal in case.goals_over.items():
        if peer in over:
            yield Goal.of(f"{case.name}: dpex/{peer}", over[peer], ">=", goal, "ratio")
    if case.goal_of_limit and "inline" in over:
        of_limit = [ratio / cores for ratio in over["inline"]]
        yield Goal.of(f"{case.name}: dpex/limit", of_limit, ">=", case.goal_of_limit, "ratio")
    if case.goal_first_batch_ms and "torch" in over:
        ours_ms, theirs_ms = (
            [epoch.first_batch_s * 1e3 for epoch in runs[peer]] for peer in ("dpex", "torch")
        )
        differences = [ours - theirs for ours, theirs in zip(ours_ms, theirs_ms, strict=True)]
        yield Goal(
            what=f"{case.name}: first batch of a warm epoch, dpex - torch",
            value=statistics.median(ours_ms) - statistics.median(theirs_ms),
            min=min(differences),
            max=max(differences),
            goal=case.goal_first_batch_ms,
            relation="<=",
            form="ms",
            note=f"torch's comes after {statistics.median(theirs_ms):.1f} ms",
        )
