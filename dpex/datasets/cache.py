"""Samples that are made once per node: for later epochs, other loaders, the next run."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset

from dpex.datasets.fingerprint import fingerprint
from dpex.datasets.node_memory import job_directory, job_name
from dpex.datasets.sameness import same
from dpex.transforms.mapped import MappedDataset
from dpex.transforms.splitting import flattened, is_random
from dpex.wire.pickling import dump
from dpex.wire.timings import count
from dpex.worker.batched_reads import read_at_once, reads_batches
from dpex.worker.seeding import generator_states, generators_kept, own_seeds_are, seed_generators

if TYPE_CHECKING:
    from dpex.datasets.sample_store import SampleStore

__all__ = ["CacheInfo", "Cached", "cached"]

_DEFAULT_MAX_BYTES = 10 << 30
# Where draws are not seen, as they are in the global generators: two of a coin are often the same.
_SEEDS_TRIED = 10


@dataclass(frozen=True)
class CacheInfo:
    """What a cache has done.

    Attributes:
        hits: Samples that this process found in it.
        misses: Samples that it made itself.
        samples: Samples that lie in it, on this node.
        size_bytes: What they take.
    """

    hits: int
    misses: int
    samples: int
    size_bytes: int


def cached(
    dataset: Any,
    *,
    at: str | Path = "memory",
    max_bytes: int = _DEFAULT_MAX_BYTES,
    version: str = "",
) -> Cached:
    """Return a dataset each of whose samples is made once per node.

    What can be reused is what is the same every time: reading, decoding, resizing. Random
    transforms go behind it: ``MappedDataset(cached(MappedDataset(files, fixed)), augment)``.

    Args:
        dataset: A map-style dataset; with its chain, if it is a ``MappedDataset``.
        at: ``"memory"``: in every node's shared memory, as long as the job uses it. A directory:
            there, on every node that has it, also for later jobs.
        max_bytes: What it may take on a node. When it is full, samples of datasets that are no
            longer used make room; where there are none, further samples are made anew.
        version: Change it when something changes that neither the dataset's pickle nor the code
            behind it shows: the files that it reads, or what is set in a module's variables.

    Raises:
        TypeError: The dataset is not map-style, or an argument is of another type.
        ValueError: Its chain has a random transform of torchvision's, or ``max_bytes`` is no
            positive number.
        ImportError: lmdb is not installed.
    """
    return Cached(dataset, at=at, max_bytes=max_bytes, version=version)


class Cached(Dataset[Any]):
    """What ``cached`` returns.

    Its ``[...]`` raises ``ValueError`` where the dataset gives different samples for different
    seeds: the first one that a process makes is made twice, or more often where a transform has a
    generator of its own.
    """

    def __init__(self, dataset: Any, *, at: str | Path, max_bytes: int, version: str) -> None:
        if isinstance(dataset, MappedDataset) and dataset.parts[1:]:
            raise ValueError(
                "a chain with stages cannot be cached, only what one stage does: put the stages "
                "behind it, MappedDataset(cached(...), [..., Stage(...)])"
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"only a map-style dataset can be cached, got {dataset!r}")
        if not isinstance(at, str | Path):
            raise TypeError(f'at must be "memory" or a directory, got {at!r}')
        whole = isinstance(max_bytes, int) and not isinstance(max_bytes, bool)
        if not whole or max_bytes <= 0:
            raise ValueError(f"max_bytes must be an integer > 0, got {max_bytes!r}")
        drawing = next(filter(is_random, _transforms_of(dataset)), None)
        if drawing is not None:
            raise ValueError(
                f"{drawing!r} draws random numbers, and would draw them once for all epochs: put "
                "it behind the cache, MappedDataset(cached(...), [...]); dpex.transforms.split "
                "divides a chain"
            )
        try:
            import lmdb  # noqa: F401
        except ImportError as error:
            raise ImportError("cached() needs lmdb: pip install 'dpex[cache]'") from error
        self.dataset = dataset
        self._directory = None if at == "memory" else Path(at).expanduser().absolute()
        self._job = job_name() if self._directory is None else ""
        self._max_bytes = max_bytes
        self._owner = fingerprint(dataset, version)
        if self._directory is None:
            _forget_at_exit(self._job)
        else:
            _keep_at_exit(self._directory)
        self._begin()

    def _begin(self) -> None:
        """Forget what belongs to one process."""
        self._checked = False
        self._hits = self._misses = 0
        self._opened: tuple[int, SampleStore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        own = {"_checked", "_hits", "_misses", "_opened"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        found, sample = self._store.get(self._owner, index)
        if found:
            self._hits += 1
            count("cache_hits")
            return sample
        if not self._checked:
            self._check(index)
        with own_seeds_are(0):
            return self._kept(index, self.dataset[index])

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]] | None:
        """What reads a batch at once, where the dataset itself can."""
        return self._samples if reads_batches(self.dataset) else None

    def _samples(self, indices: list[Any]) -> list[Any]:
        looked_up = [self._store.get(self._owner, index) for index in indices]
        missing = [i for i, (found, _) in zip(indices, looked_up, strict=True) if not found]
        self._hits += len(indices) - len(missing)
        count("cache_hits", len(indices) - len(missing))
        if missing and not self._checked:
            self._check(missing[0])
        made: Iterator[Any] = iter(())
        if missing:
            # What reads a batch may seed the generators for each of its samples.
            with own_seeds_are(0), generators_kept():
                made = iter(read_at_once(self.dataset, missing))
        return [
            sample if found else self._kept(index, next(made))
            for index, (found, sample) in zip(indices, looked_up, strict=True)
        ]

    def _kept(self, index: Any, sample: Any) -> Any:
        self._misses += 1
        count("cache_misses")
        self._store.put(self._owner, index, dump(sample, "sample"))
        return sample

    def _check(self, index: Any) -> None:
        """Make a sample again, from other seeds; the generators are left as they were."""
        made, drew = [], False
        with generators_kept():
            for seed in range(_SEEDS_TRIED):
                seed_generators(seed)
                states = generator_states()
                with own_seeds_are(seed) as own:
                    made.append(self.dataset[index])
                drew = drew or states != generator_states()
                if seed and not own.asked:
                    break
        if drew or not all(same(made[0], other) for other in made[1:]):
            raise ValueError(
                f"sample {index} is not the same every time: making it "
                f"{'draws random numbers' if drew else 'gave two different ones'}, which a cache "
                "would keep for ever. What draws belongs behind the cache"
            )
        self._checked = True

    @property
    def _store(self) -> SampleStore:
        from dpex.datasets.sample_store import MEMORY, open_store

        if self._opened is None or self._opened[0] != os.getpid():
            directory = self._directory or job_directory(MEMORY, self._job)
            self._opened = (os.getpid(), open_store(directory, self._max_bytes))
        return self._opened[1]

    def info(self) -> CacheInfo:
        """Return what this process has found in the cache, and what lies in it on this node."""
        return CacheInfo(self._hits, self._misses, *self._store.size())


@functools.cache
def _forget_at_exit(job: str) -> None:
    """Have this job's memory given back on this node, if nobody uses it any more."""

    @atexit.register
    def forget() -> None:
        from dpex.datasets.sample_store import forget_memory

        forget_memory(job)


@functools.cache
def _keep_at_exit(directory: Path) -> None:
    """Have what this node's processes wrote on its disk when this one ends."""

    @atexit.register
    def keep() -> None:
        from dpex.datasets.sample_store import keep_for_good

        keep_for_good(directory)


def _transforms_of(dataset: Any) -> Iterator[Any]:
    """Yield the transforms that a dataset is known to have, its sources' too."""
    if isinstance(dataset, MappedDataset):
        for part in dataset.parts:
            for known in (*part.chain.transforms, part.chain.target_transform):
                if known is not None:
                    yield from flattened(known)
        yield from _transforms_of(dataset.source)
        return
    for name in ("transform", "target_transform", "transforms"):
        transform = getattr(dataset, name, None)
        if callable(transform):
            yield from flattened(transform)
