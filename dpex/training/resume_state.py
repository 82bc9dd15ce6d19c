"""Resume state: how far an epoch has been delivered, and how another process resumes it.

The order of an epoch follows from the states of the generators at its start. A resume state holds
those states and the number of delivered batches. To resume, dpex redraws the same order and skips
the delivered batches. It redraws indices, but does not read the skipped samples of a map-style
dataset. A stream without a state of its own is read again from its beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpex.worker.rng_state import Draws
from dpex.worker.stateful import StreamState

__all__ = ["ResumeState"]

_VERSION = 1


@dataclass(frozen=True)
class ResumeState:
    """The resume state that ``state_dict`` returns.

    Attributes:
        in_progress: Whether an epoch is in progress; False between two epochs.
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
        world_size: Number of ranks that share the epoch; None if no sampler divides it.
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

    in_progress: bool
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

    def to_dict(self) -> dict[str, Any]:
        """Return the state as strings, numbers, lists and dicts.

        The states that samplers, datasets and iterators returned stay as they are.
        """
        return {
            "version": _VERSION,
            **vars(self),
            "ahead": list(self.ahead),
            "streams": None if self.streams is None else list(self.streams),
            "stream_states": self.stream_states and [s and s.to_dict() for s in self.stream_states],
            "before_iter": self.before_iter.to_dict(),
            "before_first": self.before_first and self.before_first.to_dict(),
            "samplers": copy.deepcopy(self.samplers),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ResumeState:
        """Rebuild a state.

        Args:
            plain: Result of ``to_dict``.

        Raises:
            ValueError: ``plain`` is not a state of this version, or is damaged.
        """
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
                    and tuple(s and StreamState.from_dict(s) for s in streams),
                    "before_iter": Draws.from_dict(rest["before_iter"]),
                    "before_first": None if first is None else Draws.from_dict(first),
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
