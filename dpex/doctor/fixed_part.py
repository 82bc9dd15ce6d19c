"""The first part of a sample that is the same every time, so that it can be cached."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

from dpex.datasets.cache import Cached
from dpex.datasets.vision import from_torchvision
from dpex.transforms.chain import Chain
from dpex.transforms.mapped import MappedDataset
from dpex.transforms.splitting import is_random
from dpex.wire.pickling import dump_in_band
from dpex.worker.seeding import generator_states, own_seeds_are, seed_generators

__all__ = ["FixedPart", "RandomSample", "fixed_part"]

_SAMPLES_TRIED = 8


@dataclass(frozen=True)
class FixedPart:
    """The dataset's own reading, and the transforms after it that give the same result every time.

    Attributes:
        transforms: Names of these transforms.
        has_chain: Whether the dataset's transforms are known. If not, the part is a whole sample.
        later_transforms: Number of the other transforms.
        samples: Number of samples that were made with two seeds.
        make_s: Time to make this part of a sample.
        load_s: Time to unpickle it, which a cache does.
        size_bytes: Size of its pickle.
    """

    transforms: tuple[str, ...]
    has_chain: bool
    later_transforms: int
    samples: int
    make_s: float
    load_s: float
    size_bytes: float


@dataclass(frozen=True)
class RandomSample:
    """A whole sample that differs with the seed, of a dataset whose transforms dpex cannot see."""


@dataclass(frozen=True)
class _Made:
    """A sample after one more step."""

    seconds: float
    drew: bool
    pickled: bytes


def fixed_part(
    dataset: Any, indices: Iterable[Any], *, until: float
) -> FixedPart | RandomSample | None:
    """Make samples twice, with different seeds, and return the part that does not differ.

    A part that draws from a global generator counts as different, as ``cached`` requires.

    Args:
        dataset: A map-style dataset.
        indices: Indices of samples to try, in this order.
        until: Value of ``time.perf_counter()`` after which no further sample is made.

    Returns:
        The part; None if there is none, if a sample raises or cannot be pickled, or if it is cached
        already.
    """
    while type(dataset) is Subset:
        indices = map(dataset.indices.__getitem__, indices)
        dataset = dataset.dataset
    source, chain = _apart(dataset)
    if isinstance(source, Cached):
        return None
    steps = [Chain([t], joint=chain.joint) for t in chain.transforms] if chain is not None else []
    for step in steps:
        step.continues = True
    drawing = [is_random(t) for t in chain.transforms] if chain is not None else []
    most = 1 + (drawing.index(True) if any(drawing) else len(steps))
    samples: list[list[_Made]] = []
    for index in indices:
        try:
            one, other = (_made(source, steps[: most - 1], index, seed) for seed in (0, 1))
        except Exception:  # it cannot be pickled, or a sample raises
            return None
        alike = [
            not (a.drew or b.drew) and a.pickled == b.pickled
            for a, b in zip(one, other, strict=True)
        ]
        most = alike.index(False) if False in alike else len(alike)
        if not most:
            return RandomSample() if chain is None else None
        samples.append(one)
        if len(samples) == _SAMPLES_TRIED or time.perf_counter() > until:
            break
    if not samples:
        return None
    pickles = [made[most - 1].pickled for made in samples]
    since = time.perf_counter()
    for pickled in pickles:
        pickle.loads(pickled)
    load_s = time.perf_counter() - since
    return FixedPart(
        transforms=tuple(_name(step.transforms[0]) for step in steps[: most - 1]),
        has_chain=chain is not None,
        later_transforms=len(steps) - (most - 1),
        samples=len(samples),
        make_s=sum(step.seconds for made in samples for step in made[:most]) / len(samples),
        load_s=load_s / len(samples),
        size_bytes=sum(map(len, pickles)) / len(samples),
    )


def _apart(dataset: Any) -> tuple[Any, Chain | None]:
    """Return a dataset's source and the transforms of its first stage, if dpex can see them."""
    if not isinstance(dataset, MappedDataset):
        try:
            dataset = from_torchvision(dataset)
        except Exception:  # no dataset of torchvision's kind, or its first sample raises
            return dataset, None
    return dataset.source, dataset.parts[0].chain


def _made(source: Any, steps: list[Chain], index: Any, seed: int) -> list[_Made]:
    """Make a sample, and keep it after every step."""
    seed_generators(seed)
    made = []
    sample: Any = None
    for step in (None, *steps):
        states = generator_states()
        since = time.perf_counter()
        with own_seeds_are(seed):
            sample = source[index] if step is None else step(sample)
        seconds = time.perf_counter() - since
        drew = states != generator_states()
        made.append(_Made(seconds, drew, dump_in_band(sample, "sample")))
    return made


def _name(transform: Any) -> str:
    return str(getattr(transform, "__name__", type(transform).__name__))
