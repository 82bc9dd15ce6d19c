"""Tests of argument checks, which need no Ray, and of the page that compares them with torch."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from dpex import DpexDataLoader, dataloader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"head_address": "head"}, ValueError, "'host:port' or 'ray://host:port'.*'head'"),
        ({"head_address": ""}, ValueError, "'host:port'"),
        ({"worker_options": ["num_cpus"]}, TypeError, r"dict.*\['num_cpus'\]"),
        ({"worker_options": {"cpus": 1}}, ValueError, r"\['cpus'\]; known are .*'num_cpus'"),
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


def test_nothing_distributed_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader, "_warned", set())
    with pytest.warns(UserWarning, match="num_workers=0 distributes nothing"):
        loader = DpexDataLoader(range(3), distribute_mode=True)  # type: ignore[arg-type]
    assert [int(batch) for batch in loader] == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DpexDataLoader(range(3), distribute_mode=True)  # type: ignore[arg-type]


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
