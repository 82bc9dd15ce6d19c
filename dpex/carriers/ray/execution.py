"""A Ray Data execution that lasts as long as its pipeline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ray.data

__all__ = ["Execution"]

logger = logging.getLogger("dpex")


class Execution:
    """A thread that runs a Dataset to its end.

    The tasks decide how long that takes. They send their batches to the pipeline actor, so the
    Dataset has no rows.

    Args:
        build: Builds the Dataset.
        on_end: Called once, in the thread, if the execution ends before ``close``. Its argument is
            the error, or None.
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

    def close(self, deadline: float) -> None:
        """Wait for the execution to end, which it does when its tasks have ended.

        Args:
            deadline: When the wait ends at the latest, in seconds of ``time.monotonic``.
        """
        self._closed = True
        self._thread.join(max(0.0, deadline - time.monotonic()))
