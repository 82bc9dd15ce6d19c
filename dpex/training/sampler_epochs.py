"""Epoch numbers of a loader's samplers, and a warning if ``set_epoch`` was forgotten."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dpex.log import warn
from dpex.training.nested_samplers import nested_samplers

__all__ = ["SamplerEpochs"]


class SamplerEpochs:
    """The ``epoch`` attributes of one loader's samplers.

    Args:
        loader: The loader.

    Source:
        torch's ``DistributedSampler``: without ``set_epoch`` every epoch has the same order.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Weak: an iterator holds this object, and may outlive the loader.
        self._loader = weakref.ref(loader)
        self._known: list[Any] = []
        self._finished: tuple[Any, ...] | None = None
        self._warned = False

    @property
    def _samplers(self) -> list[Any]:
        """The loader's samplers, read at each use because frameworks replace them."""
        loader = self._loader()
        if loader is not None:
            self._known = [*nested_samplers(loader.sampler), *nested_samplers(loader.batch_sampler)]
        return self._known

    @property
    def now(self) -> tuple[Any, ...]:
        """The ``epoch`` of each sampler, or None for a sampler without one."""
        return tuple(getattr(sampler, "epoch", None) for sampler in self._samplers)

    def begin(self) -> None:
        """Warn once if ``set_epoch`` was forgotten; called at the first ``next()`` of an epoch."""
        if self._finished != self.now or self._warned:
            return
        for sampler in self._samplers:
            if isinstance(sampler, DistributedSampler) and sampler.shuffle:
                self._warned = True
                if sampler.rank == 0:
                    warn(
                        f"a second epoch starts with DistributedSampler.epoch={sampler.epoch}, so "
                        "every rank gets the same samples in the same order again. Call "
                        "sampler.set_epoch(epoch) before each epoch",
                    )
                return

    def end(self) -> None:
        """Record that an epoch has been read to its end."""
        self._finished = self.now
