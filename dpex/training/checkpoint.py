"""How far an epoch has been delivered, and how it goes on from there in another process.

An epoch's order follows from what the generators were about to draw when it began. So a state holds
these, and how many batches were delivered; going on means to draw the same order again and to leave
out its beginning: indices are drawn again, no sample is read again.
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
    """Where a loader stands, from its first iteration to its last."""

    def __init__(self) -> None:
        self._epoch: EpochProgress | None = None
        self._pending: State | None = None

    @property
    def pending(self) -> State | None:
        """The state that the next epoch goes on from."""
        return self._pending

    @property
    def epoch(self) -> EpochProgress | None:
        """The newest one."""
        return self._epoch

    @property
    def goes_on(self) -> bool:
        """Whether the next epoch has begun in another process."""
        return self._pending is not None and self._pending.under_way

    @property
    def seeded(self) -> bool:
        """Whether the next epoch's base_seed has been drawn before."""
        return self.goes_on or (self._pending is not None and self._pending.base_seed is not None)

    def begin(self, epoch: EpochProgress) -> None:
        """Note the newest epoch: the one that ``state_dict`` tells of."""
        self._epoch = epoch

    def delivered_from(self, epoch: EpochProgress) -> None:
        """Note that an epoch goes on: a loaded state has served its purpose."""
        if epoch is self._epoch:
            self._pending = None

    def state_dict(self, source: Source, *, persistent_workers: bool) -> dict[str, Any]:
        """Return where the newest epoch stands, as strings, numbers, lists and dicts.

        Args:
            source: What the loader draws indices from.
            persistent_workers: Whether its next epoch draws no base_seed.
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
            if source.in_process:  # it is read as it is now; workers read what it was
                state = replace(state, dataset=source.dataset_state)
        return state.plain()

    def load_state_dict(self, plain: Mapping[str, Any], source: Source) -> None:
        """Let the next epoch go on from a state; an empty one begins anew.

        Args:
            plain: What ``state_dict`` returned.
            source: What the loader draws indices from.

        Raises:
            ValueError: It is no state of this version, or of another dataset or sampler.
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
    """What ``state_dict`` returns.

    Attributes:
        under_way: Whether an epoch was.
        batches: Delivered ones, up to the first that was not.
        samples: In these.
        ahead: Numbers of batches delivered beyond, with ``in_order=False``.
        base_seed: Of the samples' seeds; None if the next epoch draws its own.
        iteration: How many epochs with this base_seed came before.
        offset: Samples of all ranks delivered before the number of ranks changed.
        place: Of the first sample since then, in what seeds are made of.
        batch_size: Of batches in which a sampler's indices come, where they all have it.
        workers: How many read the streams of an IterableDataset, one if there are none; None of a
            map-style dataset.
        world_size: Ranks that share the epoch; None without a DistributedSampler.
        sampler_epoch: What ``set_epoch`` was called with.
        length: Of the dataset, where it has one.
        before_iter: What was about to be drawn when the sampler's iterator was made.
        before_first: What was about to be drawn when it was first asked for a batch.
        samplers: States of samplers that have some, after the last of ``batches``.
        streams: How many batches of each worker's stream were delivered, of an IterableDataset.
        stream_states: Where each worker's stream stood then, if it can say so. Between two epochs,
            where those of persistent workers have ended.
        dataset: State of the dataset in the training process, if it has one and is map-style or
            read there.
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
        """Return it as strings, numbers, lists and dicts, and what the samplers returned."""
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
        """Make it from what ``plain`` returned."""
        # Accelerate adds something of its own.
        rest = {name: value for name, value in plain.items() if not name.startswith("_")}
        version = rest.pop("version", None)
        if version != _VERSION:
            raise ValueError(
                f"load_state_dict got a state of version {version!r}; this dpex reads version "
                f"{_VERSION}, as DpexDataLoader.state_dict() returns it. Its keys: {sorted(plain)}"
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
                "Pass what DpexDataLoader.state_dict() returned, as it was"
            ) from error

    @property
    def global_samples(self) -> int:
        """Samples that all ranks have delivered, this one's share being like the others'."""
        return self.offset + self.samples * (self.world_size or 1)


@dataclass
class DrawnBatch:
    """A batch of indices that was drawn and is not yet delivered.

    Attributes:
        number: Of the batch in its epoch.
        samples: How many are in it.
        end: Place in the epoch after its last sample.
        samplers: States of the samplers after it.
    """

    number: int
    samples: int
    end: int
    samplers: dict[str, Any] | None


@dataclass
class EpochProgress:
    """How far one epoch has been delivered.

    Attributes:
        owner: The loader's.
        begin: What is known of it at its beginning.
        base_seed: Of its samples' seeds, where they have any.
        iteration: How many epochs with this base_seed came before.
        finished: Whether it has been delivered to its end.
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
        """Delivered batches, up to the first that was not."""
        return self._batches

    @property
    def samples(self) -> int:
        """Delivered samples, from where it was begun or gone on with."""
        return self._delivered_samples

    @property
    def in_flight(self) -> int:
        """Batches that were drawn and are not yet delivered."""
        return len(self._drawn)

    def draw(self, drawn: DrawnBatch) -> bool:
        """Take note of a batch of indices.

        Returns:
            Whether it is still to be delivered.
        """
        if drawn.number in self._ahead:
            self._ahead.discard(drawn.number)
            self._finish(drawn)
            return False
        self._drawn[self._count] = drawn
        self._count += 1
        return True

    def deliver(self, count: int) -> None:
        """Take note that a batch was delivered.

        Args:
            count: How many batches were drawn before it, and were to be delivered.
        """
        drawn = self._drawn.pop(count)
        self._delivered_samples += drawn.samples
        self._finish(drawn)
        self.owner.delivered_from(self)

    def begin_streams(
        self, num_workers: int, delivered: int
    ) -> tuple[list[int], list[tuple[int, bytes] | None]]:
        """Begin to read a stream for each worker, or go on with them.

        Args:
            num_workers: Number of workers.
            delivered: Batches of all of them.

        Returns:
            For each worker, how many batches have been delivered; and what its stream goes on
            from, if anything: after how many batches, and the packed state.

        Raises:
            ValueError: The epoch was begun by torch's workers.
        """
        known = self.begin.streams
        if known is None and delivered:
            raise ValueError(
                f"the state is of an IterableDataset without distribute_mode: how many of its "
                f"{delivered} batches each worker made is not known. Go on without it, until the "
                "epoch's end"
            )
        self._streams = list(known or [0] * num_workers)
        self._batches = sum(self._streams)
        states = self.begin.stream_states or [None] * num_workers
        begins = [None if s is None else (s.batches, s.packed()) for s in states]
        self._stream_states = {w: begin[1] for w, begin in enumerate(begins) if begin}
        return list(self._streams), begins

    def deliver_stream(self, worker: int, samples: int, state: bytes | None) -> None:
        """Take note that a batch of a worker's stream was delivered.

        Args:
            worker: Whose.
            samples: How many are in it.
            state: Where the stream stands after it, packed, if it can say so.
        """
        assert self._streams is not None
        self._streams[worker] += 1
        self._batches += 1
        self._delivered_samples += samples
        if state is not None:
            self._stream_states[worker] = state
        self.owner.delivered_from(self)

    def end_stream(self, worker: int, state: bytes | None) -> None:
        """Record that a worker's stream has ended.

        Args:
            worker: The worker.
            state: The packed state of the stream at its end; None if it has none, or was recorded.
        """
        if state is not None:
            self._states_at_end[worker] = state

    def read_here(self, fetcher: Any) -> None:
        """Record the ``_IterableDatasetFetcher`` that reads the stream in this process."""
        self._fetcher = fetcher

    @property
    def states_at_end(self) -> tuple[StreamState | None, ...] | None:
        """The states with which the workers' datasets begin the next epoch, if they have any."""
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
        """Take note that the next batch was delivered, or an error in its place."""
        if self._drawn:  # if not, it is the sampler's error
            self.deliver(min(self._drawn))

    def _finish(self, drawn: DrawnBatch) -> None:
        self._done[drawn.number] = drawn
        while (last := self._done.pop(self._batches, None)) is not None:
            self._batches += 1
            self._samples = last.end
            self._samplers = last.samplers

    def finish(self) -> None:
        """Take note that the epoch has been delivered to its end."""
        self.finished = True
        self._fetcher = None
        self.owner.delivered_from(self)

    def state(self, length: int | None) -> State:
        """Return where it stands."""
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
