"""Tests of errors that dpex detects first and raises later: they keep no object alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

from dpex import BatchLostError
from dpex.protocol.deferred_errors import KeptError, reraise


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Holds:
    """An object that holds an error and raises it from its own frame, like an iterator."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def next(self) -> None:
        reraise(self.kept)


def wrapped() -> ExceptionWrapper:
    try:
        raise ValueError("in a worker")
    except ValueError:
        return ExceptionWrapper()


def kept() -> KeptError:
    return KeptError(BatchLostError("of our own"))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [(wrapped, ValueError, "in a worker"), (kept, BatchLostError, "of our own")],
)
def test_who_raises_goes_with_the_error(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    holds = Holds(make())
    gone = weakref.ref(holds)
    for _ in range(2):
        with pytest.raises(error, match=text):
            holds.next()
    del holds
    assert gone() is None


def test_every_error_that_is_raised_is_a_new_one() -> None:
    again = kept()
    caught = []
    for _ in range(2):
        with pytest.raises(BatchLostError) as info:
            again.reraise()
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert caught[0].args == caught[1].args
