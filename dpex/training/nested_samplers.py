"""The samplers that a sampler draws from."""

from __future__ import annotations

from typing import Any

from torch.utils.data.distributed import DistributedSampler

__all__ = ["nested_samplers"]


def nested_samplers(sampler: Any) -> list[Any]:
    """Return a sampler and all samplers that it draws from, the outermost first.

    Source:
        torch's ``BatchSampler.sampler``, Accelerate's ``BatchSamplerShard.batch_sampler``, and
        Lightning's ``DistributedSamplerWrapper``, whose ``dataset`` holds the wrapped sampler.
    """
    found: list[Any] = []
    pending = [sampler]
    while pending:
        each = pending.pop(0)
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        pending += [getattr(each, "sampler", None), getattr(each, "batch_sampler", None)]
        if isinstance(each, DistributedSampler):
            pending.append(getattr(each.dataset, "_sampler", None))
    return found
