"""Chunks in flight, for the tests of ``in_flight`` and ``recovery``."""

from __future__ import annotations

from typing import Any

import torch

from dpex.protocol.chunks import Chunk, Run
from dpex.protocol.sent_chunks import Attempt, SentChunk
from dpex.worker.training_settings import Settings

RUN = Run("run", "loader", 7, 0, 3, 0, Settings(".", torch.float32))


def sent(number: int, first: int, batches: int, *, tries: int = 0, **how: Any) -> SentChunk:
    """Return a chunk in flight; if ``tries`` > 0, it was sent alone that many times."""
    indices = [[batch] for batch in range(batches)]
    chunk = Chunk(RUN, number, first, indices, list(range(batches)), **how)
    return SentChunk(chunk, Attempt(alone=tries > 0, tries=tries or 1))
