"""Tests of ``cached``: samples are made once per node, and stored whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import itertools
import json
import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import albumentations
import lmdb
import numpy as np
import PIL.Image
import pytest
import torch
from cluster_programs import (
    PROGRAMS,
    environment,
    run_program,
    small_disk,
    spawn,
    wait_until,
    workplace,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from dpex import DpexDataLoader
from dpex.datasets import cached, node_memory, sample_store
from dpex.datasets.code_behind import code_behind
from dpex.datasets.fingerprint import fingerprint
from dpex.datasets.sample_store import SampleStore
from dpex.transforms import MappedDataset, Stage
from dpex.wire.pickling import dump

PROGRAM = PROGRAMS / "cache_program.py"
OURS = {"distribute_mode": True, "head_address": "local"}
SAMPLE = dump(torch.zeros(50_000, dtype=torch.uint8), "sample")

Same = Callable[[Any, Any], None]


class Logged:
    """Samples of several types; making a sample adds a line to a file."""

    def __init__(self, log: Path, length: int = 40, salt: int = 0) -> None:
        self.log = log
        self.length = length
        self.salt = salt

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        values = np.random.default_rng(index).integers(0, 256, (3, 40, 30), dtype=np.uint8)
        kinds: list[Any] = [values, torch.from_numpy(values).float(), v1.ToPILImage()(values[0])]
        return kinds[index % 3], index + self.salt, f"sample {index}"

    def made(self) -> list[int]:
        lines = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return sorted(map(int, lines))


class AtOnce(Logged):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.fixture(params=[Logged, AtOnce])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Logged:
    made: Logged = request.param(tmp_path / "log")
    return made


@pytest.fixture(params=["memory", "directory"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    return "memory" if request.param == "memory" else tmp_path / "cache"


def test_samples_are_the_same_from_the_cache(
    source: Logged, at: str | Path, assert_same: Same
) -> None:
    expected = [source[index] for index in range(40)]
    source.made()
    dataset = cached(source, at=at)
    assert len(dataset) == 40
    for _ in range(3):
        assert_same([dataset[index] for index in range(40)], expected)
    assert source.made() == [0, 0, *range(40)], "the first one is made twice more, to compare"
    hits, misses, _, size_bytes = vars(dataset.info()).values()
    assert (hits, misses) == (80, 40)
    assert size_bytes > 40 * 3_600


@pytest.mark.usefixtures("shared_ray")
def test_all_workers_of_a_node_share_it(source: Logged, at: str | Path, assert_same: Same) -> None:
    expected = list(DataLoader(source, 5, collate_fn=list))  # type: ignore[arg-type]
    source.made()
    dataset = cached(source, at=at)
    loader: Any = DpexDataLoader(dataset, 5, num_workers=2, collate_fn=list, **OURS)
    assert_same(list(loader), expected)
    assert set(source.made()) == set(range(40))
    assert_same(list(loader), expected)
    other: Any = DpexDataLoader(dataset, 5, num_workers=1, collate_fn=list, **OURS)
    assert_same(list(other), expected)
    torchs = DataLoader(dataset, 5, num_workers=2, collate_fn=list)
    assert_same(list(torchs), expected)
    assert source.made() == []


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("kind", [Logged, AtOnce])
def test_what_collate_fn_draws_does_not_depend_on_what_is_found(
    kind: type[Logged], tmp_path: Path, assert_same: Same
) -> None:
    def draws(samples: list[Any]) -> torch.Tensor:
        return torch.rand(len(samples))

    fixed = MappedDataset(kind(tmp_path / "log"), lambda value: np.asarray(value).sum())
    epochs = []
    for dataset in (fixed, (kept := cached(fixed, at=tmp_path / "cache")), kept):
        generator = torch.Generator().manual_seed(1)
        loader: Any = DpexDataLoader(
            dataset, 8, num_workers=2, collate_fn=draws, generator=generator, **OURS
        )
        epochs.append(list(loader))
    assert_same(epochs[2], epochs[1])
    if kind is Logged:  # with AtOnce, only an uncached batch is seeded for each sample
        assert_same(epochs[1], epochs[0])


def test_random_transforms_go_behind_it(source: Logged, tmp_path: Path) -> None:
    def noisy(value: Any) -> float:
        return float(np.asarray(value).sum()) + float(torch.rand(()))

    chain = MappedDataset(cached(source, at=tmp_path / "cache"), noisy)
    first, again = chain[3][0], chain[3][0]
    assert first != again
    assert int(first) == int(again)


def test_what_draws_is_refused(source: Logged, tmp_path: Path) -> None:
    place = {"at": tmp_path / "cache"}
    for transform in (v1.RandomCrop(3), v2.RandomHorizontalFlip(), v2.AutoAugment()):
        composed = v1.Compose([v1.ToTensor(), transform])
        as_torchvision = Logged(source.log)
        as_torchvision.transform = composed  # type: ignore[attr-defined]
        for fixed in (
            MappedDataset(source, [transform]),
            MappedDataset(source, composed),
            MappedDataset(source, torch.nn.Sequential(torch.nn.Identity(), transform)),
            MappedDataset(source, None, target_transform=composed),
            MappedDataset(MappedDataset(source, composed), [v1.ToTensor()]),
            as_torchvision,
        ):
            with pytest.raises(ValueError, match=r"draws random numbers.*after the cache"):
                cached(fixed, **place)
    hidden = Subset(MappedDataset([torch.arange(6.0)] * 9, v2.RandomHorizontalFlip()), range(9))
    draws = [
        torch.rand,
        np.random.rand,
        lambda _: random.random(),
        lambda _: random.Random().random(),
    ]
    drawing = [MappedDataset(range(9), lambda _, draw=draw: draw(1)) for draw in draws]
    for dataset in (hidden, *drawing):
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match=r"sample 4 cannot be cached: .*after the cache"):
            cached(dataset, **place)[4]
        assert torch.equal(state, torch.get_rng_state())
    flip = albumentations.Compose([albumentations.HorizontalFlip(p=0.5)])
    with pytest.raises(ValueError, match="gave two different samples"):
        cached(MappedDataset([np.arange(48, dtype=np.uint8).reshape(4, 4, 3)], flip), **place)[0]
    with pytest.raises(IndexError):
        cached(range(3), **place)[7]
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="a chain with stages cannot be cached"):
        cached(MappedDataset(range(9), [Stage(float)]), **place)


def test_one_with_a_generator_of_its_own_that_it_need_not_is_kept(tmp_path: Path) -> None:
    smaller = albumentations.Compose([albumentations.Resize(2, 2)])
    fixed = MappedDataset([np.arange(48, dtype=np.uint8).reshape(4, 4, 3)] * 2, smaller)
    chain = MappedDataset(cached(fixed, at=tmp_path / "cache"), lambda _: torch.rand(4))
    drawn = []
    for _ in ("a miss", "a hit"):
        torch.manual_seed(3)
        drawn.append(chain[0])
    assert torch.equal(*drawn), "what is behind the cache draws the same"


class OnlyAtOnce(Dataset[float]):
    """A dataset without ``__getitem__``, which torch's loader reads with ``__getitems__``."""

    def __len__(self) -> int:
        return 6

    def __getitems__(self, indices: list[int]) -> list[float]:
        return [float(index) for index in indices]


@pytest.mark.usefixtures("shared_ray")
def test_a_dataset_may_define_getitems_alone(tmp_path: Path, assert_same: Same) -> None:
    dataset = cached(MappedDataset(OnlyAtOnce(), abs), at=tmp_path / "cache")
    ours: Any = DpexDataLoader(dataset, 3, num_workers=1, **OURS)
    for loader in (ours, ours, DataLoader(dataset, 3)):
        assert_same(list(loader), list(DataLoader(OnlyAtOnce(), 3)))


class Sleeping:
    """Samples that are made so slowly that threads make them at the same time."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


class Pooled:
    """A dataset that reads its sources in threads."""

    def __init__(self, *sources: Any) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda source: source[index], self.sources))

    def __getitems__(self, indices: list[int]) -> list[list[int]]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda i: [source[i] for source in self.sources], indices))


@pytest.mark.parametrize(("in_a_cache", "stored"), [(False, 64), (True, 32)])
def test_threads_may_read_it(in_a_cache: bool, stored: int, tmp_path: Path) -> None:
    place = {"at": tmp_path / "cache"}
    sources = [cached(Sleeping(), version=version, **place) for version in "ab"]
    dataset: Any = cached(Pooled(*sources), **place) if in_a_cache else Pooled(*sources)
    for _ in range(3):
        [batch] = DataLoader(dataset, 32, collate_fn=list)
        assert batch == [[index, index] for index in range(32)]
    assert sources[0].info().samples >= stored


@pytest.mark.parametrize(
    ("answer", "got"),
    [(lambda indices: [1] * (len(indices) - 1), "list of 2"), (lambda _: {"a": 1}, "dict")],
)
def test_less_than_was_asked_for_is_an_error_and_no_end(
    answer: Any, got: str, tmp_path: Path
) -> None:
    class Short(list[int]):
        def __getitems__(self, indices: list[int]) -> Any:
            return answer(indices)

    for dataset in (
        cached(Short(range(6)), at=tmp_path / "cache"),
        MappedDataset(Short(range(6)), float),
    ):
        with pytest.raises(TypeError, match=f"must return a list of 3 samples, .* got {got}$"):
            list(DataLoader(dataset, 3))


# --- comparison of samples ------------------------------------------------------------------------


class Split(enum.Enum):
    TRAIN = "train"
    TEST = "test"


@dataclasses.dataclass(slots=True)
class Slotted:
    image: torch.Tensor
    label: int


class Node:
    """A node of a tree that also knows its parent."""

    def __init__(self, value: float, parent: Node | None = None) -> None:
        self.value = value
        self.parent = parent
        self.children = [] if parent else [Node(value, self)]


class Frame:
    """A table whose ``==`` returns no bool, as that of pandas' ``DataFrame``."""

    def __init__(self, *values: float) -> None:
        self.values = np.array(values)

    def __eq__(self, other: object) -> Any:
        return self.values == other.values if isinstance(other, Frame) else NotImplemented


def ragged(*lengths: int) -> Any:
    rows = np.empty(len(lengths), object)
    rows[:] = [np.arange(length) for length in lengths]
    return rows


@pytest.mark.parametrize(
    ("make", "make_other"),
    [
        (lambda: Split.TRAIN, lambda: Split.TEST),
        (lambda: Slotted(torch.ones(2), 1), lambda: Slotted(torch.zeros(2), 1)),
        (lambda: Node(1), lambda: Node(2)),
        (lambda: ragged(3, 5), lambda: ragged(3, 6)),
        (lambda: Frame(1, float("nan")), lambda: Frame(2, float("nan"))),
        (lambda: float("nan"), lambda: 3.0),
        (lambda: deque([np.arange(2)]), lambda: deque([np.arange(3)])),
        (lambda: tv_tensors.Mask(torch.ones(2)), lambda: tv_tensors.Mask(torch.zeros(2))),
        (lambda: torch.eye(3).to_sparse(), lambda: 2 * torch.eye(3).to_sparse()),
    ],
    ids=["enum", "slots", "cycle", "ragged", "frame", "nan", "deque", "subclass", "sparse"],
)
def test_samples_of_any_kind_are_compared(
    make: Callable[[], Any], make_other: Callable[[], Any], tmp_path: Path
) -> None:
    class Changing:
        def __init__(self, *made: Callable[[], Any]) -> None:
            self.made = itertools.cycle(made)

        def __getitem__(self, index: int) -> Any:
            return [next(self.made)()]

    cached(Changing(make), at=tmp_path)[0]
    with pytest.raises(ValueError, match="twice gave two different samples"):
        cached(Changing(make, make_other), at=tmp_path)[0]


# --- fingerprints ---------------------------------------------------------------------------------


def test_anything_that_changes_is_a_miss(source: Logged, tmp_path: Path) -> None:
    module = tmp_path / "transform_of_mine.py"
    sys.path.insert(0, str(tmp_path))
    try:
        names = []
        for text in ("def mine(x): return x", "def mine(x): return x + 0"):
            module.write_text(text)
            importlib.invalidate_caches()
            sys.modules.pop("transform_of_mine", None)
            names.append(importlib.import_module("transform_of_mine").mine)
            names[-1] = fingerprint(MappedDataset(source, names[-1]), "")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("transform_of_mine", None)
    others = [
        fingerprint(source, ""),
        fingerprint(source, "2"),
        fingerprint(Logged(source.log, 41), ""),
        fingerprint(MappedDataset(source, v1.Resize(3)), ""),
        fingerprint(MappedDataset(source, v1.Resize(4)), ""),
        fingerprint(MappedDataset(source, lambda x: x), ""),
        fingerprint(MappedDataset(source, lambda x: x * 2), ""),
    ]
    assert len(set(names + others)) == len(names) + len(others)
    assert fingerprint(pickle.loads(pickle.dumps(source)), "") == fingerprint(source, "")


def test_a_module_that_was_changed_since_the_process_began_is_a_miss(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    try:
        module = tmp_path / "changed_module.py"
        module.write_text("def mine(x): return x")
        os.utime(module, (1, 1))
        mine = importlib.import_module("changed_module").mine
        assert fingerprint([mine], "") == fingerprint([mine], "")
        module.write_text("def mine(x): return x + 1")
        assert fingerprint([mine], "") != fingerprint([mine], "")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("changed_module", None)


def test_of_an_archive_a_digest_is_kept(tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    names = ["zipped_one", "zipped_two"]
    sys.path.insert(0, str(archive))
    try:
        behind = []
        for more in (b"", os.urandom(1 << 20)):
            with zipfile.ZipFile(archive, "w") as files:
                for name in names:
                    files.writestr(f"{name}.py", "")
                files.writestr("more", more)
            os.utime(archive, (1, 1))
            importlib.invalidate_caches()
            behind.append(code_behind(names))
            assert [name for name, _ in behind[-1]] == names
            assert sum(len(code) for _, code in behind[-1]) < 1000
            assert behind[-1] == code_behind(names)
        assert behind[0] != behind[1]
    finally:
        sys.path.remove(str(archive))


# A module whose variables raise errors when they are asked for attributes.
ODD_THINGS = """
import types
from torch import classes, ops
class Refuses:
    def __getattribute__(self, name):
        raise RuntimeError(name)
class RefusingType(type):
    def __getattribute__(self, name):
        raise RuntimeError(name)
class RefusingModule(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(name)
class Class(metaclass=RefusingType):
    pass
proxy, module = Refuses(), RefusingModule("module")
"""
# How each module with a dataset imports its helper module. Every "helper_…" has a file.
DATASETS = {
    "alone": "",
    "of_a_module": "import helper_of_a_module",
    "of_a_function": "from helper_of_a_function import work",
    "late": "def late():\n    import helper_late",
    "by_name": "import importlib\nwork = importlib.import_module('helper_' + 'by_name').work",
    "in_a_package": "from package import helper_in_a_package",
    "relative": "from package.inner import data",
    "two_steps": "import step_two_steps",
    "standard_name": "import turtle",
    "beside_odd_things": ODD_THINGS,
}
NAMES_FINGERPRINTS = """
import importlib, json, sys
from dpex.datasets.fingerprint import fingerprint
class OfTheScript:
    def __getitem__(self, index):
        from helper_of_the_script import first_work
        return first_work(index)
class OfAPackage:
    def __getitem__(self, index):
        from package import helper_of_a_package
        return helper_of_a_package.second_work(index)
class OfItsPackage:
    def __getitem__(self, index):
        from .helper_of_its_package import third_work
        return third_work(index)
found = {
    "of_the_script": fingerprint(OfTheScript(), "").hex(),
    "of_a_package": fingerprint(OfAPackage(), "").hex(),
    "of_its_package": fingerprint(OfItsPackage(), "").hex(),
}
for name in sys.argv[1:]:
    found[name] = fingerprint(importlib.import_module("data_" + name).Data(), "").hex()
print(json.dumps(found))
"""


def write_old(file: Path, text: str) -> None:
    """Write a file that is older than all processes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (1, 1))


def fingerprints(
    place: Path, program: str, *names: str, package: str = "", **variables: str
) -> dict[str, str]:
    """Run a program beside its modules, and return the fingerprints that it prints."""
    file = place / package / "program.py"
    write_old(file, program)
    command = [sys.executable, *(["-m", f"{package}.program"] if package else [str(file)]), *names]
    paths = filter(None, [variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *paths]), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("package", ["", "package"], ids=["script", "module"])
def test_a_helper_module_that_changes_is_a_miss(package: str, tmp_path: Path) -> None:
    def write_helpers(code: str) -> None:
        for name in ("of_a_module", "of_a_function", "late", "by_name", "of_the_script"):
            write_old(tmp_path / f"helper_{name}.py", code)
        write_old(tmp_path / "helper_two_steps.py", code)
        write_old(tmp_path / "turtle.py", code)
        for name in ("in_a_package", "relative", "of_a_package", "of_its_package"):
            write_old(tmp_path / "package" / f"helper_{name}.py", code)

    for name, imports in DATASETS.items():
        write_old(tmp_path / f"data_{name}.py", f"{imports}\nclass Data:\n    pass\n")
    write_old(tmp_path / "step_two_steps.py", "import helper_two_steps")
    write_old(tmp_path / "package" / "__init__.py", "")
    write_old(tmp_path / "package" / "inner" / "__init__.py", "")
    write_old(tmp_path / "package" / "inner" / "data.py", "from ..helper_relative import work")

    write_helpers("def work(x): return x")
    first = fingerprints(tmp_path, NAMES_FINGERPRINTS, *DATASETS, package=package)
    again = fingerprints(tmp_path, NAMES_FINGERPRINTS, *DATASETS, package=package)
    assert again == first, "nothing has changed"
    write_helpers("def work(x): return x + 1")
    then = fingerprints(tmp_path, NAMES_FINGERPRINTS, *DATASETS, package=package)
    # Relative imports always fail in a script, so their modules do not count.
    expected = {"alone", "beside_odd_things", *([] if package else ["of_its_package"])}
    assert {name for name in first if first[name] == then[name]} == expected


@pytest.mark.extended
def test_another_version_of_what_is_installed_is_a_miss(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    # Modules have other names than their distributions. The second distribution requires the third.
    for name in ("first", "second", "third"):
        write_old(installed / f"a_{name}.py", "class Data:\n    pass\n")
    importing = "class Data:\n    def get(self):\n        import a_first\n"
    write_old(tmp_path / "of_mine.py", importing)
    write_old(installed / "copied.py", importing)

    # The remains of two distributions that a user removed by hand.
    for name in ("a_first", "left_over"):
        write_old(installed / f"{name}-0.dist-info" / "RECORD", f"{name}.py,,\n")

    def found(build: str = "", **versions: str) -> dict[str, str]:
        for name, version in {"first": "1", "second": "1", "third": "1", **versions}.items():
            info = installed / f"dist_{name}-0.dist-info"
            requires = (
                "Requires-Dist: dist-third>=1\nRequires-Dist: left-over\n"
                if name == "second"
                else ""
            )
            about = f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: {version}\n{requires}"
            write_old(info / "METADATA", about)
            write_old(info / "RECORD", f"a_{name}.py,{build if name == 'first' else ''},\n")
        program = (
            "import json, a_first, a_second, copied, of_mine\n"
            "from dpex.datasets.fingerprint import fingerprint\n"
            "modules = (a_first, a_second, copied, of_mine)\n"
            "print(json.dumps({m.__name__: fingerprint(m.Data(), '').hex() for m in modules}))"
        )
        return fingerprints(tmp_path, program, PYTHONPATH=str(installed))

    before = found()
    assert found() == before

    def changed(**what: str) -> set[str]:
        after = found(**what)
        return {name for name in before if before[name] != after[name]}

    assert changed(first="2") == {"a_first", "copied", "of_mine"}
    assert changed(build="another") == {"a_first", "copied", "of_mine"}
    assert changed(second="2") == {"a_second"}
    assert changed(third="2") == {"a_second"}


def test_a_later_job_finds_what_was_made(tmp_path: Path) -> None:
    outputs = []
    with workplace() as place:
        for version in ("", "", "2"):
            done = run_program(
                PROGRAM, "read", str(place / "cache"), version, place=place, seconds=60
            )
            assert done.returncode == 0, done.stderr
            outputs.append(done.stdout.split())
    assert outputs == [["0", "30"], ["30", "0"], ["0", "30"]]


def test_a_later_job_finds_pictures_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "cat").mkdir(parents=True)
    PIL.Image.new("L", (3, 3)).save(tmp_path / "pictures" / "cat" / "1.png")
    program = (
        "import sys; from dpex.datasets import ImageFolder, cached\n"
        "dataset = cached(ImageFolder(sys.argv[1]), at=sys.argv[2]); dataset[0]\n"
        "print(dataset.info().hits)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "pictures"), str(tmp_path / "cache")]
    hits = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert hits == [b"0\n", b"1\n"]


def test_a_later_job_finds_samples_of_a_class_of_the_script(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from dpex.datasets import cached, on_node\n"
        "class Data:\n"
        "    def __init__(self, number): self.number = number\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, index): return index + self.number\n"
        "dataset = cached(on_node(Data, int(sys.argv[1])), at=sys.argv[2])\n"
        "assert dataset[1] == 1 + int(sys.argv[1])\n"
        "print(dataset.info().hits)\n"
    )
    hits = []
    for number in ("5", "5", "6"):
        command = [sys.executable, str(program), number, str(tmp_path / "cache")]
        hits.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert hits == [0, 1, 0]


@pytest.mark.extended
def test_a_later_job_finds_what_was_made_of_what_a_job_has_in_memory(tmp_path: Path) -> None:
    program = (
        "import sys; from cache_program import Arrays\n"
        "from dpex.datasets import cached, on_node\n"
        "built = on_node(Arrays, arrays_in_common=True)\n"
        "dataset = cached(cached(cached(built, at=sys.argv[1]), at='memory'), at=sys.argv[2])\n"
        "dataset[0]; print(dataset.info().hits)"
    )
    hits = []
    for port in ("", "", "1", "65000"):
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if port else {}
        command = [sys.executable, "-c", program, str(tmp_path / "one"), str(tmp_path / "two")]
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            env=environment(tmp_path, PYTHONPATH=str(PROGRAM.parent), **ranks),
        )
        hits.append(int(done.stdout))
    assert hits == [0, 1, 1, 1]


@pytest.mark.extended
def test_memory_is_given_back(tmp_path: Path) -> None:
    with workplace() as place:
        before = set(node_memory.memory("cache").glob("*"))
        done = run_program(PROGRAM, "read", "memory", "", place=place, seconds=60)
        assert done.stdout.split() == ["0", "30"], done.stderr
        assert set(node_memory.memory("cache").glob("*")) <= before
        done = run_program(PROGRAM, "epochs", place=place, seconds=100)
        assert done.stdout.split() == ["30", "30"], done.stderr
        assert set(node_memory.memory("cache").glob("*")) <= before
        holder = spawn([sys.executable, str(PROGRAM), "hold"], place, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        [left] = [Path(holder.stdout.readline().strip())]
        node_memory.job_directory("cache", "another")
        assert left.exists(), "it is in use"
        holder.kill()
        holder.wait()
        assert left.exists()
        node_memory.job_directory("cache", "yet another")
        assert not left.exists()


# --- atomic writes and damaged stores -------------------------------------------------------------


def test_writers_that_are_killed_leave_no_torn_sample() -> None:
    with workplace() as place:
        chance = random.Random(3)
        log = place / "log"
        for _ in range(3):
            log.write_text("")
            writers = [
                spawn(
                    [sys.executable, str(PROGRAM), "write", str(place / "cache")],
                    place,
                    env=environment(place),
                    stdout=log.open("a"),
                )
                for _ in range(2)
            ]
            wait_until(lambda: len(log.read_text().split()) >= 2, 60, "writers at work")
            time.sleep(chance.uniform(0, 0.3))  # a random moment
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
            done = run_program(PROGRAM, "check", str(place / "cache"), place=place, seconds=60)
            assert done.returncode == 0, done.stdout + done.stderr
        found, wrong = map(int, done.stdout.split())
        assert found > 100
        assert wrong == 0


def test_what_cannot_be_read_is_recomputed(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with workplace() as elsewhere:

        def read() -> list[int]:
            done = run_program(PROGRAM, "read", str(place), "", place=elsewhere, seconds=60)
            assert done.returncode == 0, done.stdout + done.stderr
            return list(map(int, done.stdout.split()))

        assert read() == [0, 30]
        with lmdb.open(str(place / "v1"), max_dbs=1) as environment:
            samples = environment.open_db(b"samples")
            with environment.begin(samples, write=True) as transaction:
                keys = [key for key, _ in transaction.cursor()]
                transaction.put(keys[3], b"no sample")
        assert read() == [29, 1]
        # The state after a power failure, before all samples were on the disk.
        for note in ("another-boot 1", "another-boot", ""):
            (place / "synced").write_text(note)
            assert read() == [0, 30]
        (place / "v1" / "data.mdb").write_bytes(b"no database" * 1_000)
        assert read() == [0, 30]


def test_what_a_job_has_made_outlasts_the_machine(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with workplace() as elsewhere:
        run_program(PROGRAM, "train", str(place), place=elsewhere, seconds=120).check_returncode()
        # Simulate a restart of the machine.
        last = (place / "synced").read_text().split()[1]
        (place / "synced").write_text(f"another-boot {last}")
        done = run_program(PROGRAM, "read", str(place), "", place=elsewhere, seconds=60)
        assert done.stdout.split() == ["30", "0"], done.stderr


@pytest.mark.parametrize("then", ["read", "written"])
def test_a_store_that_another_process_has_let_grow_is(then: str, tmp_path: Path) -> None:
    small = SampleStore(tmp_path / "cache", 1_000_000)
    with workplace() as elsewhere:
        done = run_program(*(PROGRAM, "grow", str(tmp_path / "cache")), place=elsewhere, seconds=60)
        assert done.returncode == 0, done.stderr
    if then == "read":
        found, value = small.get(b"o" * 16, 1_999)
        assert found
        assert len(value) == 100_000
    else:
        small.put(b"p" * 16, 0, SAMPLE)
        assert small.get(b"p" * 16, 0)[0]


# --- full caches ----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    return SampleStore(tmp_path / "cache", 1_000_000)


def put(store: SampleStore, owner: bytes, count: int) -> int:
    """Store samples, and return how many of them are in the store afterwards."""
    store.get(owner, 0)
    for index in range(count):
        store.put(owner, index, SAMPLE)
    return sum(store.get(owner, index)[0] for index in range(count))


def test_a_full_cache_keeps_what_it_has(
    store: SampleStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, "dpex"):
        assert 10 < put(store, b"a" * 16, 50) < 20
        assert put(store, b"b" * 16, 50) == 0, "the other one was used a moment ago"
    assert store.size()[1] <= 1_000_000
    assert sum("max_bytes=1,000,000" in text for text in caplog.messages) == 2
    monkeypatch.setattr(sample_store, "_STALE_S", 0.0)
    assert put(store, b"b" * 16, 5) == 5, "it tries again"


def test_a_full_cache_drops_what_nobody_uses(
    store: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = put(store, b"a" * 16, 50)
    monkeypatch.setattr(sample_store, "_STALE_S", -1.0)
    assert put(store, b"b" * 16, 5) == 5
    assert sum(store.get(b"a" * 16, index)[0] for index in range(50)) <= before - 4
    assert put(store, b"b" * 16, 50) > 10
    assert store.size()[1] <= 1_000_000


def test_a_sample_larger_than_the_cache_is_recomputed_and_drives_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_store, "_STALE_S", -1.0)
    place = {"at": tmp_path / "cache", "max_bytes": 50_000}
    other = cached(range(3), **place)
    other[1]
    dataset = cached([np.zeros(10_000), np.zeros(5)], **place)
    for _ in range(2):
        assert [len(dataset[index]) for index in range(2)] == [10_000, 5]
    assert dataset.info().hits == 1
    assert other[1] == 1
    assert other.info().hits == 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte; skip the test if that is not allowed."""
    if os.getuid() != 0:
        pytest.skip("mounting a file system takes root")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(tmp_path / "disk"))
        except subprocess.CalledProcessError:
            pytest.skip("no file system can be mounted here")
        yield tmp_path / "disk"


def test_a_full_disk_costs_samples_only(disk: Path) -> None:
    with workplace() as place:
        for hits in (0, None):
            done = run_program(PROGRAM, "read", str(disk / "cache"), "", place=place, seconds=60)
            assert done.returncode == 0, done.stdout + done.stderr
            found, made = map(int, done.stdout.split())
            assert found + made == 30
            assert found == hits or (hits is None and 0 < found < 30)
        assert "the sample cache is full" in done.stderr


def test_half_of_the_memory_that_is_free_is_left(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_store, "memory", lambda _: disk)
    store = SampleStore(disk / "job", 1 << 30)
    small = dump(b"x" * 10_000, "sample")
    for index in range(100):
        store.put(b"o" * 16, index, small)
    assert store.size()[0] > 10
    left = os.statvfs(disk)
    assert 0.4 < left.f_bavail / left.f_blocks < 0.6


# --- permissions and bad arguments ----------------------------------------------------------------


def test_others_may_not_write_to_it(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    cached(range(3), at=place)[0]
    assert place.stat().st_mode & 0o777 == 0o700
    readable = tmp_path / "readable"
    (readable / "v1").mkdir(parents=True)
    cached(range(3), at=readable)[0]
    for directory in (place, readable):
        assert (directory / "v1").stat().st_mode & 0o777 == 0o700
        assert (directory / "v1" / "data.mdb").stat().st_mode & 0o777 == 0o600
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(PermissionError, match=r"that you own .*Run `chmod 700"):
        cached(range(3), at=open_to_all)[0]
    if os.getuid() == 0:
        others = tmp_path / "others"
        others.mkdir(0o700)
        os.chown(others, 12345, 12345)
        with pytest.raises(PermissionError, match=r"that you own .*Run `chmod 700"):
            cached(range(3), at=others)[0]
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        link = shared / "link"
        link.symlink_to(place)
        os.lchown(link, 12345, 12345)
        with pytest.raises(PermissionError, match="link belongs to user 12345, but must be yours"):
            cached(range(3), at=link)[0]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: cached(Stream()), TypeError, "only a map-style dataset"),
        (lambda: cached(range(3), at=3), TypeError, 'at must be "memory" or a directory, got 3'),  # type: ignore[arg-type]
        (lambda: cached(range(3), max_bytes=0), ValueError, "an integer > 0, got 0"),
        (lambda: cached(range(3), max_bytes=1.5), ValueError, "an integer > 0, got 1.5"),  # type: ignore[arg-type]
        (lambda: cached(range(3), max_bytes=True), ValueError, "an integer > 0, got True"),
    ],
)
def test_bad_input_is_told_at_once(
    make: Callable[[], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        make()


class Halves:
    """A dataset whose indices need not be integers."""

    def __getitem__(self, index: Any) -> float:
        return float(index)


def test_indices_of_any_kind(tmp_path: Path) -> None:
    dataset = cached({"a": 1, (2, 3): 4, 7: 5, 1 << 80: 6}, at=tmp_path / "cache")
    for _ in range(2):
        assert [dataset[key] for key in ("a", (2, 3), 7, 1 << 80)] == [1, 4, 5, 6]
    assert dataset.info().hits == 4
    rows = cached(torch.arange(9), at=tmp_path / "cache")
    for _ in range(2):
        for index in (3, np.int64(3), torch.tensor(3)):
            assert rows[index].shape == ()
        assert rows[torch.tensor([3])].shape == (1,)
    assert rows.info().misses == 2
    rounds = cached(Halves(), at=tmp_path / "cache")
    for index in (torch.tensor(0), torch.tensor(0.5), np.array(0.25), np.array(0)):
        assert rounds[index] == float(index)
