"""A dict that keeps its latest entries only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

__all__ = ["Recent"]

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dict that keeps only the entries that were set last.

    Args:
        most: Maximum number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        """Set an entry, and remove the oldest one if there are too many."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy or pickle the dict; OrderedDict's own way omits the argument."""
        return type(self), (self._most,), None, None, iter(self.items())
