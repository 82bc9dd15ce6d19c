"""What the measurements of a loader say: what limits it, and what to set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dpex.doctor.facts import Fact
from dpex.doctor.fixed_part import FixedPart, RandomSample
from dpex.doctor.loader_trial import Speed
from dpex.doctor.sample_costs import SampleCosts

__all__ = ["Measurements", "conclude", "describe_sample", "describe_speed"]

# Two rates within this factor of each other count as equal: rounds differ by about as much.
_EQUAL = 1.1
# A loader that reaches this share of a limit is limited by it.
_REACHES = 0.75
# A loader that exceeds a limit by this factor reads samples that cost less than those measured.
_CHEAPER = 1.25
# A larger gain of a cache is reported as this one: other costs take the place of reading.
_MANY_TIMES = 10
# A cache that saves less than either is not worth a line of the report: its lookup takes time.
_WORTH_SHARE = 0.1
_WORTH_S = 0.0002
# Other programs disturb the measurement if they take this share of a worker process's time.
_BUSY_SHARE = 0.1
# The start of an epoch is what limits it from this share on.
_START_SHARE = 0.25

_COUNTED = {
    "epochs": "in whole epochs",
    "steady": "after the first batches",
    "all": "from the start, for lack of batches",
}


@dataclass(frozen=True)
class Measurements:
    """The numbers of one report.

    Attributes:
        num_workers: The loader's number of workers in the trial.
        given_workers: ``num_workers`` as the user's function sets it.
        persistent_workers: Whether workers outlive an epoch.
        length: Number of samples of the dataset; None for a stream.
        cpus: Cores of this machine, or CPUs of the cluster if it has several nodes.
        nodes: Number of nodes.
        costs: The costs of a sample.
        torch: Speed of torch's loader; None without a result.
        dpex: Speed of dpex's loader; None without a result.
        step_s: Time of a training step, if the user gives it.
    """

    num_workers: int
    given_workers: int
    persistent_workers: bool
    length: int | None
    cpus: float
    nodes: int
    costs: SampleCosts
    torch: Speed | None
    dpex: Speed | None
    step_s: float | None

    @property
    def cpu_limit(self) -> float:
        """Samples per second if all CPUs do nothing else."""
        return self.cpus / max(self.costs.cpu_s, 1e-9)

    @property
    def worker_limit(self) -> float:
        """Samples per second if all workers make samples all the time and never lack a core."""
        return self.num_workers / max(self.costs.busy_s, 1e-9)

    @property
    def workers_for_cpus(self) -> int:
        """The number of workers that keep all CPUs busy."""
        return math.ceil(self.cpus * self.costs.busy_s / max(self.costs.cpu_s, 1e-9) - 1e-6)

    @property
    def needed(self) -> float | None:
        """Samples per second that the training step uses."""
        return self.costs.batch_samples / self.step_s if self.step_s else None

    @property
    def best(self) -> tuple[str, Speed] | None:
        """Name and speed of the faster loader; of dpex's on a cluster, which torch cannot use."""
        named = [("dpex's loader", self.dpex), ("torch's loader", self.torch)]
        found = [(name, speed) for name, speed in named if speed is not None]
        if self.nodes > 1 and self.dpex is not None:
            return found[0]
        return max(found, key=lambda one: one[1].samples_per_s, default=None)

    @property
    def cacheable(self) -> FixedPart | None:
        """The part of a sample that a cache can keep, if that saves enough time."""
        fixed = self.costs.fixed
        if not isinstance(fixed, FixedPart) or self.bound == "unknown":
            return None
        enough_s = max(_WORTH_SHARE * self.costs.wall_s, _WORTH_S)
        return fixed if self.saved_s(fixed) > enough_s else None

    def saved_s(self, fixed: FixedPart) -> float:
        """Return the time of a sample that a cache saves."""
        return min(fixed.make_s - fixed.load_s, self.costs.wall_s)

    @property
    def bound(self) -> str:
        """What limits the loader.

        Returns:
            ``"cpus"`` or ``"num_workers"``; ``"start"`` is the time until the first batch of an
            epoch. ``"unknown"`` if the limits are too low, since samples have become cheaper.
            ``"neither"`` otherwise.
        """
        if self.best is None:
            return "neither"
        speed = self.best[1]
        if speed.samples_per_s > _CHEAPER * min(self.cpu_limit, self.worker_limit):
            return "unknown"
        if speed.samples_per_s < _REACHES * min(self.cpu_limit, self.worker_limit):
            first_s = speed.later_first_batch_s
            is_short = first_s and speed.epoch_s and first_s >= _START_SHARE * speed.epoch_s
            return "start" if is_short else "neither"
        # With a worker for each core, more workers do not help: that is a limit of the cores.
        return "num_workers" if self.worker_limit * _EQUAL < self.cpu_limit else "cpus"


def conclude(found: Measurements) -> Iterator[Fact]:
    """Yield the limits, the part that could be cached, the training step, and what to set."""
    if found.costs.queued_s > _BUSY_SHARE * found.costs.wall_s:
        yield _busy(found.costs)
    yield _limits(found)
    if found.best is not None:
        yield _bound(found, *found.best)
    if found.cacheable is not None:
        yield _cache(found, found.cacheable)
    if found.needed is not None:
        yield _step(found, found.needed)
    advice = list(_advice(found)) or ["nothing: no setting that this report measures helps"]
    yield Fact("set", "\n".join(advice), "advice", advice)


def describe_sample(costs: SampleCosts) -> Fact:
    """Return the line about the costs of a sample."""
    parts = {
        "reading": costs.read_s,
        "transforms": costs.transform_s,
        "collate_fn": costs.collate_s,
    }
    shares = [f"{name} {_share(s, costs.wall_s)}" for name, s in parts.items() if s]
    notes = [
        f"{what} {_share(seconds, costs.wall_s)}"
        for what, seconds in (
            ("computes", costs.cpu_s),
            ("waits", costs.idle_s),
            ("has no core", costs.queued_s),
        )
        if seconds >= 0.01 * costs.wall_s
    ]
    text = (
        f"{_ms(costs.wall_s)} in one worker process: {', '.join(shares)}. The process "
        f"{', '.join(notes)} of the time ({costs.samples:,} samples)"
    )
    if costs.skipped:
        text += f"; {costs.skipped:,} skipped"
    return Fact(
        "sample",
        text,
        "sample",
        {
            "samples": costs.samples,
            "seconds": costs.wall_s,
            "cpu_seconds": costs.cpu_s,
            "waiting_seconds": costs.idle_s,
            "queued_seconds": costs.queued_s,
            "read_seconds": costs.read_s,
            "transform_seconds": costs.transform_s,
            "collate_seconds": costs.collate_s,
            "batch_samples": costs.batch_samples,
            "skipped": costs.skipped,
        },
    )


def describe_speed(name: str, speed: Speed, *, num_workers: int) -> Fact:
    """Return the line about the speed of a loader, which has its name in ``loaders_like``."""
    later = speed.later_first_batch_s
    return Fact(
        "as given" if name == "given" else f"{name}'s loader",
        f"{_rate(speed.samples_per_s)} {_COUNTED[speed.counts]}, num_workers={num_workers}; first "
        f"batch after {speed.first_batch_s:.2f} s"
        + ("" if later is None else f", in later epochs after {later:.2f} s"),
        f"{name}_loader",
        {
            "samples_per_s": speed.samples_per_s,
            "counts": speed.counts,
            "num_workers": num_workers,
            "first_batch_seconds": speed.first_batch_s,
            "later_first_batch_seconds": later,
            "epoch_seconds": speed.epoch_s,
            "samples": speed.samples,
            "encode_seconds": speed.encode_s,
            "receive_seconds": speed.receive_s,
        },
    )


def _busy(costs: SampleCosts) -> Fact:
    text = (
        "other programs use the cores: a worker process alone has no core for "
        f"{_share(costs.queued_s, costs.wall_s)} of its time. The times are too long, and the "
        "rates too low: repeat this on an idle machine"
    )
    return Fact("busy", text, "busy", {"queued_share": costs.queued_s / costs.wall_s})


def _limits(found: Measurements) -> Fact:
    text = (
        f"{_cpus(found)} can make at most {_rate(found.cpu_limit)}, num_workers="
        f"{found.num_workers} at most {_rate(found.worker_limit)}"
    )
    return Fact(
        "limits",
        text,
        "limits",
        {
            "cpus": found.cpus,
            "nodes": found.nodes,
            "cpus_samples_per_s": found.cpu_limit,
            "num_workers": found.num_workers,
            "workers_samples_per_s": found.worker_limit,
            "workers_for_all_cpus": found.workers_for_cpus,
        },
    )


def _bound(found: Measurements, name: str, speed: Speed) -> Fact:
    lower = min(found.cpu_limit, found.worker_limit)
    reached = f"{name} reaches {min(1, speed.samples_per_s / lower):.0%} of the lower limit"
    ratio = speed.samples_per_s / lower
    match found.bound:
        case "cpus":
            text = f"{_cpus(found)}: {reached}"
        case "num_workers":
            text = f"num_workers={found.num_workers}: {reached}"
        case "start":
            text = (
                f"the start of an epoch: {name} has the first batch after "
                f"{speed.later_first_batch_s:.2f} s of {speed.epoch_s:.2f} s"
            )
        case "unknown":
            text = (
                f"unknown: {name} makes {ratio:.1f} times the lower limit. Samples now cost less "
                "than in the line `sample`; if a cache has filled meanwhile, repeat this report"
            )
        case _:
            text = f"neither the cores nor num_workers: {reached}"
            if speed is found.dpex:
                text += (
                    f". Per sample, workers take {_ms(speed.encode_s)} to pickle, and this process "
                    f"{_ms(speed.receive_s)} to receive"
                )
    value = {"by": found.bound, "loader": name, "share": ratio}
    return Fact("bound", text, "bound", value)


def _cache(found: Measurements, fixed: FixedPart) -> Fact:
    saved = found.saved_s(fixed)
    what = ", ".join(["reading", *fixed.transforms]) if fixed.has_chain else "the whole sample"
    text = (
        f"{what}: the same with two seeds in {fixed.samples} samples. A cache saves up to "
        f"{_ms(saved)} of {_ms(found.costs.wall_s)} for each sample"
    )
    size = None if found.length is None else fixed.size_bytes * found.length
    if size is not None:
        text += f", and holds {_gib(size)} on each node for {found.length:,} samples"
    return Fact(
        "cache",
        text,
        "cache",
        {
            "transforms": list(fixed.transforms),
            "whole_sample": not fixed.has_chain,
            "saved_seconds": saved,
            "size_bytes": size,
            "samples": fixed.samples,
        },
    )


def _step(found: Measurements, needed: float) -> Fact:
    text = (
        f"a step of {_ms(found.step_s or 0)} with {found.costs.batch_samples:,.0f} samples uses "
        f"{_rate(needed)}"
    )
    value: dict[str, float | None] = {"needed_samples_per_s": needed}
    for name, speed in (("torch", found.torch), ("dpex", found.dpex)):
        if speed is not None:
            waits = max(0.0, 1 - speed.samples_per_s / needed)
            text += f"; with {name}'s loader the loop waits at least {waits:.0%} of its time"
            value[f"{name}_waiting_share"] = waits
    nodes = _nodes_needed(found)
    if nodes is not None:
        text += f"; {nodes} nodes like this one give that"
        value["nodes_like_this"] = nodes
    return Fact("step", text, "step", value)


def _nodes_needed(found: Measurements) -> int | None:
    """Return how many nodes like this one make enough samples, if the cores of one do not."""
    if found.needed is None or found.nodes != 1 or found.dpex is None or found.bound != "cpus":
        return None
    nodes = math.ceil(found.needed / max(found.dpex.samples_per_s, 1e-9))
    return nodes if nodes > 1 else None


def _advice(found: Measurements) -> Iterator[str]:
    """Yield settings that the measurements justify, the one with the largest gain first.

    If several settings are fast enough for the training step, the easiest one comes first.
    """
    needed, workers = found.needed, found.num_workers
    for name, speed in (("torch's own loader", found.torch), ("dpex", found.dpex)):
        if needed is not None and speed is not None and speed.samples_per_s >= needed:
            yield f"{name} with num_workers={workers}: it is as fast as the step"
            return
    if not found.given_workers:
        yield f"num_workers={workers}: with 0, the training loop makes every batch itself"
    best = found.best[1].samples_per_s if found.best is not None else 0.0
    enough = needed / best if needed and best else math.inf
    for _, text in sorted(_gains(found), key=lambda one: -min(one[0], enough)):
        yield text
    if isinstance(found.costs.fixed, RandomSample):
        yield (
            "MappedDataset(cached(reading), [random transforms]), if only a part of your dataset's "
            "__getitem__ is random: samples differ with the seed (docs/stages.md)"
        )


def _gains(found: Measurements) -> Iterator[tuple[float, str]]:
    """Yield settings with their estimated gain: the factor by which the rate may grow."""
    if found.best is None:
        return
    best = found.best[1]
    if found.torch is not None and found.dpex is not None:
        ratio = found.dpex.samples_per_s / max(found.torch.samples_per_s, 1e-9)
        if ratio >= _EQUAL:
            yield ratio, f"dpex: {ratio:.2f} times the rate of torch's loader"
        elif ratio * _EQUAL < 1 and found.nodes == 1:
            text = f"torch's own loader on one node: dpex reaches {ratio:.2f} of its rate"
            yield 1 / max(ratio, 1e-9), text
    if found.bound == "start" and not found.persistent_workers:
        seconds = best.epoch_s or 0.0
        gain = seconds / max(seconds - (best.later_first_batch_s or 0.0), 0.1 * seconds, 1e-9)
        yield gain, "persistent_workers=True: otherwise workers start in every epoch"
    if found.worker_limit * _EQUAL < found.cpu_limit and found.bound not in {"start", "unknown"}:
        yield from _more_workers(found, best)
    fixed = found.cacheable
    if fixed is not None:
        gain = found.costs.wall_s / max(found.costs.wall_s - found.saved_s(fixed), 1e-9)
        times = f"up to {gain:.2g} times" if gain < _MANY_TIMES else f"over {_MANY_TIMES} times"
        yield gain, f"{_cached(fixed)}: {times} the rate for cached samples (docs/datasets.md)"
    if found.bound == "cpus":
        nodes = _nodes_needed(found)
        number = "more nodes" if nodes is None else f"{nodes} nodes like this one"
        yield nodes or 1, f"{number}: dpex uses the CPUs of a cluster (docs/cluster.md)"


def _more_workers(found: Measurements, best: Speed) -> Iterator[tuple[float, str]]:
    busy_s, enough = found.costs.busy_s, found.workers_for_cpus
    if found.needed is None:
        text = (
            f"more workers: each adds up to {_rate(1 / busy_s)}, until {enough:,} keep all cores "
            "busy. --step-ms gives the number that your step needs"
        )
    else:
        enough = min(enough, math.ceil(found.needed * busy_s))
        text = f"num_workers={enough}; {found.workers_for_cpus:,} workers keep all cores busy"
    if enough > found.num_workers:
        reached = min(found.cpu_limit, enough / max(busy_s, 1e-9))
        yield reached / max(best.samples_per_s, 1e-9), text


def _cached(fixed: FixedPart) -> str:
    """Return the code of a dataset with a cache."""
    inside = "source" if fixed.has_chain else "dataset"
    if fixed.transforms:
        inside = f"MappedDataset(source, [{', '.join(fixed.transforms)}])"
    if not fixed.later_transforms:
        return f"cached({inside})"
    return f"MappedDataset(cached({inside}), [the other transforms])"


def _cpus(found: Measurements) -> str:
    if found.nodes > 1:
        return f"{found.cpus:g} CPUs of {found.nodes} nodes"
    return f"{found.cpus:g} core{'s' if found.cpus != 1 else ''}"


def _ms(seconds: float) -> str:
    """Return a time in milliseconds."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.2g} ms"


def _rate(samples_per_s: float) -> str:
    """Return a rate."""
    digits = f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
    return f"{digits} samples/s"


def _share(part: float, whole: float) -> str:
    """Return a part in percent."""
    return f"{part / max(whole, 1e-9):.0%}"


def _gib(size_bytes: float) -> str:
    """Return a size in GiB, or in MiB if it is small."""
    unit, name = (1 << 30, "GiB") if size_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{size_bytes / unit:.1f} {name}"
