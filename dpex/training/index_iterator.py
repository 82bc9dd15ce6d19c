"""Indices of a loader's epochs: of a new epoch, or of the rest of a resumed epoch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from dpex.log import warn
from dpex.training.checkpoint import DrawnBatch, EpochProgress, Progress, State
from dpex.worker.rng_state import Draws
from dpex.worker.seeding import generators_kept
from dpex.worker.stateful import has_state, state_of

__all__ = ["IndexIterator", "Indices", "Source"]

# Number of positions in the epoch that a batch of unknown length takes.
_UNCOUNTED = 1 << 20


@dataclass(frozen=True)
class Source:
    """Source of a loader's indices.

    Attributes:
        index_sampler: Sampler that yields batches of indices, or single indices.
        batched: Whether the sampler yields batches.
        generator: The loader's ``generator``.
        dataset: The loader's ``dataset``.
        num_workers: The loader's ``num_workers``.
    """

    index_sampler: Any
    batched: bool
    generator: torch.Generator | None
    dataset: Any
    num_workers: int

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
        return max(1, self.num_workers) if self.streams else None

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
    def _samplers(self) -> dict[str, Any]:
        inner = getattr(self.index_sampler, "sampler", None)
        return {"outer": self.index_sampler, **({} if inner is None else {"inner": inner})}

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Generators of the loader and its samplers, keyed by their owner."""
        found = {"loader": self.generator}
        found |= {name: getattr(s, "generator", None) for name, s in self._samplers.items()}
        return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}

    def sampler_states(self, iterator: Any) -> dict[str, Any] | None:
        """Return the state of the sampler's iterator if it has one, else the samplers' states."""
        if has_state(iterator):
            return {"iterator": state_of(iterator)}
        known = {name: state_of(sampler) for name, sampler in self._samplers.items()}
        return {name: state for name, state in known.items() if state is not None} or None

    def has_states(self, iterator: Any) -> bool:
        """Return whether ``sampler_states`` would return any state."""
        return any(map(has_state, (iterator, *self._samplers.values())))

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
            for name, sampler in self._samplers.items()
            if states is not None and name in states and has_state(sampler)
        ]

        def load() -> None:
            for sampler, state in known:
                sampler.load_state_dict(copy.deepcopy(state))

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
        found = (s for s in self._samplers.values() if isinstance(s, DistributedSampler))
        return next(found, None)

    @property
    def world_size(self) -> int | None:
        """Number of ranks that share an epoch; None without a DistributedSampler."""
        return None if self.distributed is None else self.distributed.num_replicas

    @property
    def epoch(self) -> int | None:
        """Epoch number of the samplers that have ``set_epoch``; None without such a sampler."""
        for sampler in self._samplers.values():
            epoch = getattr(sampler, "epoch", None)
            if isinstance(epoch, int) and callable(getattr(sampler, "set_epoch", None)):
                return epoch
        return None

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of each sampler that has it."""
        for sampler in self._samplers.values():
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

    def check(self, state: State) -> None:
        """Raise ``ValueError`` unless this loader can resume from a state."""
        told = [state.dataset, *(s and s.dataset for s in state.stream_states or ())]
        if any(each is not None for each in told) and not has_state(self.dataset):
            raise ValueError(
                f"the state contains dataset state, but {type(self.dataset).__name__} has no "
                "state_dict() and load_state_dict(). Resume with the dataset class that saved it, "
                "or start a new epoch with load_state_dict({})"
            )
        if state.under_way:
            self._check_streams(state)
        if not state.under_way or not (state.samples or state.offset or state.ahead):
            return
        if state.length != self.length:
            raise ValueError(
                f"the state was saved with a dataset of length {state.length}, but this dataset "
                f"has length {self.length}. Resume with the same dataset, or start a new epoch "
                "with load_state_dict({})"
            )
        if state.ahead and state.batch_size != self.batch_size:
            raise ValueError(
                f"the state was saved with in_order=False and batch_size={state.batch_size}, but "
                f"this loader has batch_size={self.batch_size}. Keep it until the end of the epoch"
            )
        if state.world_size == self.world_size and not state.offset:
            return
        sampler = self.distributed
        dealt_out = sampler is not None and type(sampler).__iter__ is DistributedSampler.__iter__
        if state.world_size is None or not dealt_out or not self.by_samples or state.ahead:
            raise ValueError(
                f"the state was saved with {_ranks(state.world_size)}, and this loader has "
                f"{_ranks(self.world_size)}. An epoch can resume with another number of ranks only "
                "with in_order=True, torch's DistributedSampler, and torch's BatchSampler or none. "
                "Finish the epoch with the same ranks and samplers"
            )

    def _check_streams(self, state: State) -> None:
        if (state.workers is None) == self.streams:
            kinds = ("an IterableDataset", "a map-style dataset")
            raise ValueError(
                f"the state was saved with {kinds[state.workers is None]}, but "
                f"{type(self.dataset).__name__} is {kinds[not self.streams]}. Resume with the same "
                "dataset, or start a new epoch with load_state_dict({})"
            )
        begun = (state.workers, state.batch_size)
        if self.streams and state.batches and begun != (self.workers, self.batch_size):
            raise ValueError(
                f"the state of an IterableDataset was saved with num_workers={state.workers} and "
                f"batch_size={state.batch_size}, but this loader has "
                f"num_workers={self.num_workers} and batch_size={self.batch_size}. Keep both until "
                "the end of the epoch"
            )

    def fitting(self, state: State) -> State:
        """Return the state, without the workers' datasets' states if ``num_workers`` changed."""
        known = state.stream_states
        if known is None or state.batches or len(known) == self.workers:
            return state
        warn(
            f"the state contains the datasets' states of {len(known)} persistent workers, but "
            f"num_workers is {self.num_workers}. The datasets start without these states. To keep "
            f"them, pass num_workers={len(known)}",
        )
        return replace(state, stream_states=None)

    def rest(self, state: State) -> tuple[Any, int]:
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


class Indices:
    """Index sampler of a loader. Each pass over it is one epoch of the loader.

    Args:
        source: Source of the indices.
        progress: Progress of the loader, which each pass updates.
    """

    def __init__(self, source: Source, progress: Progress) -> None:
        self._source = source
        self._progress = progress

    def __iter__(self) -> IndexIterator:
        return IndexIterator(self._source, self._progress)

    def __len__(self) -> int:
        return len(self._source.index_sampler)


class IndexIterator:
    """One pass over a loader's index sampler, from its beginning or from a state.

    Attributes:
        epoch: How far the epoch has been delivered.
        position: Position in the epoch of the first sample of the last drawn batch.
        unread: Number of batches of a resumed stream to read and discard.
    """

    def __init__(self, source: Source, progress: Progress) -> None:
        self._source = source
        self._skip = self.unread = 0
        self._draws: Draws | None = None
        state = progress.pending
        begin = self._go_on(state) if progress.goes_on and state else self._begin(state)
        self.epoch = EpochProgress(progress, begin)
        # Computed once, because ``__next__`` needs it for every batch.
        self._stateful = source.has_states(self._inner)
        self._number = begin.batches
        self._end = begin.samples
        self._base = begin.place
        self.position = self._base + self._end
        self._asked = False
        progress.begin(self.epoch)

    def _begin(self, before: State | None) -> State:
        """Start a new epoch.

        Args:
            before: The loaded state, which is between two epochs; None if none is loaded.

        Returns:
            The state of the epoch at its start.
        """
        source = self._source
        begin = State(
            under_way=True,
            before_iter=Draws.now(source.generators),
            batch_size=source.batch_size,
            workers=source.workers,
            world_size=source.world_size,
            sampler_epoch=source.epoch,
            samplers=source.sampler_states(None),
            dataset=source.dataset_state,
        )
        self._inner = iter(source.index_sampler)
        if before is not None and before.base_seed is not None:
            begin = replace(begin, base_seed=before.base_seed, iteration=before.iteration + 1)
        if before is not None:
            begin = replace(begin, stream_states=before.stream_states)
        return begin

    def _go_on(self, state: State) -> State:
        """Resume an epoch.

        Args:
            state: The loaded state.

        Returns:
            The same state in terms of this loader's batches, streams and ranks.
        """
        source, sampler = self._source, self._source.index_sampler
        states = state.samplers or {}
        begin = state
        if source.streams:
            if not state.batches:
                begin = replace(
                    state, batch_size=source.batch_size, workers=source.workers, streams=None
                )
            if not (source.in_process and any(begin.stream_states or ())):
                self.unread = state.batches
                begin = replace(begin, batches=0, samples=0)
        elif not states:
            if state.world_size != source.world_size:
                begin = replace(
                    state,
                    offset=state.global_samples,
                    # Positions that seeds were made of must not be used again.
                    place=state.place + state.samples,
                    world_size=source.world_size,
                    batches=0,
                    samples=0,
                )
            sampler, self._skip = source.rest(begin)
            begin = replace(begin, batch_size=source.batch_size)
        source.load_sampler_states(states, between_epochs=not state.samples)
        with state.before_iter.repeated(source.generators):
            self._inner = iter(sampler)
        if "iterator" in states:
            self._inner.load_state_dict(copy.deepcopy(states["iterator"]))
        self._draws = state.before_first
        return begin

    def __iter__(self) -> IndexIterator:
        return self

    @property
    def whole_batches(self) -> bool:
        """Whether the number of batches in the epoch is the length of the sampler."""
        begin = self.epoch.begin
        size = begin.batch_size
        return not begin.offset and (size is None or begin.samples == begin.batches * size)

    @property
    def request(self) -> Any:
        """The request for one batch of a stream: None for each sample in the batch."""
        return next(self._inner)

    def __next__(self) -> Any:
        while True:
            indices = next(self._inner) if self._asked else self._first()
            self.position = self._base + self._end
            samples = _count(indices) if self._source.batched else 1
            self._end += samples
            states = self._source.sampler_states(self._inner) if self._stateful else None
            drawn = DrawnBatch(self._number, samples, self._end, states)
            self._number += 1
            if self.epoch.draw(drawn):
                return indices

    def _first(self) -> Any:
        self._asked = True
        own = self._source.generators
        if self._draws is None:
            self.epoch.before_first = Draws.now(own)
            return next(self._inner)
        known, told = self.epoch.begin.sampler_epoch, self._source.epoch
        if told != known:
            warn(
                f"load_state_dict resumes epoch {known} in its middle, but the sampler's epoch is "
                f"{told}. Some samples will come twice, and others not at all. Call "
                f"set_epoch({known})",
            )
        with self._draws.repeated(own):
            skipped = 0
            for _ in range(self._skip):
                skipped += _count(next(self._inner))
            if self._skip and skipped != self.epoch.begin.samples:
                raise ValueError(
                    f"the first {self._skip} batches of the batch_sampler have {skipped} indices, "
                    f"but the delivered batches had {self.epoch.begin.samples}. Resume the epoch "
                    "with the same batch_sampler"
                )
            return next(self._inner)


class _After:
    """The indices that a sampler yields after its first ``count`` indices."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        # Some samplers draw when their iterator is created. This creates it as early as torch.
        return itertools.islice(iter(self._sampler), self._count, None)


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
        everybody = copy.copy(self._sampler)
        everybody.num_replicas, everybody.rank = 1, 0
        everybody.num_samples = everybody.total_size = len(everybody.dataset)  # type: ignore[arg-type]
        rest = list(everybody)[self._offset :]
        ranks = self._sampler.num_replicas
        if self._sampler.drop_last:
            total = len(rest) // ranks * ranks
        else:
            total = math.ceil(len(rest) / ranks) * ranks
            rest = list(itertools.islice(itertools.cycle(rest), total))
        return iter(rest[self._sampler.rank : total : ranks])


def _ranks(world_size: int | None) -> str:
    return "no DistributedSampler" if world_size is None else f"world size {world_size}"


def _count(indices: Any) -> int:
    """Return the number of positions in the epoch that a batch takes."""
    try:
        return len(indices)
    except TypeError:  # torch only iterates over a batch; positions need not be dense
        return _UNCOUNTED
