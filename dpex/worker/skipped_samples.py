"""Samples that cannot be read, and the rest of their batch."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

__all__ = ["Failures", "NothingLeft"]


class NothingLeft(Exception):
    """Signal that all samples of a batch were left out."""


class Failures:
    """The samples of one batch that failed in one stage.

    Args:
        left_out: Whether failed samples are left out of the batch.

    Attributes:
        left_out: The argument of the same name.
    """

    def __init__(self, *, left_out: bool) -> None:
        self.left_out = left_out
        self._taken: dict[int, tuple[Any, str]] = {}

    def take(self, place: int, index: Any, error: Exception) -> bool:
        """Record a failed sample, if failed samples are left out.

        Args:
            place: The sample's place in the batch.
            index: The sample's index in the dataset.
            error: The exception that the sample raised.

        Returns:
            Whether the sample is left out; if not, the caller must raise the error.
        """
        if self.left_out:
            text = "".join(traceback.format_exception_only(error)).strip()
            self._taken[place] = (index, text)
        return self.left_out

    def forget(self) -> None:
        """Forget the recorded samples, because the batch is read from its start."""
        self._taken.clear()

    @property
    def samples(self) -> tuple[tuple[Any, str], ...]:
        """Index and error of each recorded sample."""
        return tuple(self._taken.values())

    def rest(self, samples: list[Any]) -> list[Any]:
        """Return ``samples``, the samples that did not fail.

        Raises:
            NothingLeft: All samples of the batch failed.
        """
        if self._taken and not samples:
            raise NothingLeft
        return samples

    def places(self, before: Iterable[tuple[int, Any]]) -> tuple[int, ...]:
        """Return the places of the samples that did not fail.

        Args:
            before: Place and index of each sample before the stage.
        """
        return tuple(place for place, _ in before if place not in self._taken)
