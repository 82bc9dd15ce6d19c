"""Resume state: how far an epoch has been delivered, and how another process resumes it.

The order of an epoch follows from the states of the generators at its start. A resume state holds
those states and the number of delivered batches. To resume, dpex redraws the same order and skips
the delivered batches. It redraws indices, but does not read the skipped samples of a map-style
dataset. A stream without a state of its own is read again from its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpex.worker.rng_state import Draws
from dpex.worker.stateful import StreamState

__all__ = ["ResumeState"]


@dataclass(frozen=True)
class ResumeState:
    """Contents of the dict that ``state_dict`` returns.

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
        resized: Numbers of the batches and samples delivered before ``batch_size`` last changed;
            None if it did not change in this epoch.
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
    resized: tuple[int, int] | None = None
    workers: int | None = None
    world_size: int | None = None
    sampler_epoch: int | None = None
    length: int | None = None
    before_first: Draws | None = None
    samplers: dict[str, Any] | None = None
    streams: tuple[int, ...] | None = None
    stream_states: tuple[StreamState | None, ...] | None = None
    dataset: Any = None

    @property
    def delivered(self) -> bool:
        """Whether any batch of the epoch was delivered."""
        return bool(self.batches or self.ahead or self.offset)

    @property
    def global_samples(self) -> int:
        """Number of samples that all ranks delivered, if each delivered as many as this rank."""
        return self.offset + self.samples * (self.world_size or 1)
