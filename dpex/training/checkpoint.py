"""Resume state: how far an epoch has been delivered, and how another process resumes it.

The order of an epoch follows from the states of the generators at its start. A resume state holds
those states and the number of delivered batches. To resume, dpex redraws the same order and skips
the delivered batches. It redraws indices, but does not read the skipped samples of a map-style
dataset. A stream without a state of its own is read again from its beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dpex.worker.rng_state import Draws
from dpex.worker.stateful import StreamState

if TYPE_CHECKING:
    from dpex.training.index_iterator import Source

__all__ = ["DrawnBatch", "EpochProgress", "Progress", "State"]

_VERSION = 1


class Progress:
    """Progress of a loader, from its first iteration to its last."""

    def __init__(self) -> None:
        self._epoch: EpochProgress | None = None
        self._pending: State | None = None

    @property
    def pending(self) -> State | None:
        """The loaded state that the next epoch uses, or None."""
        return self._pending

    @property
    def epoch(self) -> EpochProgress | None:
        """The newest epoch, or None if none has started since ``load_state_dict``."""
        return self._epoch

    @property
    def goes_on(self) -> bool:
        """Whether the next epoch resumes an epoch that was in progress."""
        return self._pending is not None and self._pending.under_way

    @property
    def seeded(self) -> bool:
        """Whether the next epoch's base_seed was drawn before the state was saved."""
        return self.goes_on or (self._pending is not None and self._pending.base_seed is not None)

    def begin(self, epoch: EpochProgress) -> None:
        """Set the newest epoch, whose state ``state_dict`` returns."""
        self._epoch = epoch

    def delivered_from(self, epoch: EpochProgress) -> None:
        """Drop the loaded state once the newest epoch has delivered a batch or ended."""
        if epoch is self._epoch:
            self._pending = None

    def state_dict(self, source: Source, *, persistent_workers: bool) -> dict[str, Any]:
        """Return the state of the newest epoch as strings, numbers, lists and dicts.

        Args:
            source: Source of the loader's indices.
            persistent_workers: Whether workers are persistent, so that the next epoch draws no
                base_seed.
        """
        if self._epoch is None and self._pending is not None:
            return self._pending.plain()
        epoch = self._epoch
        if epoch is None or epoch.finished:
            stays = epoch if persistent_workers else None
            state = State(
                under_way=False,
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
        return state.plain()

    def load_state_dict(self, plain: Mapping[str, Any], source: Source) -> None:
        """Load the state from which the next epoch resumes.

        Args:
            plain: Result of ``state_dict``. If it is empty, the next epoch is a new one.
            source: Source of the loader's indices.

        Raises:
            ValueError: ``plain`` is not a state of this version, or it belongs to another dataset
                or sampler.
        """
        self._epoch = None
        self._pending = None
        if plain:
            state = State.from_plain(plain)
            source.check(state)
            state = source.fitting(state)
            if state.dataset is not None:
                source.dataset.load_state_dict(copy.deepcopy(state.dataset))
            self._pending = state
            if not state.under_way:
                source.load_sampler_states(state.samplers, between_epochs=True)
                state.before_iter.give(source.generators)
            elif state.sampler_epoch is not None:
                source.set_epoch(state.sampler_epoch)


@dataclass(frozen=True)
class State:
    """The resume state that ``state_dict`` returns.

    Attributes:
        under_way: Whether an epoch is in progress; False between two epochs.
        batches: Number of batches delivered before the first undelivered one.
        samples: Number of samples in ``batches``.
        ahead: Numbers of the batches delivered after the first undelivered one, with
            ``in_order=False``.
        base_seed: Base of the samples' seeds; None if the next epoch draws its own.
        iteration: Number of earlier epochs with this base_seed.
        offset: Number of samples that all ranks delivered before the number of ranks changed.
        place: Position of the first sample after that change, as ``sample_seed`` counts positions.
        batch_size: Number of samples in each batch of the sampler; None if it varies.
        workers: Number of streams of an IterableDataset: ``num_workers``, or 1 if that is 0. None
            for a map-style dataset.
        world_size: Number of ranks that share the epoch; None without a DistributedSampler.
        sampler_epoch: Epoch number that ``set_epoch`` set.
        length: Length of the dataset, if it has one.
        before_iter: Generator states before the sampler's iterator was created.
        before_first: Generator states before the first batch was drawn from that iterator.
        samplers: States of the samplers that have one, after the last of ``batches``.
        streams: Number of delivered batches of each logical worker's stream, for an
            IterableDataset.
        stream_states: State of each logical worker's stream after these batches, if it has one.
            Between two epochs: the states in which the streams of persistent workers ended.
        dataset: State of the dataset in the training process, if it has one. Only for a map-style
            dataset, or if the training process reads the dataset.
    """

    under_way: bool
    before_iter: Draws
    batches: int = 0
    samples: int = 0
    ahead: tuple[int, ...] = ()
    base_seed: int | None = None
    iteration: int = -1
    offset: int = 0
    place: int = 0
    batch_size: int | None = None
    workers: int | None = None
    world_size: int | None = None
    sampler_epoch: int | None = None
    length: int | None = None
    before_first: Draws | None = None
    samplers: dict[str, Any] | None = None
    streams: tuple[int, ...] | None = None
    stream_states: tuple[StreamState | None, ...] | None = None
    dataset: Any = None

    def plain(self) -> dict[str, Any]:
        """Return the state as strings, numbers, lists and dicts.

        The states that samplers, datasets and iterators returned stay as they are.
        """
        return {
            "version": _VERSION,
            **vars(self),
            "ahead": list(self.ahead),
            "streams": None if self.streams is None else list(self.streams),
            "stream_states": self.stream_states and [s and s.plain() for s in self.stream_states],
            "before_iter": self.before_iter.plain(),
            "before_first": self.before_first and self.before_first.plain(),
            "samplers": copy.deepcopy(self.samplers),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> State:
        """Rebuild a state from the result of ``plain``."""
        # Accelerate adds keys that begin with an underscore.
        rest = {name: value for name, value in plain.items() if not name.startswith("_")}
        version = rest.pop("version", None)
        if version != _VERSION:
            raise ValueError(
                f"load_state_dict got a state of version {version!r}, but this dpex reads version "
                f"{_VERSION}. Pass a state that state_dict() of a DpexDataLoader returned. The "
                f"keys of this state: {sorted(plain)}"
            )
        try:
            first, streams = rest["before_first"], rest["stream_states"]
            return cls(
                **{
                    **rest,
                    "ahead": tuple(rest["ahead"]),
                    "streams": None if rest["streams"] is None else tuple(rest["streams"]),
                    "stream_states": streams
                    and tuple(s and StreamState.from_plain(s) for s in streams),
                    "before_iter": Draws.from_plain(rest["before_iter"]),
                    "before_first": None if first is None else Draws.from_plain(first),
                    "samplers": copy.deepcopy(rest["samplers"]),
                    "dataset": copy.deepcopy(rest["dataset"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_state_dict got a state that is damaged ({type(error).__name__}: {error}). "
                "Pass the result of DpexDataLoader.state_dict() unchanged"
            ) from error

    @property
    def global_samples(self) -> int:
        """Number of samples that all ranks delivered, if each delivered as many as this rank."""
        return self.offset + self.samples * (self.world_size or 1)


@dataclass
class DrawnBatch:
    """A batch of indices that is drawn but not delivered.

    Attributes:
        number: Number of the batch in its epoch.
        samples: Number of samples in the batch.
        end: Position in the epoch after its last sample.
        samplers: States of the samplers after the batch was drawn.
    """

    number: int
    samples: int
    end: int
    samplers: dict[str, Any] | None


@dataclass
class EpochProgress:
    """How far one epoch has been delivered.

    Attributes:
        owner: Progress of the loader.
        begin: State of the epoch when this process started or resumed it.
        base_seed: Base of the samples' seeds, if they are seeded.
        iteration: Number of earlier epochs with this base_seed.
        finished: Whether the epoch has been delivered to its end.
    """

    owner: Progress
    begin: State
    base_seed: int | None = None
    iteration: int = 0
    finished: bool = False
    _batches: int = 0
    _samples: int = 0
    _samplers: dict[str, Any] | None = None
    _drawn: dict[int, DrawnBatch] = field(default_factory=dict)
    _done: dict[int, DrawnBatch] = field(default_factory=dict)
    _ahead: set[int] = field(default_factory=set)
    _count: int = 0
    _delivered_samples: int = 0
    _streams: list[int] | None = None
    _stream_states: dict[int, bytes] = field(default_factory=dict)
    _states_at_end: dict[int, bytes] = field(default_factory=dict)
    _fetcher: Any = None

    def __post_init__(self) -> None:
        self._batches, self._samples = self.begin.batches, self.begin.samples
        self._samplers = self.begin.samplers
        self._ahead = set(self.begin.ahead)
        self.base_seed, self.iteration = self.begin.base_seed, self.begin.iteration
        self.before_first = self.begin.before_first

    @property
    def batches(self) -> int:
        """Number of batches delivered before the first undelivered one."""
        return self._batches

    @property
    def samples(self) -> int:
        """Number of samples delivered since the epoch was started or resumed."""
        return self._delivered_samples

    @property
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
        self._delivered_samples += drawn.samples
        self._finish(drawn)
        self.owner.delivered_from(self)

    def begin_streams(
        self, num_workers: int, delivered: int
    ) -> tuple[list[int], list[tuple[int, bytes] | None]]:
        """Start or resume the stream of each logical worker.

        Args:
            num_workers: Number of logical workers.
            delivered: Number of batches that all streams together have delivered.

        Returns:
            Two lists with an item for each logical worker. The first holds the number of delivered
            batches. The second holds the state from which the stream resumes, if there is one: the
            number of batches before it, and the packed state.

        Raises:
            ValueError: The first part of the epoch was read without ``distribute_mode``.
        """
        known = self.begin.streams
        if known is None and delivered:
            raise ValueError(
                f"the state of an IterableDataset was saved without distribute_mode. It does not "
                f"say how many of its {delivered} batches each worker made. Finish this epoch "
                "without distribute_mode"
            )
        self._streams = list(known or [0] * num_workers)
        self._batches = sum(self._streams)
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
        self._batches += 1
        self._delivered_samples += samples
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
        state = StreamState.of(self._fetcher, self._batches)
        return None if state is None else (StreamState.unpacked(state),)

    def _unpacked(self, states: Mapping[int, bytes]) -> tuple[StreamState | None, ...] | None:
        if not states or self._streams is None:
            return None
        known = map(states.get, range(len(self._streams)))
        return tuple(None if s is None else StreamState.unpacked(s) for s in known)

    def deliver_next(self) -> None:
        """Record that the next batch, or an error in its place, was delivered."""
        if self._drawn:  # if no batch is drawn, the sampler raised the error
            self.deliver(min(self._drawn))

    def _finish(self, drawn: DrawnBatch) -> None:
        self._done[drawn.number] = drawn
        while (last := self._done.pop(self._batches, None)) is not None:
            self._batches += 1
            self._samples = last.end
            self._samplers = last.samplers

    def finish(self) -> None:
        """Record that the epoch has been delivered to its end."""
        self.finished = True
        self._fetcher = None
        self.owner.delivered_from(self)

    def state(self, length: int | None) -> State:
        """Return the resume state of the epoch."""
        return State(
            under_way=True,
            batches=self._batches,
            samples=self._samples,
            ahead=tuple(sorted({*self._done, *self._ahead})),
            base_seed=self.base_seed,
            iteration=self.iteration,
            offset=self.begin.offset,
            place=self.begin.place,
            batch_size=self.begin.batch_size,
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
