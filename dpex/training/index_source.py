"""The samplers and generators of a loader, and what a resume state needs of them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from dpex.training.nested_samplers import nested_samplers
from dpex.training.resume_state import ResumeState
from dpex.worker.seeding import generators_kept
from dpex.worker.stateful import give_state, has_state, state_of

__all__ = ["IndexSource"]


@dataclass(frozen=True)
class IndexSource:
    """Source of a loader's indices.

    Attributes:
        index_sampler: Sampler that yields batches of indices, or single indices.
        batched: Whether the sampler yields batches.
        generator: The loader's ``generator``.
        dataset: The loader's ``dataset``.
        num_workers: The loader's ``num_workers``.
        distribute_mode: Whether dpex's workers make the batches.
    """

    index_sampler: Any
    batched: bool
    generator: torch.Generator | None
    dataset: Any
    num_workers: int
    distribute_mode: bool = False

    @property
    def streams(self) -> bool:
        """Whether the dataset is an ``IterableDataset``, so that indices select no samples."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def in_process(self) -> bool:
        """Whether the training process itself reads the dataset."""
        return not self.num_workers

    @property
    def workers(self) -> int | None:
        """Number of streams; None for a map-style dataset."""
        return int(max(1, self.num_workers)) if self.streams else None

    @property
    def length(self) -> int | None:
        """Length of the dataset, if it is map-style and has one."""
        if self.streams:
            return None
        try:
            return len(self.dataset)
        except Exception:  # torch needs no len(dataset) if the loader was given a sampler
            return None

    @property
    def dataset_state(self) -> Any:
        """State of a map-style dataset; None for a stream, whose reader has its state."""
        return None if self.streams else state_of(self.dataset)

    @property
    def dataset_state_between_epochs(self) -> Any:
        """State of the dataset between two epochs, also of a stream that this process reads."""
        return None if self.streams and not self.in_process else state_of(self.dataset)

    @property
    def samplers(self) -> dict[str, Any]:
        """The samplers by name. Saved states have these names."""
        outer, *inner = nested_samplers(self.index_sampler)
        names = ["inner", *(f"inner{number}" for number in range(2, len(inner) + 1))]
        return {"outer": outer, **dict(zip(names, inner, strict=False))}

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Generators of the loader and its samplers, keyed by their owner."""
        found = {"loader": self.generator}
        found |= {name: getattr(s, "generator", None) for name, s in self.samplers.items()}
        return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}

    def sampler_states(self, iterator: Any) -> dict[str, Any] | None:
        """Return the state of the sampler's iterator if it has one, else the samplers' states."""
        if has_state(iterator):
            return {"iterator": state_of(iterator)}
        known = {name: state_of(sampler) for name, sampler in self.samplers.items()}
        return {name: state for name, state in known.items() if state is not None} or None

    def has_states(self, iterator: Any) -> bool:
        """Return whether ``sampler_states`` would return any state."""
        return any(map(has_state, (iterator, *self.samplers.values())))

    def load_sampler_states(
        self, states: Mapping[str, Any] | None, *, between_epochs: bool
    ) -> None:
        """Restore the samplers' states, before the sampler's iterator is created.

        Args:
            states: Result of ``sampler_states``.
            between_epochs: Whether the samplers must start an epoch next.
        """
        known = [
            (sampler, states[name])
            for name, sampler in self.samplers.items()
            if states is not None and name in states and has_state(sampler)
        ]

        def load() -> None:
            for sampler, state in known:
                give_state(sampler, state)

        load()
        if between_epochs and known:
            # A sampler may be at the end of an epoch now. Then its next pass is empty, and next()
            # uses it up. Otherwise next() has started an epoch, so load() resets the sampler.
            with generators_kept():
                if next(iter(self.index_sampler), None) is not None:
                    load()

    @property
    def distributed(self) -> DistributedSampler[Any] | None:
        """The DistributedSampler among the samplers."""
        found = (s for s in self.samplers.values() if isinstance(s, DistributedSampler))
        return next(found, None)

    @property
    def world_size(self) -> int | None:
        """Number of ranks that share an epoch; None if no sampler divides it among ranks."""
        if self.distributed is not None:
            return int(self.distributed.num_replicas)
        # Accelerate's BatchSamplerShard
        counts = (getattr(each, "num_processes", None) for each in self.samplers.values())
        return next((count for count in counts if isinstance(count, int)), None)

    @property
    def epoch(self) -> int | None:
        """Epoch number of the samplers that have ``set_epoch``; None without such a sampler."""
        for sampler in self.samplers.values():
            epoch = getattr(sampler, "epoch", None)
            if isinstance(epoch, Integral) and callable(getattr(sampler, "set_epoch", None)):
                return int(epoch)  # also a bool, or an integer of numpy
        return None

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of each sampler that has it."""
        for sampler in self.samplers.values():
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    @property
    def by_samples(self) -> bool:
        """Whether a resumed epoch can skip any number of samples, not only whole batches."""
        return not self.batched or type(self.index_sampler) is BatchSampler

    @property
    def batch_size(self) -> int | None:
        """Number of samples in every batch except perhaps the last; None if it varies."""
        return self.index_sampler.batch_size if self.batched and self.by_samples else None

    def rest(self, state: ResumeState) -> tuple[Any, int]:
        """Return a sampler for the rest of an epoch.

        Returns:
            The sampler, and the number of its first batches to skip.
        """
        outer = self.index_sampler
        if not self.by_samples:
            return outer, state.batches
        inner = outer.sampler if self.batched else outer
        if state.offset:
            inner = _Redistributed(inner, state.offset)
        inner = _After(inner, state.samples)
        if self.batched:
            return BatchSampler(inner, outer.batch_size, outer.drop_last), 0
        return inner, 0


class _After:
    """The indices that a sampler yields after its first ``count`` indices."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        # Some samplers draw when their iterator is created. This creates it as early as torch.
        return self._rest(iter(self._sampler))

    def _rest(self, indices: Iterator[Any]) -> Iterator[Any]:
        skipped = sum(1 for _ in itertools.islice(indices, self._count))
        if skipped != self._count:
            raise ValueError(
                f"the sampler has yielded {skipped} indices, but the delivered batches had "
                f"{self._count}. Resume the epoch with the same sampler, or start a new epoch with "
                "load_state_dict({})"
            )
        yield from indices


class _Redistributed:
    """The rest of an epoch, divided among ranks as torch's DistributedSampler divides an epoch.

    Args:
        sampler: Sampler with the current number of ranks.
        offset: Number of samples that all ranks have delivered before.
    """

    def __init__(self, sampler: DistributedSampler[Any], offset: int) -> None:
        self._sampler = sampler
        self._offset = offset

    def __iter__(self) -> Iterator[int]:
        all_ranks = copy.copy(self._sampler)
        all_ranks.num_replicas, all_ranks.rank = 1, 0
        all_ranks.num_samples = all_ranks.total_size = len(all_ranks.dataset)  # type: ignore[arg-type]
        rest = list(all_ranks)[self._offset :]
        ranks = self._sampler.num_replicas
        if self._sampler.drop_last:
            total = len(rest) // ranks * ranks
        else:
            total = math.ceil(len(rest) / ranks) * ranks
            rest = list(itertools.islice(itertools.cycle(rest), total))
        return iter(rest[self._sampler.rank : total : ranks])
