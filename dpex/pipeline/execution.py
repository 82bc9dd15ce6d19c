"""A Ray Data execution that lasts as long as its pipeline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ray.data

__all__ = ["Execution"]

logger = logging.getLogger("dpex")

# As long as torch gives its workers to end.
_END_S = 5.0


class Execution:
    """Runs a Dataset to its end, in a thread.

    The tasks decide how long that takes. They send their batches another way, so the Dataset has no
    rows.

    Args:
        build: Builds the Dataset.
        on_end: Called once, in the thread, if the execution ends before ``close``: with the error,
            or with None.
    """

    def __init__(
        self, build: Callable[[], ray.data.Dataset], on_end: Callable[[BaseException | None], None]
    ) -> None:
        self._build = build
        self._on_end = on_end
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dpex-execution", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for _ in self._build().iter_internal_ref_bundles():
                pass
        except BaseException as failure:
            error = failure
        if not self._closed:
            self._on_end(error)

    def close(self) -> None:
        """Wait a while for the end, which comes when no task has anything left to do."""
        self._closed = True
        self._thread.join(_END_S)
