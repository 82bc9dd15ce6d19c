"""Fixtures that all tests share: one local Ray, and a strict comparison of batches."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import math
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import PIL.Image
import pytest
import torch
from cluster_programs import PROGRAM_SECONDS, RANK_VARIABLES, wait_until

if TYPE_CHECKING:
    from dpex.cluster.connect import Connection

# No deadline, because an example runs two loaders, whose time says nothing about their results.
hypothesis.settings.register_profile("dpex", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "dpex-ci", hypothesis.settings.get_profile("dpex"), derandomize=True, database=None
)
hypothesis.settings.load_profile("dpex-ci" if os.environ.get("CI") else "dpex")

# Otherwise Albumentations asks its package registry for a newer version.
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

# Ray stops its processes one after another, and waits for each.
GONE_SECONDS = 60
UNUSED_SECONDS = 10

LAYOUTS_WITH_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("values", "offsets"),
}
DENSE_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-extended`, and set timeouts of extended tests.

    These are longer than those of their programs, which report a hang.
    """
    for item in _without_new_pairs(items):
        item.add_marker(pytest.mark.extended)
    for item in items:
        own = any(mark.name == "timeout" for mark in item.own_markers)
        if item.get_closest_marker("extended") and not own:
            item.add_marker(pytest.mark.timeout(PROGRAM_SECONDS + 100), append=False)


def _without_new_pairs(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield every second test of a product of carriers and two or more ``parametrize`` marks.

    The other tests contain each pair of its values, and each value with each carrier. A module
    whose carriers have marks says itself what is extended.
    """
    places: dict[Any, dict[Any, int]] = collections.defaultdict(dict)
    for item in items:
        callspec = getattr(item, "callspec", None)
        carriers = getattr(getattr(item, "module", None), "CARRIERS", [None])
        plain = all(isinstance(carrier, str) for carrier in carriers)
        if callspec is None or not plain or item.get_closest_marker("only_ray"):
            continue
        given = [mark.args[0] for mark in item.iter_markers("parametrize")]
        marks = [names.split(",") if isinstance(names, str) else names for names in given]
        position = 0
        for names in [*marks, ["carrier"]]:
            seen = places[item.nodeid.partition("[")[0], *names]
            values = tuple(id(callspec.params[name.strip()]) for name in names)
            position += seen.setdefault(values, len(seen))
        if len(marks) > 1 and position % 2:
            yield item


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collections.

    The tests cause thousands of full collections. With the million objects of these modules, each
    would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a module that names ``CARRIERS`` on each of these carriers."""
    carriers = getattr(metafunc.module, "CARRIERS", ())
    if metafunc.definition.get_closest_marker("only_ray"):
        carriers = carriers[:1]
    if carriers:
        metafunc.parametrize("carrier", carriers, indirect=True)


@pytest.fixture(autouse=True)
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the loaders of a module that names ``CARRIERS`` one of them, and return it."""
    name = getattr(request, "param", "")
    if name:
        monkeypatch.setitem(request.module.OURS, "head_address", name)
    return str(name)


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[Connection]:
    """Connect to a new local Ray, which is isolated from any other Ray on this machine."""
    from dpex.cluster.connect import connect

    # A Ray session's sockets are too deep for pytest's own temporary directories.
    place = Path(tempfile.mkdtemp(prefix="dx", dir="/tmp"))
    before = _children(os.getpid())
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RAY_ADDRESS", *sorted(RANK_VARIABLES)):
                patch.delenv(name, raising=False)
            patch.setenv("RAY_TMPDIR", str(place))
            connection = connect("local")
        started = _children(os.getpid()) - before
        yield connection
        _shut_down(started)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _shut_down(started: set[int]) -> None:
    import ray

    processes = set(started)
    pending = list(started)
    while pending:
        children = _children(pending.pop())
        processes |= children
        pending += children
    ray.shutdown()
    try:
        wait_until(lambda: not any(map(_runs, processes)), GONE_SECONDS, "end of Ray")
    except AssertionError:
        left = {pid: _command(pid) for pid in filter(_runs, processes)}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(f"the shared Ray left processes behind: {left}")


def _children(pid: int) -> set[int]:
    """Return the children of a process that still run; none if there is no /proc."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= set(map(int, thread.read_text().split()))
        except OSError:
            continue  # the thread has ended
    return set(filter(_runs, found))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    try:
        # "pid (name) state ...": a zombie no longer runs.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def nothing_to_collect() -> Iterator[None]:
    """Assert that unreferenced iterators end without the collector, which may run much later."""
    gc.collect()
    # Iterators that an earlier, failed test has left do not count.
    before = weakref.WeakSet(_iterating())
    gc.disable()
    try:
        yield
        wait_until(
            lambda: all(found in before for found in _iterating()),
            UNUSED_SECONDS,
            "end of the iterators and of what they receive with",
        )
    finally:
        gc.enable()


def _iterating() -> list[Any]:
    from dpex.training.distributed_iterator import DistributedIter
    from dpex.wire.receiver import Receiver

    return [found for found in gc.get_objects() if type(found) in (DistributedIter, Receiver)]


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Return the function that compares a result of dpex with torch's, by type and bit."""
    return _assert_same


def _assert_same(ours: Any, torchs: Any) -> None:
    """Assert that two batches are the same in type, structure, dtype, layout and content.

    Args:
        ours: The batch of dpex. Its arrays must be writable.
        torchs: The batch of torch. If a tensor of it is dense, dpex's must have the same strides.
    """
    _compare(ours, torchs, "batch", set())


def _compare(ours: Any, torchs: Any, at: str, above: set[tuple[int, int]]) -> None:
    assert type(ours) is type(torchs), f"{at}: {type(ours)} is not torch's {type(torchs)}"
    pair = (id(ours), id(torchs))
    if pair in above:  # a structure that contains itself
        return
    above.add(pair)
    _compare_content(ours, torchs, at, above)
    above.discard(pair)  # once the two are freed, other objects may get their ids


def _compare_content(ours: Any, torchs: Any, at: str, above: set[tuple[int, int]]) -> None:
    if isinstance(torchs, torch.Tensor):
        _compare_tensors(ours, torchs, at, above)
    elif isinstance(torchs, (np.ndarray, np.generic)):
        _compare_arrays(ours, torchs, at, above)
    elif isinstance(torchs, torch.TypedStorage):
        _compare(ours.dtype, torchs.dtype, f"{at}.dtype", above)
        _compare(ours.untyped(), torchs.untyped(), f"{at}.untyped()", above)
    elif isinstance(torchs, torch.UntypedStorage):
        contents = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in (ours, torchs)]
        assert torch.equal(*contents), f"{at}: other bytes"
    elif isinstance(torchs, PIL.Image.Image):
        _compare((ours.mode, ours.size), (torchs.mode, torchs.size), f"{at}.mode, .size", above)
        _compare(ours.getpalette(), torchs.getpalette(), f"{at}.palette", above)
        assert ours.tobytes() == torchs.tobytes(), f"{at}: other pixels"
    elif isinstance(torchs, Mapping):
        # The order matters, because the consumer iterates over the keys.
        _compare(list(ours), list(torchs), f"{at}.keys", above)
        for key in torchs:
            _compare(ours[key], torchs[key], f"{at}[{key!r}]", above)
    elif isinstance(torchs, (list, tuple)):
        assert len(ours) == len(torchs), f"{at}: {len(ours)} items, torch has {len(torchs)}"
        for place, (one, other) in enumerate(zip(ours, torchs, strict=True)):
            _compare(one, other, f"{at}[{place}]", above)
    elif dataclasses.is_dataclass(torchs) and not isinstance(torchs, type):
        for field in dataclasses.fields(torchs):
            name = field.name
            _compare(getattr(ours, name), getattr(torchs, name), f"{at}.{name}", above)
    elif isinstance(torchs, float) and math.isnan(torchs):
        assert math.isnan(ours), f"{at}: {ours} is not torch's nan"
    elif type(torchs).__eq__ is object.__eq__ and hasattr(torchs, "__dict__"):
        if not isinstance(torchs, type):
            _compare(vars(ours), vars(torchs), at, above)
        else:
            assert ours is torchs, f"{at}: another class {ours}"
    else:
        assert ours == torchs, f"{at}: {ours!r} is not torch's {torchs!r}"


def _compare_tensors(
    ours: torch.Tensor, torchs: torch.Tensor, at: str, above: set[tuple[int, int]]
) -> None:
    for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf", "is_quantized"):
        if torchs.is_nested and name == "shape":
            continue  # every tensor has a new symbol for its ragged part
        _compare(getattr(ours, name), getattr(torchs, name), f"{at}.{name}", above)
    _compare(ours.is_pinned(), torchs.is_pinned(), f"{at}.is_pinned()", above)
    for name in ("format", "canvas_size", "clamping_mode"):  # torchvision's bounding boxes
        _compare(getattr(ours, name, None), getattr(torchs, name, None), f"{at}.{name}", above)
    if torchs.layout in LAYOUTS_WITH_PARTS:
        for name in LAYOUTS_WITH_PARTS[torchs.layout]:
            _compare(getattr(ours, name)(), getattr(torchs, name)(), f"{at}.{name}()", above)
        if torchs.layout is torch.sparse_coo:
            _compare(ours.is_coalesced(), torchs.is_coalesced(), f"{at}.is_coalesced()", above)
        return
    ours, torchs = ours.detach(), torchs.detach()
    if torchs.is_quantized:
        _compare(ours.q_scale(), torchs.q_scale(), f"{at}.q_scale()", above)
        _compare(ours.q_zero_point(), torchs.q_zero_point(), f"{at}.q_zero_point()", above)
        ours, torchs = ours.int_repr(), torchs.int_repr()
    _compare(_formats(torchs) <= _formats(ours), True, f"{at} lies in memory as torch's", above)
    if _formats(torchs):
        _compare(ours.stride(), torchs.stride(), f"{at}.stride()", above)
    # By bits, a NaN equals itself, and -0.0 differs from 0.0.
    same = _bits(ours) == _bits(torchs)
    assert same, f"{at}: {ours} is not torch's {torchs}"


def _formats(tensor: torch.Tensor) -> set[torch.memory_format]:
    dimensions = {torch.channels_last: 4, torch.channels_last_3d: 5}
    return {
        memory_format
        for memory_format in DENSE_FORMATS
        if tensor.dim() == dimensions.get(memory_format, tensor.dim())
        and tensor.is_contiguous(memory_format=memory_format)
    }


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _compare_arrays(ours: Any, torchs: Any, at: str, above: set[tuple[int, int]]) -> None:
    _compare(ours.dtype, torchs.dtype, f"{at}.dtype", above)
    _compare(ours.shape, torchs.shape, f"{at}.shape", above)
    if isinstance(torchs, np.ndarray):
        assert ours.flags.writeable, f"{at} is read-only"
        for flag in ("C_CONTIGUOUS", "F_CONTIGUOUS"):
            _compare(ours.flags[flag], torchs.flags[flag], f"{at}.flags.{flag}", above)
    if isinstance(torchs, np.ma.MaskedArray):
        _compare(np.asarray(ours.mask), np.asarray(torchs.mask), f"{at}.mask", above)
        ours, torchs = ours.filled(), torchs.filled()
    if torchs.dtype.hasobject:
        _compare(ours.tolist(), torchs.tolist(), at, above)
    else:
        same = ours.tobytes() == torchs.tobytes()
        assert same, f"{at}: {ours} is not torch's {torchs}"
