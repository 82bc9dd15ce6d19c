"""A cache of samples on each node, for later epochs, other loaders and the next run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset

from dpex.datasets.fingerprint import fingerprint
from dpex.datasets.locks import lock_for
from dpex.datasets.node_memory import at_exit, job_directory, job_name, use_until_exit
from dpex.transforms.mapped import MappedDataset
from dpex.transforms.splitting import flattened, is_random
from dpex.wire.pickling import dump, dump_in_band
from dpex.wire.timings import count
from dpex.worker.batched_reads import read_at_once, reads_batches
from dpex.worker.seeding import generator_states, generators_kept, own_seeds_are, seed_generators

if TYPE_CHECKING:
    from dpex.datasets.sample_store import SampleStore

__all__ = ["CacheInfo", "Cached", "cached"]

_DEFAULT_MAX_BYTES = 10 << 30
# dpex does not see draws from a generator that it seeds with ``set_random_seed``, so it compares
# samples of several seeds. Two seeds are not enough: a random flip often gives the same result.
_SEEDS_TRIED = 10


@dataclass(frozen=True)
class CacheInfo:
    """Statistics of a cache.

    Attributes:
        hits: Number of samples that this process found in the cache.
        misses: Number of samples that this process made.
        samples: Number of samples in the cache on this node.
        size_bytes: Size of the cache on this node, in bytes.
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
    """Return a dataset that makes each sample once per node and then reads it from a cache.

    Only deterministic steps can be cached: reading, decoding, resizing. Apply random transforms
    after the cache: ``MappedDataset(cached(MappedDataset(files, fixed)), augment)``.

    Args:
        dataset: A map-style dataset. For a ``MappedDataset``, the cache includes its chain.
        at: ``"memory"`` keeps samples in the shared memory of every node while the job uses them.
            A directory, on a local disk of every node, keeps them for later jobs too.
        max_bytes: Maximum size of the cache on a node. A full cache evicts samples of datasets
            that are no longer used. If there are none, it stores no further samples.
        version: Change this string when the samples change but neither the dataset's pickle nor
            its code does: for example, other files or other values of a module's variables.

    Raises:
        TypeError: The dataset is not map-style, or ``at`` is neither a string nor a path.
        ValueError: The dataset's chain has stages or a random transform of torchvision, or
            ``max_bytes`` is not a positive integer.
        ImportError: lmdb is not installed.
    """
    return Cached(dataset, at=at, max_bytes=max_bytes, version=version)


class Cached(Dataset[Any]):
    """A dataset whose samples are cached; ``cached`` returns it.

    Each process checks the first sample that it makes. It makes the sample with two seeds, or with
    ten if a transform has ``set_random_seed``. Indexing raises ``ValueError`` if the samples differ
    or if making them draws from a global generator. Draws from another generator may give the same
    sample twice, and then remain unnoticed.
    """

    def __init__(self, dataset: Any, *, at: str | Path, max_bytes: int, version: str) -> None:
        if isinstance(dataset, MappedDataset) and dataset.parts[1:]:
            raise ValueError(
                "a chain with stages cannot be cached. Cache the part before the first Stage: "
                "MappedDataset(cached(...), [..., Stage(...)])"
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
                f"{drawing!r} draws random numbers, and a cache would keep its first result for "
                "all epochs. Apply it after the cache: MappedDataset(cached(...), [...]). "
                "dpex.transforms.split_deterministic divides a chain there"
            )
        try:
            from dpex.datasets.sample_store import MEMORY, keep_for_good
        except ImportError as error:
            raise ImportError(
                "cached() needs lmdb, which is not installed: pip install lmdb"
            ) from error
        self.dataset = dataset
        self._directory = None if at == "memory" else Path(at).expanduser().absolute()
        self._job = job_name() if self._directory is None else ""
        self._max_bytes = max_bytes
        self._owner = fingerprint(dataset, version)
        if self._directory is None:
            use_until_exit(MEMORY, self._job)
        else:
            at_exit(keep_for_good, self._directory)
        self._begin()

    def _begin(self) -> None:
        """Reset the state that belongs to one process."""
        self._checked = False
        self._hits = self._misses = 0
        self._opened: tuple[int, SampleStore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the parts that belong to this process."""
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
        self._check(index)
        with own_seeds_are(0):
            return self._kept(index, self.dataset[index])

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]] | None:
        """Function that reads a whole batch, or None if the dataset has no ``__getitems__``."""
        return self._samples if reads_batches(self.dataset) else None

    def _samples(self, indices: list[Any]) -> list[Any]:
        looked_up = [self._store.get(self._owner, index) for index in indices]
        missing = [i for i, (found, _) in zip(indices, looked_up, strict=True) if not found]
        self._hits += len(indices) - len(missing)
        count("cache_hits", len(indices) - len(missing))
        made: Iterator[Any] = iter(())
        if missing:
            self._check(missing[0])
            with own_seeds_are(0):
                made = iter(read_at_once(self.dataset, missing))
        return [
            sample if found else self._kept(index, next(made))
            for index, (found, sample) in zip(indices, looked_up, strict=True)
        ]

    def _kept(self, index: Any, sample: Any) -> Any:
        self._misses += 1
        count("cache_misses")
        if self._checked:
            self._store.put(self._owner, index, dump(sample, "sample"))
        return sample

    def _check(self, index: Any) -> None:
        """Check the dataset with this sample, unless this process has already checked it.

        All checks use the global generators. If a thread checks another dataset, this method
        returns at once, and no sample is stored until a later call checks this dataset.

        Raises:
            ValueError: The sample draws from a global generator, or differs between seeds.
        """
        if self._checked:
            return
        with lock_for(self._owner):
            checking = lock_for("the check of a dataset")
            if not self._checked and checking.acquire(blocking=False):
                try:
                    self._compare(index)
                finally:
                    checking.release()

    def _compare(self, index: Any) -> None:
        """Check that a sample does not depend on random numbers; restore the generators.

        Raises:
            SerializationError: The sample cannot be pickled.
            ValueError: The sample draws from a global generator, or differs between seeds.
        """
        made, drew = set(), False
        with generators_kept():
            for seed in range(_SEEDS_TRIED):
                seed_generators(seed)
                states = generator_states()
                with own_seeds_are(seed) as own:
                    made.add(dump_in_band(self._made(index), "sample"))
                drew = drew or states != generator_states()
                if seed and not own.asked:
                    break
        if drew or len(made) > 1:
            raise ValueError(
                f"sample {index} cannot be cached: making it "
                f"{'draws random numbers' if drew else 'twice gave two different samples'}. Apply "
                "the random step after the cache: MappedDataset(cached(...), [...])"
            )
        self._checked = True

    def _made(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except NotImplementedError:  # the dataset may define only ``__getitems__``
            if not reads_batches(self.dataset):
                raise
            [sample] = read_at_once(self.dataset, [index])
            return sample

    @property
    def _store(self) -> SampleStore:
        from dpex.datasets.sample_store import MEMORY, open_store

        if self._opened is None or self._opened[0] != os.getpid():
            directory = self._directory or job_directory(MEMORY, self._job)
            self._opened = (os.getpid(), open_store(directory, self._max_bytes))
        return self._opened[1]

    def info(self) -> CacheInfo:
        """Return this process's hits and misses, and the size of the cache on this node."""
        return CacheInfo(self._hits, self._misses, *self._store.size())


def _transforms_of(dataset: Any) -> Iterator[Any]:
    """Yield the known transforms of a dataset and of its sources."""
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
