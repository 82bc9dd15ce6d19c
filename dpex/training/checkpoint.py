"""Progress of a loader and of its epochs, from which ``state_dict`` makes a resume state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpex.compat.untraced import untraced
from dpex.training.index_source import IndexSource
from dpex.training.resume_state import ResumeState
from dpex.training.state_fit import fitted
from dpex.training.state_schema import dump_state, load_state
from dpex.worker.rng_state import Draws
from dpex.worker.stateful import StreamState, give_state, state_of

__all__ = ["DrawnBatch", "EpochProgress", "Progress"]


class Progress:
    """Progress of a loader, from its first iteration to its last.

    Attributes:
        pending: The loaded state that the next epoch uses, or None.
        fresh_stream: State of the dataset before dpex loaded one, in a list. Empty if dpex has
            loaded no state into a dataset that the training process reads.
        stream_at_end: State at the end of the last epoch of such a dataset.
    """

    def __init__(self, pending: ResumeState | None = None) -> None:
        self._epoch: EpochProgress | None = None
        self.pending = pending
        self.fresh_stream: list[Any] = []
        self.stream_at_end: StreamState | None = None

    @property
    def resumes(self) -> bool:
        """Whether the next epoch resumes an epoch that was in progress."""
        return self.pending is not None and self.pending.in_progress

    @property
    def seeded(self) -> bool:
        """Whether the next epoch's base_seed was drawn before the state was saved."""
        return self.resumes or (self.pending is not None and self.pending.base_seed is not None)

    @property
    def draws_base_seed(self) -> bool:
        """Whether the next epoch draws a base_seed after it has loaded the generators' states.

        The training process draws it between ``before_iter`` and ``before_first`` if it makes the
        batches itself, and does not save it.
        """
        state = self.pending
        return state is not None and state.base_seed is None and state.before_first is None

    def begin(self, epoch: EpochProgress) -> None:
        """Set the newest epoch, whose state ``state_dict`` returns."""
        self._epoch = epoch

    def delivered_from(self, epoch: EpochProgress) -> None:
        """Drop the loaded state once the newest epoch has delivered a batch or ended."""
        if epoch is self._epoch:
            self.pending = None

    def note_fresh_stream(self, dataset: Any) -> None:
        """Record a dataset's state before dpex loads the first state into it."""
        self.fresh_stream = self.fresh_stream or [state_of(dataset)]

    @contextlib.contextmanager
    def rereading(self) -> Iterator[None]:
        """Keep the loaded state in the block, though batches are delivered."""
        pending = self.pending
        try:
            yield
        finally:
            self.pending = pending

    def state_dict(self, source: IndexSource, *, persistent_workers: bool) -> dict[str, Any]:
        """Return the state of the newest epoch as strings, numbers, lists and dicts.

        Args:
            source: Source of the loader's indices.
            persistent_workers: Whether workers are persistent, so that the next epoch draws no
                base_seed.
        """
        if self._epoch is None and self.pending is not None:
            return dump_state(self.pending)
        epoch = self._epoch
        if epoch is None or epoch.finished:
            stays = epoch if persistent_workers else None
            state = ResumeState(
                in_progress=False,
                base_seed=stays.base_seed if stays else None,
                iteration=epoch.iteration if epoch else -1,
                length=source.length,
                before_iter=Draws.now(source.generators),
                samplers=source.sampler_states(None),
                stream_states=stays.states_at_end if stays else None,
                dataset=source.dataset_state_between_epochs,
            )
        else:
            state = epoch.state(source.length)
            # The training process reads the dataset as it is now. Workers read the copy that was
            # made at the start of the epoch.
            if source.in_process:
                state = replace(state, dataset=source.dataset_state)
        return dump_state(state)

    def load_state_dict(self, plain: Mapping[str, Any], source: IndexSource) -> None:
        """Load the state from which the next epoch resumes.

        Args:
            plain: Result of ``state_dict``. If it is empty, the next epoch is a new one.
            source: Source of the loader's indices.

        Raises:
            TypeError: ``plain`` or one of its fields has another type than ``state_dict`` returns.
            ValueError: ``plain`` is not as ``state_dict`` returned it, or it belongs to another
                dataset or sampler. Then nothing has changed.
        """
        # ``load_state`` refuses an argument that is not a dict, even an empty one such as [].
        discards = isinstance(plain, Mapping) and not plain
        state = None if discards else fitted(load_state(plain), source)
        if state is not None:
            with contextlib.ExitStack() as undo:
                self._give(state, source, undo)
                undo.pop_all()  # nothing was raised
        self._epoch, self.pending = None, state

    def _give(self, state: ResumeState, source: IndexSource, undo: contextlib.ExitStack) -> None:
        """Load a state into dataset, samplers and generators.

        Args:
            state: The state.
            source: Source of the loader's indices.
            undo: Gets functions that restore what was changed.
        """
        undo.callback(Draws.now(source.generators).give, source.generators)
        if state.dataset is not None:
            if source.streams:
                undo.callback(setattr, self, "fresh_stream", self.fresh_stream)
                self.note_fresh_stream(source.dataset)
            if (before := state_of(source.dataset)) is not None:
                undo.callback(give_state, source.dataset, before)
            give_state(source.dataset, state.dataset)
        if not state.in_progress:
            samplers = source.sampler_states(None)
            undo.callback(source.load_sampler_states, samplers, between_epochs=False)
            source.load_sampler_states(state.samplers, between_epochs=True)
            state.before_iter.give(source.generators)
        elif state.sampler_epoch is not None:
            source.set_epoch(state.sampler_epoch)


@dataclass
class DrawnBatch:
    """A batch of indices that is drawn but not delivered.

    Attributes:
        number: Number of the batch in its epoch.
        samples: Number of samples in the batch; 0 if it is unknown.
        end: Position in the epoch after its last sample.
        samplers: States of the samplers after the batch was drawn.
    """

    number: int
    samples: int
    end: int
    samplers: dict[str, Any] | None


class EpochProgress:
    """How far one epoch has been delivered.

    Args:
        owner: Progress of the loader.
        begin: State of the epoch when this process started or resumed it.

    Attributes:
        base_seed: Base of the samples' seeds, if they are seeded.
        iteration: Number of earlier epochs with this base_seed.
        before_first: Generator states before the first batch of indices was drawn.
        finished: Whether the epoch has been delivered to its end.
        batches: Number of batches delivered before the first undelivered one.
        samples_delivered: Number of samples delivered since the epoch was started or resumed.
    """

    def __init__(self, owner: Progress, begin: ResumeState) -> None:
        self.owner = owner
        self.begin = begin
        self.base_seed, self.iteration = begin.base_seed, begin.iteration
        self.before_first = begin.before_first
        self.finished = False
        self.samples_delivered = 0
        self.batches, self._samples = begin.batches, begin.samples
        self._samplers = begin.samplers
        self._drawn: dict[int, DrawnBatch] = {}
        self._done: dict[int, DrawnBatch] = {}
        self._ahead = set(begin.ahead)
        self._count = 0
        self._streams: list[int] | None = None
        self._stream_states: dict[int, bytes] = {}
        self._states_at_end: dict[int, bytes] = {}
        self._fetcher: Any = None

    @property
    @untraced
    def in_flight(self) -> int:
        """Number of batches that are drawn but not delivered."""
        return len(self._drawn)

    def draw(self, drawn: DrawnBatch) -> bool:
        """Record a batch of indices.

        Returns:
            Whether the batch must still be delivered: False if it was delivered before the resume.
        """
        if drawn.number in self._ahead:
            self._ahead.discard(drawn.number)
            self._finish(drawn)
            return False
        self._drawn[self._count] = drawn
        self._count += 1
        return True

    def deliver(self, count: int) -> None:
        """Record that a batch was delivered.

        Args:
            count: Index of the batch among those for which ``draw`` returned True.
        """
        drawn = self._drawn.pop(count)
        self.samples_delivered += drawn.samples
        self._finish(drawn)
        self.owner.delivered_from(self)

    def begin_streams(self, num_workers: int) -> tuple[list[int], list[tuple[int, bytes] | None]]:
        """Start or resume the stream of each logical worker.

        Args:
            num_workers: Number of logical workers.

        Returns:
            Two lists with an item for each logical worker. The first holds the number of delivered
            batches. The second holds the state from which the stream resumes, if there is one: the
            number of batches before it, and the packed state.
        """
        known = self.begin.streams
        self._streams = list(known or [0] * num_workers)
        self.batches = sum(self._streams)
        states = self.begin.stream_states or [None] * num_workers
        begins = [None if s is None else (s.batches, s.packed()) for s in states]
        self._stream_states = {w: begin[1] for w, begin in enumerate(begins) if begin}
        return list(self._streams), begins

    def deliver_stream(self, worker: int, samples: int, state: bytes | None) -> None:
        """Record that a batch of a logical worker's stream was delivered.

        Args:
            worker: The logical worker.
            samples: Number of samples in the batch.
            state: The packed state of the stream after the batch, if the stream has one.
        """
        assert self._streams is not None
        self._streams[worker] += 1
        self.batches += 1
        self.samples_delivered += samples
        if state is not None:
            self._stream_states[worker] = state
        self.owner.delivered_from(self)

    def end_stream(self, worker: int, state: bytes | None) -> None:
        """Record that a logical worker's stream has ended.

        Args:
            worker: The logical worker.
            state: The packed state of the stream at its end; None if the stream has no state, or
                if the state was recorded before.
        """
        if state is not None:
            self._states_at_end[worker] = state

    def read_here(self, fetcher: Any) -> None:
        """Record the ``_IterableDatasetFetcher`` that reads the stream in this process."""
        self._fetcher = fetcher

    @property
    def states_at_end(self) -> tuple[StreamState | None, ...] | None:
        """States with which the workers' datasets start the next epoch, or None."""
        states = self._unpacked(self._states_at_end)
        return states and tuple(state and state.at_end_of_epoch() for state in states)

    def _states_of_streams(self) -> tuple[StreamState | None, ...] | None:
        if self._fetcher is None:
            return self._unpacked(self._stream_states)
        here = self._state_here()
        return None if here is None else (here,)

    def _state_here(self) -> StreamState | None:
        """Return the state of the stream that this process reads, or None if it has none."""
        state = StreamState.of(self._fetcher, self.batches)
        return None if state is None else StreamState.unpacked(state)

    def _unpacked(self, states: Mapping[int, bytes]) -> tuple[StreamState | None, ...] | None:
        if not states or self._streams is None:
            return None
        known = map(states.get, range(len(self._streams)))
        return tuple(None if s is None else StreamState.unpacked(s) for s in known)

    @untraced
    def deliver_next(self) -> None:
        """Record that the next batch, or an error in its place, was delivered."""
        if self._drawn:  # if no batch is drawn, the sampler raised the error
            self.deliver(min(self._drawn))

    def _finish(self, drawn: DrawnBatch) -> None:
        self._done[drawn.number] = drawn
        while (last := self._done.pop(self.batches, None)) is not None:
            self.batches += 1
            self._samples = last.end
            self._samplers = last.samplers

    @untraced
    def finish(self) -> None:
        """Record that the epoch has been delivered to its end."""
        self.finished = True
        if self.owner.fresh_stream and self._fetcher is not None:
            ended = self._state_here()
            self.owner.stream_at_end = ended and ended.at_end_of_epoch()
        self._fetcher = None
        self.owner.delivered_from(self)

    def state(self, length: int | None) -> ResumeState:
        """Return the resume state of the epoch."""
        return ResumeState(
            in_progress=True,
            batches=self.batches,
            samples=self._samples,
            ahead=tuple(sorted({*self._done, *self._ahead})),
            base_seed=self.base_seed,
            iteration=self.iteration,
            offset=self.begin.offset,
            place=self.begin.place,
            batch_size=self.begin.batch_size,
            resized=self.begin.resized,
            workers=self.begin.workers,
            world_size=self.begin.world_size,
            sampler_epoch=self.begin.sampler_epoch,
            length=length,
            before_iter=self.begin.before_iter,
            before_first=self.before_first,
            samplers=self._samplers,
            streams=None if self._streams is None else tuple(self._streams),
            stream_states=self._states_of_streams(),
            dataset=self.begin.dataset,
        )
