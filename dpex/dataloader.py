"""``DpexDataLoader``: torch's DataLoader, its workers on a cluster."""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dpex.chunking import ChunkPlanner
from dpex.cluster.connect import connect, parse_address
from dpex.epochs import SamplerEpochs
from dpex.iterator import ClusterIter, Generations
from dpex.jobs import StagePlan, divide
from dpex.pickling import Pickled, dump
from dpex.transforms.mapped import MappedDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.data import Dataset, Sampler

    from dpex.cluster.session import Session
    from dpex.fetch import Job

__all__ = ["DpexDataLoader"]

T_co = TypeVar("T_co", covariant=True)

_DEFAULT_PREFETCH_BYTES = 512 << 20
_WORKER_OPTIONS = {
    "accelerator_type",
    "label_selector",
    "memory",
    "num_cpus",
    "resources",
    "runtime_env",
    "scheduling_strategy",
}


class DpexDataLoader(DataLoader[T_co]):
    """A ``torch.utils.data.DataLoader`` whose workers are Ray tasks, here or on a cluster.

    Everything up to ``in_order`` is torch's and means what it means there; ``docs/semantics.md``
    lists every argument. With ``distribute_mode=False`` it is torch's loader and nothing else.
    Constructing one starts nothing: Ray is looked for at the first iteration.

    Args:
        dataset: A map-style dataset. It is pickled once, while its bytes stay the same.
        batch_size: Samples per batch; None turns automatic batching off.
        shuffle: Whether to draw a new permutation for every epoch.
        sampler: Yields indices; read in this process, never further than the run-ahead.
        batch_sampler: Yields lists of indices.
        num_workers: Logical workers, and the cap on parallel tasks. 0 loads in this process.
        collate_fn: Makes a batch from a list of samples; runs in the worker.
        pin_memory: Whether batches arrive in page-locked memory.
        drop_last: Whether to leave an incomplete last batch out.
        timeout: Seconds to wait for a batch; 0 waits for ever.
        worker_init_fn: Called with the worker id before a logical worker's first sample.
        multiprocessing_context: How torch starts workers. In distribute mode: whether those of
            an embedded Ray are forked from this process (``"fork"``, torch's default on Linux
            before Python 3.14) or start as Ray starts them; on a cluster without meaning.
        generator: Where the sampler's seed and the workers' base seed come from.
        prefetch_factor: Batches per worker that may always be under way; 2 if None.
        persistent_workers: Whether dataset copies live on across epochs.
        pin_memory_device: Deprecated by torch.
        in_order: Whether batches come in the sampler's order; if not, as they are done.
        distribute_mode: Whether workers are Ray tasks.
        head_address: Which Ray. ``"auto"``: the one this process uses, else ``RAY_ADDRESS``,
            else a running one of this user on this host, else one of its own, which ends with
            the process. ``"local"``: always one of its own. ``"host:port"``: that cluster.
        worker_options: Ray options of one worker, as ``Dataset.map_batches`` takes them:
            ``num_cpus``, ``memory``, ``resources``, ``accelerator_type``, ``label_selector``,
            ``scheduling_strategy``, ``runtime_env``.
        prefetch_bytes: Bytes of batches that may be under way beyond ``prefetch_factor``.
        on_error: ``"raise"`` passes an error in a sample on to the training loop.

    Raises:
        ClusterError: ``head_address`` is one for Ray Client.
        ValueError: An argument has a value that torch or dpex does not know.
        NotImplementedError: ``dataset`` is an ``IterableDataset`` in distribute mode.

    Source:
        The contract of ``torch.utils.data.DataLoader``.
    """

    # torch's __setattr__ refuses some names once its __init__ is through; these are ours.
    distribute_mode: bool
    head_address: str
    worker_options: dict[str, Any] | None
    prefetch_bytes: int
    on_error: str

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        distribute_mode: bool = False,
        head_address: str = "auto",
        worker_options: dict[str, Any] | None = None,
        prefetch_bytes: int = _DEFAULT_PREFETCH_BYTES,
        on_error: str = "raise",
    ) -> None:
        _check_options(distribute_mode, head_address, worker_options, prefetch_bytes, on_error)
        if distribute_mode and isinstance(dataset, IterableDataset):
            raise NotImplementedError(
                f"distribute_mode=True cannot yet iterate an IterableDataset "
                f"({type(dataset).__name__}): each worker would read the whole stream. Use a "
                "map-style dataset, or distribute_mode=False"
            )
        self.distribute_mode = distribute_mode
        self.head_address = head_address
        self.worker_options = worker_options
        self.prefetch_bytes = prefetch_bytes
        self.on_error = on_error
        self._cluster: _ClusterState | None = None
        self._accelerate_knows: bool | None = None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if isinstance(dataset, MappedDataset) and dataset.batched:
            self.collate_fn = dataset.collate(self.collate_fn)
        if distribute_mode and num_workers == 0:
            _warn_once(
                "num_workers",
                "distribute_mode=True with num_workers=0 distributes nothing: batches are made "
                "in this process, as torch does. Set num_workers to the number of parallel tasks",
            )

    @property
    def _distributed(self) -> bool:
        return self.distribute_mode and self.num_workers > 0

    @property
    def _is_accelerate_prepared(self) -> bool:
        """What Accelerate asks of a loader, before it makes one of torch's from one that is not."""
        if self._distributed and self._accelerate_knows is None:
            _warn_once(
                "accelerate",
                "Accelerate makes a plain torch DataLoader of this DpexDataLoader: its workers run "
                "on this host. Call dpex.integrations.accelerate.prepare(accelerator, ...) in "
                "place of accelerator.prepare(...)",
            )
        return bool(self._accelerate_knows)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool | None) -> None:
        self._accelerate_knows = prepared

    @property
    def _forks(self) -> bool:
        """Whether torch's own workers would be forks of this process."""
        context = self.multiprocessing_context or multiprocessing
        # A method that nobody has set stays so, and is then the platform's first one.
        method = context.get_start_method(allow_none=True)
        return (method or multiprocessing.get_all_start_methods()[0]) == "fork"

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not self._distributed:
            return super()._get_iterator()

        job, later = self._jobs()

        @functools.cache
        def pickle_job() -> Pickled:
            return dump(job, "loader")

        state = self._cluster
        if state is None or not state.session.alive:
            connection = connect(self.head_address, bequest=pickle_job if self._forks else None)
            from dpex.cluster.session import Session  # loads Ray

            session = Session(
                connection,
                worker_options=self.worker_options,
                fork_workers=self._forks,
                num_workers=self.num_workers,
            )
            state = self._cluster = _ClusterState(self, session)
        job_key = state.session.store(pickle_job, later)
        return ClusterIter(
            self, job_key, state.session, state.planner, state.generations, state.epochs
        )

    def _jobs(self) -> tuple[Job, list[StagePlan]]:
        return divide(
            self.dataset,
            self.collate_fn,
            self.worker_init_fn,
            num_workers=self.num_workers,
            auto_collation=self._auto_collation,
        )

    def check_worker_number_rationality(self) -> None:
        """Compare num_workers with this host's cores, unless the workers are elsewhere."""
        if not self._distributed:
            super().check_worker_number_rationality()

    def __iter__(self) -> _BaseDataLoaderIter:
        if isinstance(self._iterator, ClusterIter) and not self._iterator.alive:
            self._iterator = None  # persistent workers of a Ray that has gone
        return super().__iter__()

    def close(self) -> None:
        """Stop what runs and release what the loader holds; it can be iterated again."""
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, ClusterIter):
            iterator._shutdown_workers()
        state, self._cluster = self._cluster, None
        if state is not None:
            state.session.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: a copy starts afresh."""
        return {**self.__dict__, "_cluster": None, "_iterator": None}

    def __enter__(self) -> DpexDataLoader[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ClusterState:
    """What a loader keeps from one iteration to the next."""

    def __init__(self, loader: DpexDataLoader[Any], session: Session) -> None:
        assert loader.prefetch_factor is not None
        self.session = session
        self.generations = Generations()
        self.epochs = SamplerEpochs(loader)
        self.planner = ChunkPlanner(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            prefetch_bytes=loader.prefetch_bytes,
            claims_cpus=session.claims_cpus,
        )


_warned: set[str] = set()


def _warn_once(key: str, text: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(text, stacklevel=3)


def _check_options(
    distribute_mode: Any, head_address: Any, worker_options: Any, prefetch_bytes: Any, on_error: Any
) -> None:
    if not isinstance(distribute_mode, bool):
        raise TypeError(f"distribute_mode must be True or False, got {distribute_mode!r}")
    parse_address(head_address, "head_address")
    if worker_options is not None and not isinstance(worker_options, dict):
        raise TypeError(
            f"worker_options must be a dict of Ray options or None, got {worker_options!r}"
        )
    unknown = sorted(set(worker_options or {}) - _WORKER_OPTIONS)
    if unknown:
        raise ValueError(
            f"worker_options has unknown keys {unknown}; known are {sorted(_WORKER_OPTIONS)}"
        )
    if not isinstance(prefetch_bytes, int) or prefetch_bytes < 0:
        raise ValueError(f"prefetch_bytes must be an integer >= 0, got {prefetch_bytes!r}")
    if on_error != "raise":
        raise ValueError(f'on_error must be "raise", got {on_error!r}')
