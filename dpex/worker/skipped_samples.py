"""Samples that cannot be read, and what becomes of their batch."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

__all__ = ["Failures", "NothingLeft"]


class NothingLeft(Exception):
    """All samples of a batch were left out."""


class Failures:
    """The samples of one batch that failed in one stage.

    Args:
        left_out: Whether they are left out of the batch.

    Attributes:
        left_out: The same.
    """

    def __init__(self, *, left_out: bool) -> None:
        self.left_out = left_out
        self._taken: dict[int, tuple[Any, str]] = {}

    def take(self, place: int, index: Any, error: Exception) -> bool:
        """Leave a sample out, if that is what is wanted.

        Args:
            place: Its place in the batch.
            index: Its index in the dataset.
            error: What it raised.

        Returns:
            False if the error is to be raised.
        """
        if self.left_out:
            text = "".join(traceback.format_exception_only(error)).strip()
            self._taken[place] = (index, text)
        return self.left_out

    def forget(self) -> None:
        """Begin the batch anew."""
        self._taken.clear()

    @property
    def samples(self) -> tuple[tuple[Any, str], ...]:
        """Index and error of each."""
        return tuple(self._taken.values())

    def rest(self, samples: list[Any]) -> list[Any]:
        """Return the samples that did not fail.

        Raises:
            NothingLeft: There are none.
        """
        if self._taken and not samples:
            raise NothingLeft
        return samples

    def places(self, before: Iterable[tuple[int, Any]]) -> tuple[int, ...]:
        """Return the places of the samples that did not fail.

        Args:
            before: Place and index of the samples that there were.
        """
        return tuple(place for place, _ in before if place not in self._taken)
