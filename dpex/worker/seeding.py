"""One seed per sample, the same in every process.

torch seeds a worker process once. The numbers that a random transform draws then depend on the
samples that the process made before. dpex seeds every sample from (base_seed, epoch, position in
the epoch). The result depends neither on num_workers nor on chunks, nodes, retries or the order of
tasks.

Seeding runs before every sample, so it must be fast. ``torch.manual_seed`` also visits the
accelerator back ends. A worker process needs only the CPU generator seeded, unless it has a GPU
(``seed_cuda``). A generator that samples do not draw from needs no seed per sample. ``Habits``
finds these generators, and checks them after every batch.

A generator that ``worker_init_fn`` seeded or drew from belongs to the logical worker. dpex does not
seed it, so it draws the same numbers as in torch's worker (``WorkerGenerators``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

__all__ = [
    "Habits",
    "OwnSeeds",
    "WorkerGenerators",
    "begin_sample",
    "generator_states",
    "generators_kept",
    "global_states",
    "one_deeper",
    "own_seed",
    "own_seeds_are",
    "sample_seed",
    "seed_cuda",
    "seed_generators",
    "seeds_offered",
    "set_global_states",
    "stage_key",
    "stream_key",
]

T = TypeVar("T")

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the increment of splitmix64


def _mix(value: int) -> int:
    """Scramble 64 bits (the output function of splitmix64, Steele et al., OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def stream_key(base_seed: int, epoch: int) -> int:
    """Return the 64-bit key of the sample seeds of one epoch."""
    return _mix((base_seed ^ _mix((epoch * _GOLDEN) & _MASK64)) & _MASK64)


def stage_key(key: int, stage: int) -> int:
    """Return the key of the sample seeds of a later stage, given the key of the epoch."""
    return _mix(key ^ _mix((stage * _GOLDEN) & _MASK64))


def sample_seed(key: int, position: int) -> int:
    """Return the seed of the sample at ``position`` in the epoch, which starts at 0."""
    return _mix((key + (position + 1) * _GOLDEN) & _MASK64)


def seed_generators(seed: int) -> None:
    """Seed torch's CPU generator, numpy's global generator and ``random`` with 64 bits.

    Generators that belong to the current logical worker keep their states.
    """
    for generator, owned in zip(_GENERATORS, _owned, strict=True):
        if not owned:
            generator.seed(seed)


def seed_cuda(seed: int) -> None:
    """Seed the generators of all CUDA devices of this process, for a stage with a GPU.

    The call does not initialise CUDA: torch keeps the last seed until CUDA is initialised.
    """
    torch.cuda.manual_seed_all(seed)


_seed_place: Callable[[int, int], None] | None = None
# Stage numbers from here on are keys of nested datasets, which all run in the first stage.
_NESTED = 1 << 32
_depth = 0


@contextlib.contextmanager
def seeds_offered(key: int, position: int) -> Iterator[None]:
    """Make ``begin_sample`` seed each sample of a batch that one call makes inside the block.

    Args:
        key: Key of the seeds.
        position: Position in the epoch of the batch's first sample.
    """
    global _seed_place

    def seed_place(place: int, depth: int) -> None:
        seed_generators(sample_seed(stage_key(key, _NESTED + depth), position + place))

    _seed_place = seed_place
    try:
        yield
    finally:
        _seed_place = None


def begin_sample(place: int, depth: int) -> None:
    """Seed the generators for a sample inside ``seeds_offered``, but not inside ``own_seeds_are``.

    Args:
        place: The sample's place in the batch.
        depth: Nesting depth of the dataset that calls; each depth has different seeds.
    """
    if _seed_place is not None and not _own_seeds:
        _seed_place(place, depth)


@dataclass(eq=False)
class OwnSeeds:
    """The seed of generators that belong to transforms.

    Attributes:
        seed: The seed.
        asked: Whether a transform has asked for the seed.
    """

    seed: int
    asked: bool = False


# A list, because threads may enter and leave ``own_seeds_are`` in any order.
_own_seeds: list[OwnSeeds] = []


def own_seed() -> int:
    """Return a 32-bit seed for a transform's own generator, drawn from torch's generator."""
    for seeds in _own_seeds[-1:]:
        seeds.asked = True
        return seeds.seed
    return int(torch.randint(1 << 32, ()))


@contextlib.contextmanager
def own_seeds_are(seed: int) -> Iterator[OwnSeeds]:
    """Make ``own_seed`` return ``seed`` and draw nothing, for samples kept for all epochs."""
    seeds = OwnSeeds(seed)
    _own_seeds.append(seeds)
    try:
        yield seeds
    finally:
        _own_seeds.remove(seeds)


@contextlib.contextmanager
def one_deeper() -> Iterator[int]:
    """Count how deeply datasets that read from one another are nested, through any other dataset.

    Yields:
        The depth of the dataset that reads its source inside the block: 1 for the outermost.
    """
    global _depth
    _depth += 1
    try:
        yield _depth
    finally:
        _depth -= 1


@contextlib.contextmanager
def generators_kept(other: torch.Generator | None = None) -> Iterator[None]:
    """Restore the states of the generators after the block.

    Args:
        other: A generator besides the global ones.
    """
    other_state = None if other is None else other.get_state()
    states = global_states()
    try:
        yield
    finally:
        set_global_states(states)
        if other is not None and other_state is not None:
            other.set_state(other_state)


def global_states() -> list[Any]:
    """Return the states of torch's CPU generator, numpy's global generator and ``random``."""
    return [generator.state() for generator in _GENERATORS]


def set_global_states(states: Sequence[Any]) -> None:
    """Restore the states that ``global_states`` returned."""
    for generator, state in zip(_GENERATORS, states, strict=True):
        generator.restore(state)


def generator_states() -> list[Any]:
    """Return a value for each global generator that differs once the generator was drawn from."""
    return [generator.mark() for generator in _GENERATORS]


def _numpy_state() -> bytes:
    # 624 words and the position among them. numpy's own function takes 20 microseconds for this.
    # A cached normal deviate is not included, but the draw that produced it changed the rest.
    address = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    return ctypes.string_at(address, 625 * 4)


class _Generator(NamedTuple):
    """One global generator.

    Attributes:
        seed: Seeds it.
        mark: Returns a value that differs once the generator was drawn from.
        state: Returns its whole state.
        restore: Restores such a state.
    """

    seed: Callable[[int], object]
    mark: Callable[[], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], object]


_GENERATORS = (
    _Generator(
        lambda seed: torch.default_generator.manual_seed(seed),
        lambda: torch.default_generator.get_state().numpy().tobytes(),
        torch.get_rng_state,
        torch.set_rng_state,
    ),
    _Generator(
        lambda seed: np.random.seed(seed & 0xFFFFFFFF),
        _numpy_state,
        lambda: np.random.get_state(legacy=True),
        np.random.set_state,
    ),
    _Generator(random.seed, random.getstate, random.getstate, random.setstate),
)
_SEED_FUNCTIONS: tuple[tuple[tuple[Any, str], ...], ...] = (
    ((torch, "manual_seed"), (torch.random, "manual_seed")),
    ((np.random, "seed"),),
    ((random, "seed"),),
)
"""The functions that seed each generator."""


@contextlib.contextmanager
def _seed_calls() -> Iterator[list[bool]]:
    """Record which generators the block seeds, even if the seed does not change their states.

    Yields:
        A list with one item per generator: whether the block has seeded it so far.
    """
    seeded = [False] * len(_SEED_FUNCTIONS)
    originals = []

    def noting(number: int, seed: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(seed)
        def noted(*args: Any, **kwargs: Any) -> Any:
            seeded[number] = True
            return seed(*args, **kwargs)

        return noted

    for number, functions in enumerate(_SEED_FUNCTIONS):
        for owner, name in functions:
            original = getattr(owner, name)
            originals.append((owner, name, original))
            setattr(owner, name, noting(number, original))
    try:
        yield seeded
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


_NO_OWNERS = (False,) * len(_GENERATORS)
_owned: tuple[bool, ...] = _NO_OWNERS
"""For each generator, whether it belongs to the current logical worker."""


class WorkerGenerators:
    """The global generators that belong to one logical worker.

    Source:
        torch's ``_worker_loop`` seeds them once, before ``worker_init_fn``, and never again.
    """

    def __init__(self) -> None:
        self._owned = _NO_OWNERS
        self._states: list[Any] = []

    @property
    def owns_torchs(self) -> bool:
        """Whether torch's generator belongs to the logical worker."""
        return self._owned[0]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take ownership of the generators that the block seeds or draws from."""
        before = generator_states()
        with _seed_calls() as seeded:
            yield
        after = generator_states()
        self._owned = tuple(
            called or one != other for called, one, other in zip(seeded, before, after, strict=True)
        )
        self._states = [g.state() if own else None for g, own in self._each()]

    def restore(self, states: Sequence[Any]) -> None:
        """Restore the owned generators from earlier states of all global generators.

        Args:
            states: The earlier result of ``global_states``.
        """
        for (generator, own), state in zip(self._each(), states, strict=True):
            if own:
                generator.restore(state)

    def _each(self) -> Iterator[tuple[_Generator, bool]]:
        return zip(_GENERATORS, self._owned, strict=True)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Continue the owned generators inside the block, and save their states after it."""
        global _owned
        if not any(self._owned):
            yield
            return
        for (generator, own), state in zip(self._each(), self._states, strict=True):
            if own:
                generator.restore(state)
        outer, _owned = _owned, self._owned
        try:
            yield
        finally:
            _owned = outer
            self._states = [g.state() if own else None for g, own in self._each()]


class Habits:
    """Record of the generators that a dataset's samples draw from.

    In the first batch, every generator is seeded and checked for each sample. From then on, a
    generator that was not drawn from is seeded once per batch, and its state is compared after the
    batch. If the state has changed, the batch is recomputed with that generator seeded for every
    sample. The results are the same as if all generators were seeded for every sample, unless
    ``reproducibly`` may make the batch only ``once``.
    """

    def __init__(self) -> None:
        self._learning = True
        self._drawn_from: list[bool] = [False] * len(_GENERATORS)
        self._states: list[Any] = []

    @property
    def need_seeds(self) -> bool:
        """Whether ``seed`` must be called before every further sample of the batch."""
        return self._learning or True in self._drawn_from

    def begin(self, seed: int) -> None:
        """Start a batch whose first sample has this seed."""
        seed_generators(seed)
        self._states = [
            None if drawn or owned else generator.mark()
            for drawn, generator, owned in zip(self._drawn_from, _GENERATORS, _owned, strict=True)
        ]

    def seed(self, seed: int) -> None:
        """Seed the generators that the next sample of the batch may draw from."""
        if self._learning:
            self.check()
            self.begin(seed)
            return
        for drawn, generator, owned in zip(self._drawn_from, _GENERATORS, _owned, strict=True):
            if drawn and not owned:
                generator.seed(seed)

    def check(self) -> bool:
        """Record the draws, and return whether every generator drawn from had a seed per sample."""
        found = [
            drawn or (not owned and before != generator.mark())
            for drawn, before, generator, owned in zip(
                self._drawn_from, self._states, _GENERATORS, _owned, strict=True
            )
        ]
        as_known = self._learning or found == self._drawn_from
        self._drawn_from = found
        return as_known

    def end_of_batch(self) -> bool:
        """Return ``check()``, and end the learning phase."""
        as_known = self.check()
        self._learning = False
        return as_known

    def reproducibly(
        self,
        key: int,
        position: int,
        attempt: Callable[[Callable[[int], None]], T],
        *,
        once: bool = False,
    ) -> T:
        """Make a batch that depends only on its samples' seeds.

        Args:
            key: Key of the seeds.
            position: Position in the epoch of the batch's first sample.
            attempt: Makes the batch, and may be called more than once. It gets a function that it
                calls before every sample, with the sample's place in the batch.
            once: Whether to call ``attempt`` only once, because a second call would change the
                dataset's state twice. If the batch is the first to draw from a generator, that
                generator then has the seed of the batch's first sample.
        """

        def before_sample(place: int) -> None:
            if place and self.need_seeds:
                self.seed(sample_seed(key, position + place))

        while True:
            self.begin(sample_seed(key, position))
            try:
                batch = attempt(before_sample)
            except Exception:
                if self.end_of_batch() or once:
                    raise
            else:
                if self.end_of_batch() or once:
                    return batch
