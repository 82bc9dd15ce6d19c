"""Tests of argument checks, which need no Ray, and of the page that compares them with torch."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from dpex import DataLoader, DpexDataLoader
from dpex.log import announce_once


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"head_address": "head"}, ValueError, "'host:port' or 'ray://host:port'.*'head'"),
        ({"head_address": ""}, ValueError, "'host:port'"),
        ({"worker_options": ["num_cpus"]}, TypeError, r"dict.*\['num_cpus'\]"),
        ({"worker_options": {"cpus": 1}}, ValueError, r"not accept 'cpus'\. .*num_cpus"),
        ({"prefetch_bytes": -1}, ValueError, ">= 0, got -1"),
        ({"prefetch_bytes": 1.5}, ValueError, "got 1.5"),
        ({"on_error": "ignore"}, ValueError, "'ignore'"),
        ({"distribute_mode": 32}, TypeError, "True or False, got 32"),
    ],
)
def test_bad_values_are_refused(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        DpexDataLoader(range(3), **arguments)  # type: ignore[arg-type]


def test_the_second_positional_argument_is_torch_s() -> None:
    assert DpexDataLoader(range(3), 2).batch_size == 2  # type: ignore[arg-type]


def test_nothing_distributed_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    announce_once.cache_clear()
    with caplog.at_level(logging.INFO, "dpex"):
        loader = DataLoader(range(3))  # type: ignore[arg-type]
        assert not caplog.messages
        assert [int(batch) for batch in loader] == [0, 1, 2]
        assert [int(batch) for batch in loader] == [0, 1, 2]
        list(DpexDataLoader(range(3)))  # type: ignore[arg-type]
    assert len(caplog.messages) == 1
    assert "num_workers=0: this process makes the batches" in caplog.text


def test_the_one_line_swap_distributes_by_default() -> None:
    ours, theirs = (inspect.signature(kind) for kind in (DataLoader, DpexDataLoader))
    assert ours.parameters["distribute_mode"].default is True
    assert theirs.parameters["distribute_mode"].default is False
    without = [
        [p for p in signature.parameters.values() if p.name != "distribute_mode"]
        for signature in (ours, theirs)
    ]
    assert without[0] == without[1]
    torchs = list(inspect.signature(torch.utils.data.DataLoader).parameters.values())
    shared = [p for p in ours.parameters.values() if p.name in {q.name for q in torchs}]
    assert [(p.name, p.kind, p.default) for p in shared] == [
        (p.name, p.kind, p.default) for p in torchs
    ]


def test_every_argument_reaches_the_loader() -> None:
    sampler = torch.utils.data.SequentialSampler(range(3))
    generator = torch.Generator()
    given: dict[str, Any] = {
        "batch_size": 2,
        "sampler": sampler,
        "num_workers": 1,
        "collate_fn": list,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 3.0,
        "worker_init_fn": print,
        "generator": generator,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "in_order": False,
        "head_address": "local",
        "worker_options": {"num_cpus": 2},
        "prefetch_bytes": 7,
        "on_error": "skip",
        "max_skipped": 4,
    }
    loader = DataLoader(range(3), **given)  # type: ignore[arg-type]
    assert {name: getattr(loader, name) for name in given} == given
    assert loader.distribute_mode
    loader = DataLoader(range(3), distribute_mode=False)  # type: ignore[arg-type]
    assert not loader.distribute_mode


def test_the_loader_is_a_class_that_can_be_pickled_and_extended() -> None:
    class Mine(DataLoader[int]):
        pass

    assert issubclass(DataLoader, torch.utils.data.DataLoader)
    loader = DataLoader(range(3), batch_size=2, num_workers=1)  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(loader))
    assert type(copy) is DataLoader
    assert copy.distribute_mode
    assert Mine(range(3)).distribute_mode  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ignored",
    [
        {"head_address": "10.0.0.5:6379"},
        {"worker_options": {"num_cpus": 2}},
        {"prefetch_bytes": 1},
        {"max_skipped": 3},
    ],
)
@pytest.mark.parametrize("kind", [DataLoader, DpexDataLoader])
def test_an_ignored_argument_warns(
    monkeypatch: pytest.MonkeyPatch, ignored: dict[str, Any], kind: type[DpexDataLoader[int]]
) -> None:
    monkeypatch.setattr("dpex.log._warned", set())
    [(name, value)] = ignored.items()
    with pytest.warns(UserWarning, match="distribute_mode=False ignores") as warned:
        kind(range(3), distribute_mode=False, **ignored)  # type: ignore[arg-type]
    assert f"distribute_mode=False ignores {name}={value!r}" in str(warned[0].message)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(range(3), distribute_mode=False)  # type: ignore[arg-type]
        kind(range(3), distribute_mode=True, num_workers=1, **ignored)  # type: ignore[arg-type]


HERE = Path(__file__).parent
SEMANTICS = (HERE.parent / "docs" / "semantics.md").read_text()


def test_every_argument_is_compared_with_torch_s() -> None:
    rows = re.findall(r"^\| (`.*?) \|", SEMANTICS, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)(?:=.*?)?`", row)}
    parameters = set(inspect.signature(DpexDataLoader.__init__).parameters) - {"self"}
    assert parameters <= documented


def test_every_test_that_the_comparison_names_exists() -> None:
    defined = {path.name: path.read_text() for path in HERE.rglob("test_*.py")}
    named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", SEMANTICS)
    assert len(named) > 60
    for file, test in named:
        if file:
            assert file in defined, file
        if test:
            where = [defined[file]] if file else defined.values()
            assert any(f"def {test}(" in text for text in where), (file, test)
