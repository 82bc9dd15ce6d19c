"""``dpex doctor``: what a bug report needs, and whether dpex gives torch's batches here."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import logging
import multiprocessing
import os
import platform
import shutil
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, TextIO

import dpex
from dpex.cluster.connect import choose, cluster_size, report_busy_cpus
from dpex.cluster.limits import free_memory, usable_cores, usable_memory
from dpex.errors import ClusterError

if TYPE_CHECKING:
    from dpex.doctor.self_test import Epoch

__all__ = ["examine"]

_PACKAGES = ("torch", "torchvision", "ray", "pyarrow", "numpy")
_WIDTH = 16

Line = tuple[str, str]


def examine(head_address: str, *, timeout_s: float, out: TextIO) -> bool:
    """Write, line by line as it is found, what there is and whether it works.

    Args:
        head_address: Which Ray to try; see ``DpexDataLoader``.
        timeout_s: When to end this process, whatever it waits for.
        out: Where to write.

    Returns:
        Whether all is well: the batches are torch's, and dpex had nothing to warn of.
    """

    def write(name: str, text: str) -> None:
        out.write(f"{name:<{_WIDTH}}{text}\n")
        out.flush()

    def cut_off() -> None:
        write(
            "verdict",
            f"cut off after {timeout_s:g} s, in what comes after the last line above. Where every "
            "thread stands follows, for the report; --timeout gives a slow cluster more time",
        )
        faulthandler.dump_traceback(out)
        os._exit(1)

    # Never cancelled: ending Ray at this process's exit may hang too.
    watchdog = threading.Timer(timeout_s, cut_off)
    watchdog.daemon = True
    watchdog.start()
    faulthandler.enable()  # a crash in native code is to be seen as well
    problems = _Problems()
    logging.getLogger("dpex").addHandler(problems)
    try:
        for name, text in chain(_host(), _trial(head_address, timeout_s / 2)):
            write(name, text)
    except (ClusterError, _Wrong) as error:
        problems.texts.append(str(error))
    except Exception as error:
        out.write(traceback.format_exc())
        problems.texts.append(f"{type(error).__name__}: {error}")
    for problem in problems.texts or ["ok: the same batches as torch's loader, to the bit"]:
        write("verdict", problem)
    return not problems.texts


class _Wrong(Exception):
    """What needs no traceback to be understood."""


class _Problems(logging.Handler):
    """What is wrong. All that dpex warns of is: a store on disk, nodes with another torch.

    Attributes:
        texts: What to say of each.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a warning in."""
        self.texts.append(record.getMessage())


def _host() -> Iterator[Line]:
    """The versions, and the machine."""
    yield "dpex", dpex.__version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    yield "platform", platform.platform()
    yield "cores", f"{usable_cores()} for this process, of {os.cpu_count()}"
    yield "memory", f"{_gib(usable_memory())} for this process, {_gib(free_memory())} of it free"
    with contextlib.suppress(OSError):  # there is none on macOS
        shared = shutil.disk_usage("/dev/shm")
        yield "/dev/shm", f"{_gib(shared.total)}, {_gib(shared.free)} of it free"
    yield "start method", multiprocessing.get_start_method()
    yield "GPUs", _gpus()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


def _gpus() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = Counter(torch.cuda.get_device_name(device) for device in range(count))
    found = ", ".join(f"{number} x {name}" for name, number in names.items())
    return f"{found or 'none'} (torch for CUDA {torch.version.cuda})"


def _trial(head_address: str, timeout_s: float) -> Iterator[Line]:
    """Which Ray, and two epochs by torch and by dpex.

    Raises:
        ClusterError: There is no such Ray.
        _Wrong: It has no CPU, batches do not come from it or from torch, or they differ.
    """
    from dpex.doctor.self_test import difference, make_loader, read

    address, why = _chosen(head_address)
    embedded = address == "local"
    yield "Ray", f"{'one of its own' if embedded else address} ({why})"

    loader = make_loader(distribute_mode=False, head_address=head_address, timeout_s=timeout_s)
    try:
        expected = [read(loader, iter(loader)) for _ in range(2)]
    except RuntimeError as error:
        raise _Wrong(f"torch's own loader does not work here: {error}") from error
    finally:
        loader.close()
    yield "torch's loader", _speed(expected)

    loader = make_loader(distribute_mode=True, head_address=head_address, timeout_s=timeout_s)
    try:
        batches = iter(loader)  # which connects
        nodes, cpus, gpus = cluster_size()
        note = " (logical ones: the tasks share the cores)" if embedded else ""
        yield "cluster", f"{nodes} node(s), {gpus:g} GPUs, {cpus:g} CPUs{note}"
        if not cpus:
            raise _Wrong(
                "the cluster has no CPU to make batches with. Start a node that has some: "
                "`ray start --address=HEAD:PORT` on another host, without --num-cpus=0. "
                "A training waits where an autoscaler is to start one; this does not"
            )
        try:
            got = [read(loader, batches), read(loader, iter(loader))]
        except RuntimeError as error:  # a timeout, or workers that died
            raise _Wrong(f"{error}. Of the cluster: {report_busy_cpus()}") from error
    finally:
        loader.close()
    yield "dpex's loader", _speed(got)
    for ours, torchs in zip(got, expected, strict=True):
        where = difference(ours, torchs)
        if where is not None:
            raise _Wrong(f"dpex gives other batches: {where}. Please report this")


def _chosen(head_address: str) -> tuple[str, str]:
    """An address, and why it is that one."""
    try:
        address, name = choose(head_address)
    except ValueError as error:
        raise _Wrong(str(error)) from error
    if head_address != "auto":
        return address, "asked for"
    if name == "RAY_ADDRESS":
        return address, "RAY_ADDRESS"
    if address == "local":
        return address, "no RAY_ADDRESS, and no Ray of this user runs on this host"
    return address, "runs on this host"


def _speed(epochs: list[Epoch]) -> str:
    cold, warm = (epoch.stats for epoch in epochs)
    makers = {maker for epoch in epochs for maker in epoch.makers}
    hosts = ", ".join(sorted({host for host, _ in makers}))
    return (
        f"first batch after {cold.first_batch_s:.2f} s; second epoch {warm.samples_per_s:,.0f} "
        f"samples/s; {len(makers)} process(es) on {hosts}"
    )
