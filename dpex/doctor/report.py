"""The report of ``dpex doctor``: versions, the machine, and a comparison of dpex with torch."""

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
from dpex.cluster.connect import choose, cluster_size
from dpex.cluster.limits import free_memory, usable_cores, usable_memory
from dpex.errors import ClusterError

if TYPE_CHECKING:
    from dpex.doctor.self_test import Epoch

__all__ = ["examine"]

_PACKAGES = ("torch", "torchvision", "ray", "pyarrow", "numpy")
_WIDTH = 16

Line = tuple[str, str]


def examine(head_address: str, *, timeout_s: float, out: TextIO) -> bool:
    """Write the report, each line as soon as it is known.

    Args:
        head_address: The Ray to test; see ``DpexDataLoader``.
        timeout_s: Seconds after which this process exits with status 1, whatever it waits for.
        out: The file to write to.

    Returns:
        Whether dpex's batches equal torch's and dpex has logged no warning.
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

    # The timer is never cancelled: shutting Ray down at exit may hang too.
    watchdog = threading.Timer(timeout_s, cut_off)
    watchdog.daemon = True
    watchdog.start()
    faulthandler.enable()  # shows a crash in native code too
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
    """A problem whose message needs no traceback."""


class _Problems(logging.Handler):
    """A log handler that collects problems.

    Every warning of dpex is a problem. Examples are an object store on disk, and nodes with another
    version of torch.

    Attributes:
        texts: A text for each problem.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Add a warning to the problems."""
        self.texts.append(record.getMessage())


def _host() -> Iterator[Line]:
    """Yield the versions of packages and the properties of the machine."""
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
    with contextlib.suppress(OSError):  # macOS has no /dev/shm
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
    """Yield which Ray is used, its size, and the speed of two epochs of torch and of dpex.

    Raises:
        ClusterError: There is no such Ray.
        _Wrong: The cluster has no CPU, a loader does not deliver its batches, or the batches
            differ.
    """
    from dpex.doctor.self_test import difference, make_loader, read

    address, why = _chosen(head_address)
    local = address == "local"
    yield "Ray", f"{'one of its own' if local else address} ({why})"

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
        batches = iter(loader)  # connects to Ray
        nodes, cpus, gpus = cluster_size()
        note = " (logical ones: the tasks share the cores)" if local else ""
        yield "cluster", f"{nodes} node(s), {gpus:g} GPUs, {cpus:g} CPUs{note}"
        if not cpus:
            raise _Wrong(
                "the cluster has no CPU to make batches with. Start a node that has some: "
                "`ray start --address=HEAD:PORT` on another host, without --num-cpus=0. "
                "A training waits where an autoscaler is to start one; this does not"
            )
        try:
            got = [read(loader, batches), read(loader, iter(loader))]
        except RuntimeError as error:  # a timeout, or dead workers
            raise _Wrong(str(error)) from error
    finally:
        loader.close()
    yield "dpex's loader", _speed(got)
    for ours, torchs in zip(got, expected, strict=True):
        where = difference(ours, torchs)
        if where is not None:
            raise _Wrong(f"dpex gives other batches: {where}. Please report this")


def _chosen(head_address: str) -> tuple[str, str]:
    """Return an address, and the reason for the choice."""
    try:
        return choose(head_address)
    except ValueError as error:
        raise _Wrong(str(error)) from error


def _speed(epochs: list[Epoch]) -> str:
    cold, warm = (epoch.stats for epoch in epochs)
    makers = {maker for epoch in epochs for maker in epoch.makers}
    hosts = ", ".join(sorted({host for host, _ in makers}))
    return (
        f"first batch after {cold.first_batch_s:.2f} s; second epoch {warm.samples_per_s:,.0f} "
        f"samples/s; {len(makers)} process(es) on {hosts}"
    )
