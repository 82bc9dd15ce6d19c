"""Tests that ``torch.compile`` does not trace dpex's functions in a compiled training step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import dpex
from dpex import DpexDataLoader
from dpex.compat import untraced
from dpex.wire.local_modules import changed

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.skipif(
        not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
        reason="this torch cannot skip a function and all that it calls",
    ),
]
PACKAGE = str(Path(dpex.__file__).parent)


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index * index))


def one_step(batches: Iterator[torch.Tensor]) -> torch.Tensor:
    return next(batches) * 2


def whole_epoch(loader: Any) -> torch.Tensor:
    total = torch.zeros(())
    for batch in loader:
        total = total + batch.sum()
    return total


def traced(function: Callable[[Callable[..., Any]], Any]) -> tuple[Any, list[str], int]:
    """Return a result, the functions of dpex that dynamo has traced, and the graph breaks."""
    from torch._dynamo.utils import counters

    seen: list[CodeType] = []

    def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(step, backend="eager")

    torch._dynamo.reset()
    counters.clear()
    try:
        result = function(compiled)
        references: Any = torch._dynamo.convert_frame.input_codes.seen
        seen = [code for code in (reference() for reference in references) if code is not None]
        breaks = sum(counters["graph_break"].values())
    finally:
        torch._dynamo.reset()
    names = [f"{c.co_filename}:{c.co_qualname}" for c in seen if c.co_filename.startswith(PACKAGE)]
    return result, names, breaks


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 2, "distribute_mode": True},
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork"},
    ],
    ids=["ray", "one process", "torch's workers"],
)
def test_a_compiled_step_does_not_trace_dpex(arguments: dict[str, Any]) -> None:
    loader = DpexDataLoader(Squares(), batch_size=4, **arguments)

    def steps(compiled: Callable[..., Any]) -> list[list[float]]:
        step, batches = compiled(one_step), iter(loader)
        return [step(batches).tolist() for _ in range(2)]

    def epoch(compiled: Callable[..., Any]) -> float:
        return float(compiled(whole_epoch)(loader))

    doubled = [[0.0, 2.0, 8.0, 18.0], [32.0, 50.0, 72.0, 98.0]]
    assert traced(steps) == (doubled, [], 1), "one graph break, at torch's own __next__()"
    assert traced(epoch) == (140.0, [], 0)
    gc.collect()


def test_a_torch_without_the_names_traces_dpex_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.delattr("torch._C._dynamo.eval_frame.set_code_exec_strategy")

    def function() -> int:
        return 3

    assert untraced.untraced(function)() == 3
    assert not recwarn.list


def with_a_graph_break(batches: Iterator[torch.Tensor]) -> torch.Tensor:
    total = next(batches)
    torch._dynamo.graph_break()
    return total * 2


def test_a_module_with_compiled_functions_counts_as_unchanged() -> None:
    """Otherwise worker processes would get all of the user's modules by value."""
    changed()  # records the modules
    traced(lambda compiled: compiled(with_a_graph_break)(iter([torch.ones(2)])))
    assert any(name.startswith("__resume_at_") for name in globals())
    assert __name__ not in changed()
