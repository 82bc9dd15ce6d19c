"""Indices of a loader's epochs: of a new epoch, or of the rest of a resumed epoch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from dpex.compat.untraced import untraced
from dpex.log import warn
from dpex.training.checkpoint import DrawnBatch, EpochProgress, Progress
from dpex.training.index_source import IndexSource
from dpex.training.resume_state import ResumeState
from dpex.worker.rng_state import Draws
from dpex.worker.stateful import give_state

__all__ = ["IndexIterator", "IndexSampler"]

# Number of positions in the epoch that a batch of unknown length takes.
_UNCOUNTED = 1 << 20


class IndexSampler:
    """Index sampler of a loader. Each pass over it is one epoch of the loader.

    Args:
        source: Source of the indices.
        progress: Progress of the loader, which each pass updates.
    """

    def __init__(self, source: IndexSource, progress: Progress) -> None:
        self._source = source
        self._progress = progress

    @untraced
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

    def __init__(self, source: IndexSource, progress: Progress) -> None:
        self._source = source
        self._skip = self.unread = 0
        self._draws: Draws | None = None
        state = progress.pending
        begin = self._resume(state) if progress.resumes and state else self._begin(state)
        self.epoch = EpochProgress(progress, begin)
        # Computed once, because ``__next__`` needs it for every batch.
        self._stateful = source.has_states(self._inner)
        self._number = begin.batches
        self._end = begin.samples
        self._base = begin.place
        self.position = self._base + self._end
        self._asked = False
        progress.begin(self.epoch)

    def _begin(self, before: ResumeState | None) -> ResumeState:
        """Start a new epoch.

        Args:
            before: The loaded state, which is between two epochs; None if none is loaded.

        Returns:
            The state of the epoch at its start.
        """
        source = self._source
        begin = ResumeState(
            in_progress=True,
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

    def _resume(self, state: ResumeState) -> ResumeState:
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
            read = 0
            if source.in_process and begin.stream_states and begin.stream_states[0] is not None:
                read = begin.stream_states[0].batches
            self.unread = state.batches - read
            begin = replace(begin, batches=read, samples=read * (begin.batch_size or 1))
        else:
            if not states and state.world_size != source.world_size:
                begin = replace(
                    state,
                    offset=state.global_samples,
                    # Positions that seeds were made of must not be used again.
                    place=state.place + state.samples,
                    world_size=source.world_size,
                    batches=0,
                    samples=0,
                    resized=None,
                )
            if not states:
                sampler, self._skip = source.rest(begin)
            if state.batch_size != source.batch_size:
                resized = (begin.batches, begin.samples) if begin.batches else None
                begin = replace(begin, batch_size=source.batch_size, resized=resized)
        source.load_sampler_states(states, between_epochs=not state.samples)
        with state.before_iter.repeated(source.generators):
            self._inner = iter(sampler)
        if "iterator" in states:
            give_state(self._inner, states["iterator"])
        self._draws = state.before_first
        return begin

    def __iter__(self) -> IndexIterator:
        return self

    @property
    def whole_batches(self) -> bool:
        """Whether the number of batches in the epoch is the length of the sampler."""
        begin = self.epoch.begin
        size = begin.batch_size
        whole = begin.resized is None if size is None else begin.samples == begin.batches * size
        return not begin.offset and whole

    def next_request(self) -> Any:
        """Draw the request for one batch of a stream: None for each sample in the batch."""
        return next(self._inner)

    @untraced
    def __next__(self) -> Any:
        while True:
            indices = next(self._inner) if self._asked else self._first()
            self.position = self._base + self._end
            samples = _count(indices) if self._source.batched else 1
            self._end += samples
            states = self._source.sampler_states(self._inner) if self._stateful else None
            known = 0 if samples == _UNCOUNTED else samples
            drawn = DrawnBatch(self._number, known, self._end, states)
            self._number += 1
            if self.epoch.draw(drawn):
                return indices

    def _first(self) -> Any:
        self._asked = True
        own = self._source.generators
        if self._draws is None:
            self.epoch.before_first = Draws.now(own)
            return next(self._inner)
        saved, current = self.epoch.begin.sampler_epoch, self._source.epoch
        if current != saved:
            warn(
                f"load_state_dict resumes epoch {saved} in its middle, but the sampler's epoch is "
                f"{current}. Some samples will come twice, and others not at all. Call "
                f"set_epoch({saved})",
            )
        with self._draws.repeated(own):
            self._skip_batches()
            return next(self._inner)

    def _skip_batches(self) -> None:
        """Skip the delivered batches of a ``batch_sampler``.

        Raises:
            ValueError: They have another number of indices than the delivered batches had.
        """
        skipped = batches = 0
        for indices in itertools.islice(self._inner, self._skip):
            batches += 1
            skipped += _count(indices)
        if self._skip and (batches, skipped) != (self._skip, self.epoch.begin.samples):
            raise ValueError(
                f"the first {batches} batches of the batch_sampler have {skipped} indices, but the "
                f"{self._skip} delivered batches had {self.epoch.begin.samples}. Resume the epoch "
                "with the same batch_sampler"
            )


def _count(indices: Any) -> int:
    """Return the number of positions in the epoch that a batch takes."""
    try:
        return len(indices)
    except TypeError:  # torch only iterates over a batch; positions need not be dense
        return _UNCOUNTED
