"""The report of ``dpex doctor``: versions, the machine, and a comparison of dpex with torch."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import platform
import shutil
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TextIO

import dpex
from dpex.cluster.connect import PROCESSES, choose, cluster_size
from dpex.cluster.machine_share import free_memory, usable_cores, usable_memory
from dpex.doctor.facts import Fact, Output, Problem
from dpex.errors import ClusterError
from dpex.log import waits

if TYPE_CHECKING:
    from dpex.doctor.self_test import Epoch

__all__ = ["examine"]

# Part of the trial's time for the costs of samples; the loaders have the rest.
_SAMPLE_SHARE = 0.25
_PACKAGES = ("torch", "torchvision", "ray", "pyarrow", "numpy")
# Warnings about a user's loader that the report shows.
_MOST_WARNINGS = 10
# How to install the packages that the report may require.
_INSTALLED_BY = {"torch": 'pip install "torch"', "ray": 'pip install "ray[data]"'}


def examine(
    head_address: str | None,
    *,
    timeout_s: float,
    out: TextIO,
    as_json: bool = False,
    target: str | None = None,
    trial_s: float = 20.0,
    step_s: float | None = None,
) -> bool:
    """Write the report, each line as soon as it is known.

    Args:
        head_address: What runs the workers; see ``DpexDataLoader``. If None, the loader's own, or
            ``"auto"``.
        timeout_s: Seconds after which this process exits with status 1, whatever it waits for.
        out: The file to write to.
        as_json: Whether to write one JSON object in place of the lines.
        target: The function that returns the loader to time; see ``target.make_loader``. If None,
            the report compares the batches of loaders of its own.
        trial_s: Seconds for which the user's loader is timed, without the start of Ray.
        step_s: Time of a training step of the user.

    Returns:
        Whether all loaders work. Without ``target``, dpex's batches must also equal torch's, and
        dpex must log no warning.
    """
    output = Output(out, sys.stderr if as_json else out, as_json=as_json)

    def cut_off() -> None:
        output.finish(
            [
                f"cut off after {timeout_s:g} s, in what comes after the last line above. Where "
                "every thread stands follows, for the report; --timeout gives a slow cluster more "
                "time"
            ],
            ok=False,
        )
        faulthandler.dump_traceback(output.details)
        os._exit(1)

    # The timer is never cancelled: shutting Ray down at exit may hang too.
    watchdog = threading.Timer(timeout_s, cut_off)
    watchdog.daemon = True
    watchdog.start()
    faulthandler.enable()  # shows a crash in native code too
    warned = _Warnings()
    logging.getLogger("dpex").addHandler(warned)
    problems: list[str] = []
    if target is None:
        facts = chain(_machine(), _self_test(head_address or "auto", timeout_s / 2))
        ok = "ok: the same batches as torch's loader, to the bit"
    else:
        facts = chain([_cores()], _trial(target, head_address, trial_s, step_s))
        ok = "ok: the loader delivers its batches"
    try:
        # The user's code may print: that is no part of the JSON object.
        with contextlib.redirect_stdout(output.details):
            for fact in facts:
                output.write(fact)
    except (ClusterError, Problem) as error:
        output.details.write(getattr(error, "details", ""))
        problems.append(str(error))
    except Exception as error:
        output.details.write(traceback.format_exc())
        problems.append(f"{type(error).__name__}: {error}")
    if target is None:
        problems = warned.texts + problems
    elif warned.texts:
        texts = list(dict.fromkeys(warned.texts))[:_MOST_WARNINGS]
        output.write(Fact("warning", "\n".join(texts), "warnings", texts))
    output.finish(problems or [ok], ok=not problems)
    return not problems


class _Warnings(logging.Handler):
    """A log handler that collects the warnings of dpex.

    Each of them is a problem of the self-test. Examples are an object store on disk, and nodes with
    another version of torch. A user's loader may also warn of what the user wants, such as a
    skipped sample. A wait is no problem once batches arrive: the epoch's rate shows it.

    Attributes:
        texts: A text for each warning.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Add the text of a warning."""
        if record.name != waits.name:
            self.texts.append(record.getMessage())


def _machine() -> Iterator[Fact]:
    """Yield the versions of packages and the properties of the machine.

    Raises:
        Problem: A package is missing without which dpex makes no batch.
    """
    yield _line("dpex", dpex.__version__)
    yield _line("python", f"{platform.python_version()} ({platform.python_implementation()})")
    for package in _PACKAGES:
        yield _line(package, _version(package))
    yield _line("platform", platform.platform())
    yield _cores()
    usable, free = usable_memory(), free_memory()
    yield Fact(
        "memory",
        f"{_gib(usable)} for this process, {_gib(free)} of it free",
        "memory",
        {"usable_bytes": usable, "free_bytes": free},
    )
    with contextlib.suppress(OSError):  # macOS has no /dev/shm
        shared = shutil.disk_usage("/dev/shm")
        yield Fact(
            "/dev/shm",
            f"{_gib(shared.total)}, {_gib(shared.free)} of it free",
            "shared_memory",
            {"total_bytes": shared.total, "free_bytes": shared.free},
        )
    yield _line("start method", multiprocessing.get_start_method())
    _require("torch")
    yield _line("GPUs", _gpus())


def _line(label: str, text: str) -> Fact:
    return Fact(label, text, label.lower().replace(" ", "_"))


def _cores() -> Fact:
    usable, total = usable_cores(), os.cpu_count()
    value = {"usable": usable, "total": total}
    return Fact("cores", f"{usable} for this process, of {total}", "cores", value)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _require(package: str) -> None:
    if not _is_installed(package):
        raise Problem(
            f"{package} is not installed, and dpex makes no batch here without it. Install it: "
            f"{_INSTALLED_BY[package]}"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


def _gpus() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = Counter(torch.cuda.get_device_name(device) for device in range(count))
    found = ", ".join(f"{number} x {name}" for name, number in names.items())
    return f"{found or 'none'} (torch for CUDA {torch.version.cuda})"


def _self_test(head_address: str, timeout_s: float) -> Iterator[Fact]:
    """Yield what runs the workers, its size, and the speed of two epochs of torch and of dpex.

    Raises:
        ClusterError: There is no such Ray.
        Problem: Ray is missing, the cluster has no CPU, a loader does not deliver its batches, or
            the batches differ.
    """
    from dpex.doctor.self_test import difference, make_loader, read

    chosen = _chosen(head_address)
    yield chosen
    address = chosen.value["address"]
    if address != PROCESSES:
        _require("ray")
    loader = make_loader(distribute_mode=False, head_address=head_address, timeout_s=timeout_s)
    try:
        expected = [read(loader, iter(loader)) for _ in range(2)]
    except RuntimeError as error:
        raise Problem(f"torch's own loader does not work here: {error}") from error
    finally:
        loader.close()
    yield _speed("torch's loader", "torch_loader", expected)

    loader = make_loader(distribute_mode=True, head_address=head_address, timeout_s=timeout_s)
    try:
        batches = iter(loader)  # connects to Ray
        if address != PROCESSES:
            cluster = _cluster(local=address == "local")
            yield cluster
            if not cluster.value["cpus"]:
                raise Problem(
                    "the cluster has no CPU to make batches with. Start a node that has some: "
                    "`ray start --address=HEAD:PORT` on another machine, without --num-cpus=0. "
                    "A training waits where an autoscaler is to start one; this does not"
                )
        try:
            got = [read(loader, batches), read(loader, iter(loader))]
        except RuntimeError as error:  # a timeout, or dead workers
            raise Problem(str(error)) from error
    finally:
        loader.close()
    yield _speed("dpex's loader", "dpex_loader", got)
    for ours, torchs in zip(got, expected, strict=True):
        where = difference(ours, torchs)
        if where is not None:
            raise Problem(f"dpex gives other batches: {where}. Please report this")


def _chosen(head_address: str, only_ray: Sequence[str] = ()) -> Fact:
    """Return the line that names what runs the workers, and the reason for the choice.

    Args:
        head_address: As for ``DpexDataLoader``.
        only_ray: The options and stages of the loader that only Ray can meet.

    Raises:
        ClusterError: There is no cluster, although ``head_address`` is ``"cluster"``.
        Problem: ``head_address`` has none of the forms of an address.
    """
    try:
        address, why = choose(head_address)
    except ValueError as error:
        raise Problem(str(error)) from error
    if head_address == "auto" and address == PROCESSES and only_ray:
        address, why = "local", f"{why}, and {', '.join(only_ray)} needs Ray"
    names = {"local": "a local Ray", PROCESSES: "none: worker processes of this machine"}
    text = f"{names.get(address, address)} ({why})"
    return Fact("Ray", text, "ray_address", {"address": address, "reason": why})


def _cluster(*, local: bool) -> Fact:
    """Return the line about the cluster to which this process is connected."""
    nodes, cpus, gpus = cluster_size()
    text = f"{nodes} node(s), {gpus:g} GPUs, {cpus:g} CPUs"
    if local:  # the user's machine does not have the logical CPUs by which Ray counts tasks
        cpus = usable_cores()
        text = f"1 node(s), {gpus:g} GPUs, {cpus} cores, which the worker processes share"
    return Fact(
        "cluster",
        text,
        "cluster",
        {"nodes": nodes, "gpus": gpus, "cpus": cpus},
    )


def _speed(label: str, key: str, epochs: list[Epoch]) -> Fact:
    cold, warm = (epoch.stats for epoch in epochs)
    makers = {maker for epoch in epochs for maker in epoch.makers}
    hosts = sorted({host for host, _ in makers})
    return Fact(
        label,
        f"first batch after {cold.first_batch_s:.2f} s; second epoch {warm.samples_per_s:,.0f} "
        f"samples/s; {len(makers)} process(es) on {', '.join(hosts)}",
        key,
        {
            "first_batch_seconds": cold.first_batch_s,
            "samples_per_s": warm.samples_per_s,
            "processes": len(makers),
            "hosts": hosts,
        },
    )


def _trial(
    target: str, head_address: str | None, trial_s: float, step_s: float | None
) -> Iterator[Fact]:
    """Yield the costs of the samples of the user's loader, its speed, and what limits it.

    Raises:
        Problem: Ray is missing, or the loader does not deliver its batches. The lines before that
            describe the parts that work.
    """
    _require("torch")
    from dpex.doctor.findings import Measurements, conclude, describe_sample, describe_speed
    from dpex.doctor.loader_trial import loaders_like, speeds, take_turns
    from dpex.doctor.sample_costs import measure
    from dpex.doctor.target import describe_loader, length_of, make_loader

    given = make_loader(target)
    yield describe_loader(given, target)
    costs = measure(given, budget_s=_SAMPLE_SHARE * trial_s)
    yield describe_sample(costs)

    num_workers = given.num_workers or usable_cores()
    loaders = loaders_like(given, num_workers=num_workers, head_address=head_address)
    no_dpex: dict[str, Exception] = {}
    address = PROCESSES
    try:
        ours = loaders["dpex"]
        chosen = _chosen(ours.head_address, ours._demand(ours._jobs()).only_ray)
        yield chosen
        address = chosen.value["address"]
        if address != PROCESSES:
            _require("ray")
    except (ClusterError, Problem) as error:
        no_dpex["dpex"] = error
        del loaders["dpex"]
    cluster: Fact | None = None
    try:
        turns, errors = take_turns(loaders, total_s=(1 - _SAMPLE_SHARE) * trial_s)
        if turns.get("dpex") and address != PROCESSES:
            cluster = _cluster(local=address == "local")
            yield cluster
    finally:
        for loader in loaders.values():
            loader.close()
    found = speeds({name: own for name, own in turns.items() if name not in errors})
    for name, speed in found.items():
        yield describe_speed(name, speed, num_workers=loaders[name].num_workers)
    size = {"nodes": 1, "cpus": usable_cores()} if cluster is None else cluster.value
    yield from conclude(
        Measurements(
            num_workers=num_workers,
            given_workers=given.num_workers,
            persistent_workers=given.persistent_workers,
            length=length_of(given.dataset),
            cpus=size["cpus"] if size["nodes"] > 1 else usable_cores(),
            nodes=size["nodes"],
            costs=costs,
            torch=found.get("torch"),
            dpex=found.get("dpex"),
            step_s=step_s,
        )
    )
    if getattr(given, "on_error", "raise") == "skip":
        errors.pop("torch", None)  # torch's loader leaves no sample out
    for name, raised in {**errors, **no_dpex}.items():
        raise _failure(name, raised)


def _failure(name: str, error: Exception) -> Problem:
    """Return the problem that a loader raised an exception, with its traceback if that helps."""
    if isinstance(error, ClusterError | Problem):
        return Problem(str(error))
    # torch's message is the worker's traceback, whose last line is the exception.
    *_, last = ["", *str(error).strip().splitlines()]
    kind = type(error).__name__
    text = f"{name}'s loader raised {kind}: {last.removeprefix(f'{kind}: ')}"
    return Problem(text, "".join(traceback.format_exception(error)))
