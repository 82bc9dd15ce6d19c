"""One workload, read by all peers in turn: the figures behind every ratio.

Peers take turns, one epoch each (A B A B), in one process tree. The speed of a shared machine
drifts by more than the peers differ, so only adjacent epochs are compared. The result is the median
of their ratios, and not the ratio of two medians. The first epoch of each peer is its start-up, and
is reported separately.

An idle Ray takes a twentieth of a core, which other peers would miss on a small machine. So peers
that need a Ray start after all other peers have finished, and take turns with dpex only.
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
from benchmarks.peers import START_ORDER, WITH_RAY, Peer, start
from benchmarks.plots import bars

# Without these peers there is nothing to compare, so their exceptions end the benchmark.
REQUIRED_PEERS = {"torch", "dpex", "inline"}

Runs = Mapping[str, Sequence[Epoch]]


def compare(case: Case, options: Any) -> dict[str, Any]:
    """Run one workload with every peer in turn, write the record, and draw it.

    Args:
        case: The workload.
        options: The result of :func:`benchmarks.harness.arguments`.

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
    """Call :func:`measure` in a new process, so that no earlier loader affects its forks."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(measure, case, options).result()


def measure(case: Case, options: Any, ours: str = "dpex") -> dict[str, Any]:
    """Run one workload with every peer in turn.

    Args:
        case: The workload. It has no goals if ``ours`` is not ``"dpex"``.
        options: ``workers``, ``rounds``, ``all_peers``, and ``peers`` if ``all_peers`` is false.
        ours: The peer that is compared with the others.

    Returns:
        The measured part of the record.
    """
    torch.set_num_threads(1)
    names = list(case.peers if options.all_peers else options.peers)
    if case.inline_batches:
        names.append("inline")
    late = [name for name in WITH_RAY if name in names and name != ours]
    with Field(case, options.workers) as field:
        field.start(name for name in names if name not in late)
        runs = field.take_turns([name for name in names if name in field.peers], options.rounds)
        field.start(late)
        late = [name for name in late if name in field.peers]
        late_runs = field.take_turns([ours, *late], options.rounds) if late else {}
    over = ratios(runs, ours) | ratios(late_runs, ours)
    late_ours = late_runs.pop(ours, [])
    record = summary(field, runs | late_runs, over)
    record["dpex_beside_ray"] = [asdict(epoch) for epoch in late_ours]
    return record


class Field:
    """The peers that are ready to run a workload.

    Attributes:
        case: The workload.
        num_workers: Number of workers of every peer.
        peers: The peers that have started.
        cold: The first epoch of each peer.
        absent: For each peer that could not start, the reason.
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
        """Start some peers, and run a first epoch of each."""
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
        """Run one epoch of each peer in turn, several times."""
        runs: dict[str, list[Epoch]] = {name: [] for name in names}
        for round_number in range(rounds):
            for name, epochs in runs.items():
                # The clean-up after one epoch must not slow down the next.
                time.sleep(SETTLE_S)
                epochs.append(self.run(name))
            rates = ", ".join(f"{name} {runs[name][-1].samples_per_s:,.0f}" for name in names)
            say(f"{self.case.name} round {round_number + 1}/{rounds}, samples/s: {rates}")
        return runs

    def run(self, name: str) -> Epoch:
        """Run one epoch of a peer, and check that it delivered all samples."""
        epoch = self.peers[name].epoch()
        expected = length(self.case)
        if name == "inline":
            expected = min(expected, self.case.inline_batches * self.case.batch_size)
        if epoch.samples != expected:
            raise RuntimeError(f"{name} gave {epoch.samples} samples of {expected}")
        return epoch


def length(case: Case) -> int:
    """Return the number of samples in an epoch."""
    return len(case.dataset)  # type: ignore[arg-type]


def ratios(runs: Runs, ours: str = "dpex") -> dict[str, list[float]]:
    """Return the rate of a peer of dpex over that of each other peer, round by round."""
    return {
        peer: [
            mine.samples_per_s / theirs.samples_per_s
            for mine, theirs in zip(runs[ours], epochs, strict=True)
        ]
        for peer, epochs in runs.items()
        if ours in runs and peer != ours
    }


def summary(field: Field, runs: Runs, over: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Summarise the measurements of a field; see ``summarised``."""
    record = summarised(field.case, field.num_workers, field.cold, runs, over)
    return record | {"peers_absent": field.absent}


def summarised(
    case: Case,
    num_workers: int,
    cold: Mapping[str, Epoch],
    runs: Runs,
    over: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Summarise the measurements of a workload.

    Args:
        case: The workload.
        num_workers: Number of workers of every peer.
        cold: The first epoch of each peer.
        runs: The counted epochs of each peer.
        over: dpex's rate over that of each other peer, round by round.

    Returns:
        The measured part of the record.
    """
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
            "num_workers": num_workers,
            "samples": length(case),
            "shuffle": case.shuffle,
        },
        "peers_absent": {},
        "cold": {peer: asdict(epoch) for peer, epoch in cold.items()},
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
    """Compare the figures of a case with its goals.

    Args:
        case: The workload, with its goals.
        runs: The counted epochs of each peer.
        over: dpex's rate over that of each other peer, round by round.
        cores: Number of cores. The limit is this number times the single process's rate.

    Yields:
        One goal for each goal of the case, if its peers took part.
    """
    for peer, goal in case.goals_over.items():
        if peer in over:
            what = f"{case.name}: dpex/{peer}"
            yield Goal.of(case.subject, what, over[peer], ">=", goal, "ratio")
    if case.goal_of_limit and "inline" in over:
        of_limit = [ratio / cores for ratio in over["inline"]]
        what = f"{case.name}: dpex/limit"
        yield Goal.of(case.subject, what, of_limit, ">=", case.goal_of_limit, "ratio")
    if case.goal_first_batch_ms and "torch" in over:
        ours_ms, theirs_ms = (
            [epoch.first_batch_s * 1e3 for epoch in runs[peer]] for peer in ("dpex", "torch")
        )
        differences = [ours - theirs for ours, theirs in zip(ours_ms, theirs_ms, strict=True)]
        yield Goal(
            subject="first batch",
            what=f"{case.name}: first batch of a warm epoch, dpex - torch",
            value=statistics.median(ours_ms) - statistics.median(theirs_ms),
            min=min(differences),
            max=max(differences),
            goal=case.goal_first_batch_ms,
            relation="<=",
            form="ms",
            note=f"torch's comes after {statistics.median(theirs_ms):.1f} ms",
        )
