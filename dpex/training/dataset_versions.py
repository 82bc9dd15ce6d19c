"""Numbers of the dataset versions that a loader's iterators read."""

from __future__ import annotations

import itertools
import uuid

__all__ = ["DatasetVersions"]


class DatasetVersions:
    """Source of the numbers of dataset versions, for the iterators of one loader.

    Attributes:
        loader: Identity of the loader.
        change_noted: Whether dpex has warned that a batch changed a copy, although the first
            batches had not.
    """

    def __init__(self) -> None:
        self.loader = uuid.uuid4().hex
        self.change_noted = False
        self._numbers = itertools.count()

    def new(self) -> int:
        """Return the number of a new dataset version."""
        return next(self._numbers)
