"""A program whose dataset uses objects that a fork copies and pickle refuses.

It compares the batches with those of torch's forked worker processes.
"""

from __future__ import annotations

import functools
import sys
import threading
from contextvars import ContextVar
from typing import Any

from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader


@functools.lru_cache(maxsize=4)
def cached(index: int) -> int:
    return 10 * index


@functools.cache
def fibonacci(number: int) -> int:
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


@functools.singledispatch
def size(thing: Any) -> int:
    return -1


@size.register
def _(thing: int) -> int:
    return thing


@size.register
def _(thing: list) -> int:  # type: ignore[type-arg]
    return sum(map(size, thing))


LOCK = threading.Lock()
REENTRANT = threading.RLock()
LOCAL = threading.local()
LOCAL.offset = 5
SET: ContextVar[int] = ContextVar("SET")
SET.set(7)
UNSET: ContextVar[int] = ContextVar("UNSET", default=3)
EMPTY: ContextVar[int] = ContextVar("EMPTY")


class Uses(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    @functools.cached_property
    def table(self) -> list[int]:
        return [index * index for index in range(8)]

    @functools.lru_cache  # noqa: B019 - as users write it
    def method(self, index: int) -> int:
        return index + 1

    @staticmethod
    @functools.cache
    def static(index: int) -> int:
        return index + 2

    @classmethod
    @functools.cache
    def of_class(cls, index: int) -> str:
        return f"{cls.__name__} {index}"

    def __getitem__(self, index: int) -> Any:
        with LOCK, REENTRANT, REENTRANT:
            variables = SET.get(), UNSET.get(), EMPTY.get(None)
        own = self.table[index], self.method(index), self.static(index), self.of_class(index)
        offset = getattr(LOCAL, "offset", None)
        return cached(index), fibonacci(30 + index), size([index, [1]]), offset, own, variables


def main() -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": list}
    expected = list(DataLoader(Uses(), multiprocessing_context="fork", **arguments))
    cached(3)
    Uses().table  # noqa: B018
    loader = DpexDataLoader(
        Uses(),
        distribute_mode=True,
        head_address=sys.argv[1],
        **arguments,
    )
    assert list(loader) == expected
    assert list(loader) == expected
    print("as torch's fork", flush=True)


if __name__ == "__main__":
    main()
