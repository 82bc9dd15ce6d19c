"""``DataLoader`` and ``DpexDataLoader``: torch DataLoaders with workers here or on a cluster."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch.utils.data
from torch.utils.data import IterableDataset, IterDataPipe

from dpex import tuning
from dpex.carriers.choice import Demand, choose_address, new_session
from dpex.carriers.ray.worker_options import WorkerOptions
from dpex.carriers.ray.worker_options import check as check_worker_options
from dpex.cluster.connect import parse_address
from dpex.compat.torch_names import BaseDataLoaderIter, DatasetKind
from dpex.compat.untraced import untraced
from dpex.errors import SerializationError
from dpex.log import announce_once, warn_once
from dpex.protocol.chunk_sizes import ChunkPlanner
from dpex.stats import LoaderStats, Meter
from dpex.training.checkpoint import Progress
from dpex.training.dataset_versions import DatasetVersions
from dpex.training.distributed_iterator import DistributedIter, initial_binding
from dpex.training.index_iterator import IndexSampler
from dpex.training.index_source import IndexSource
from dpex.training.sampler_epochs import SamplerEpochs
from dpex.training.stage_plan import divide
from dpex.training.torch_iterators import TorchIter, torch_iterator
from dpex.transforms.mapped import MappedDataset
from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import Pickled, dump
from dpex.worker.loader_jobs import LoaderJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.data import Dataset, Sampler

    from dpex.carriers.interface import CarrierSession

__all__ = ["DEFAULT_MAX_SKIPPED", "DEFAULT_PREFETCH_BYTES", "DataLoader", "DpexDataLoader"]

T_co = TypeVar("T_co", covariant=True)

DEFAULT_PREFETCH_BYTES = 512 << 20
DEFAULT_MAX_SKIPPED = 100


class DpexDataLoader(torch.utils.data.DataLoader[T_co]):
    """A ``torch.utils.data.DataLoader`` whose workers are Ray tasks or processes of this machine.

    On a Ray, the sampler's indices become a Ray Dataset, and its tasks are the workers. Without a
    Ray, each worker is a process of this machine, as in torch. Batches, random numbers and states
    are the same. ``head_address`` chooses.

    The arguments up to ``in_order`` are torch's and keep their meaning. ``docs/semantics.md``
    compares every argument with torch. With ``distribute_mode=False`` or ``num_workers=0``, torch's
    own iterators load the data. The constructor starts nothing: the first ``iter()`` chooses, and
    starts the workers. Iteration raises an exception of a worker with its own type, as torch does.
    dpex's own errors are subclasses of ``DpexError``.

    Args:
        dataset: A map-style dataset, or an ``IterableDataset``. Every logical worker reads a copy
            of it, as in torch. Processes of this machine get it from torch's start method. For a
            Ray, every ``iter()`` pickles the dataset, and sends it only if its bytes have changed.
            With ``persistent_workers`` only the first ``iter()`` pickles it.
        batch_size: Samples per batch; None disables automatic batching.
        shuffle: Whether to draw a new permutation for every epoch.
        sampler: Iterable of indices. The training process draws from it, no further ahead than
            ``prefetch_factor`` and ``prefetch_bytes`` allow.
        batch_sampler: Iterable of lists of indices.
        num_workers: Number of logical workers: processes of this machine, or the limit on parallel
            Ray tasks. 0 loads the data in the training process.
        collate_fn: Makes a batch from a list of samples, in the worker process.
        pin_memory: Whether batches arrive in page-locked memory.
        drop_last: Whether to drop an incomplete last batch.
        timeout: Seconds to wait for a batch before a ``RuntimeError``; 0 waits without a limit.
        worker_init_fn: Function called with the worker id before a logical worker's first sample.
        multiprocessing_context: How processes of this machine start, as in torch. Ray starts its
            own worker processes, so on a Ray it has no effect.
        generator: Generator of the sampler's seed and of the workers' base seed.
        prefetch_factor: Batches per logical worker that may always be in flight; 2 if None.
        persistent_workers: Whether workers keep their copies of the dataset across epochs.
            Processes of this machine then outlive an epoch, as in torch.
        pin_memory_device: Deprecated by torch.
        in_order: Whether batches come in the sampler's order. If False, they come as workers finish
            them.
        distribute_mode: Whether dpex makes the batches, with the workers that ``head_address``
            chooses. False by default, which selects torch's own workers; ``DataLoader`` is this
            class with True.
        head_address: Where the workers run. The first ``iter()`` chooses, for the loader's life.
            ``"auto"``: on the Ray that this process is connected to, else on ``RAY_ADDRESS``, else
            on this user's cluster on this machine. If there is none, in processes of this machine;
            a stage or an option that needs Ray then starts a local Ray. ``"processes"``: in
            processes of this machine. ``"local"``: on a local Ray, which dpex starts, and which
            ends with this process. ``"cluster"``: as ``"auto"``, but a ``ClusterError`` if there is
            no Ray. ``"host:port"``: on the cluster at this address, of which this machine must be a
            node. ``"ray://host:port"``: on the cluster at this address, through Ray Client.
        worker_options: Ray options of one worker, as ``Dataset.map_batches`` takes them:
            ``num_cpus``, ``memory``, ``resources``, ``accelerator_type``, ``label_selector``,
            ``fallback_strategy``, ``runtime_env``. Processes of this machine ignore ``num_cpus``
            and ``memory`` with a warning. The other options need a Ray.
        prefetch_bytes: Total bytes of batches that may be in flight; 512 MiB by default. At least
            ``prefetch_factor`` batches per logical worker are in flight, whatever their size.
        on_error: ``"raise"`` raises the error of a sample in the training loop. ``"skip"`` leaves
            the sample out of its batch and logs the sample's index. A batch that has no sample left
            is not delivered. Errors of ``collate_fn`` are always raised.
        max_skipped: Number of samples that ``on_error="skip"`` may leave out of one epoch. One more
            raises ``TooManySkippedError``.

    Raises:
        TypeError: ``distribute_mode`` or ``worker_options`` has a wrong type.
        ValueError: torch or dpex does not accept the value of an argument.
        NotImplementedError: ``dataset`` is an ``IterDataPipe`` of torch, in distribute mode.

    Source:
        The contract of ``torch.utils.data.DataLoader``.
    """

    # torch's __setattr__ refuses to change some attributes after __init__, but none of these.
    distribute_mode: bool
    head_address: str
    worker_options: WorkerOptions | None
    prefetch_bytes: int
    on_error: Literal["raise", "skip"]
    max_skipped: int

    @untraced
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
        worker_options: WorkerOptions | None = None,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = DEFAULT_MAX_SKIPPED,
    ) -> None:
        _check_options(distribute_mode, head_address, worker_options, prefetch_bytes)
        if not distribute_mode:
            _warn_of_ignored(
                head_address=(head_address, "auto"),
                worker_options=(worker_options, None),
                prefetch_bytes=(prefetch_bytes, DEFAULT_PREFETCH_BYTES),
                max_skipped=(max_skipped, DEFAULT_MAX_SKIPPED),
            )
        _check_skipping(on_error, max_skipped, distributed=distribute_mode and num_workers > 0)
        if distribute_mode and isinstance(dataset, IterDataPipe):
            raise NotImplementedError(
                f"distribute_mode=True does not run torch's DataPipes ({type(dataset).__name__}). "
                "Use a plain IterableDataset, or distribute_mode=False"
            )
        if on_error == "skip" and isinstance(dataset, IterableDataset):
            raise ValueError(
                f'on_error="skip" needs a map-style dataset: an IterableDataset '
                f"({type(dataset).__name__}) has no next sample once it has raised. Catch the "
                "error in its __iter__"
            )
        self.distribute_mode = distribute_mode
        self.head_address = head_address
        self.worker_options = worker_options
        self.prefetch_bytes = prefetch_bytes
        self.on_error = on_error
        self.max_skipped = max_skipped
        self._cluster: _ClusterState | None = None
        # The values for which the session was made.
        self._session_options: tuple[Any, ...] | None = None
        # The address that "auto" has led to, and for which demand.
        self._chosen: tuple[Any, str] | None = None
        self._progress = Progress()
        self._meter = Meter()
        self._newest: weakref.ref[DistributedIter | TorchIter] | None = None
        self._accelerate_knows: bool | None = None
        self._pickled_slowly = False
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

    @property
    def _distributed(self) -> bool:
        return self.distribute_mode and self.num_workers > 0

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether Accelerate has prepared this loader.

        Accelerate reads it, and replaces an unprepared loader by a plain torch ``DataLoader``.
        """
        # Other readers, such as inspect.getmembers(), need no warning.
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if (
            reader.startswith("accelerate.")
            and self._distributed
            and self._accelerate_knows is None
        ):
            warn_once(
                "Accelerate makes a plain torch DataLoader of this DpexDataLoader: its workers run "
                "on this machine. Call dpex.integrations.accelerate.prepare(accelerator, ...) in "
                "place of accelerator.prepare(...)",
            )
        return bool(self._accelerate_knows)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool | None) -> None:
        self._accelerate_knows = prepared

    def _get_iterator(self) -> BaseDataLoaderIter:
        if not self._distributed:
            if self.distribute_mode:
                announce_once(
                    "num_workers=0: this process makes the batches, as with torch. Set num_workers "
                    "to the number of tasks that may make batches at once"
                )
            return self._record(torch_iterator(self))

        if self.prefetch_factor <= 0:  # type: ignore[operator]  # for None, torch's TypeError
            raise AssertionError(
                f"prefetch_factor must be greater than 0, got {self.prefetch_factor}"
            )
        jobs = self._jobs()
        state = self._state(jobs)
        session = state.session
        return self._record(
            DistributedIter(
                self,
                session.store(jobs, self._pickle),
                session,
                state.planner_for(self),
                state.versions,
                state.epochs,
                max_skipped=self.max_skipped,
                settings=session.settings(),
                seeded=self._progress.seeded,
            )
        )

    def _state(self, jobs: LoaderJobs) -> _ClusterState:
        """Return the loader's session and what belongs to it; make a new one if it is outdated."""
        self._drop_outdated_session()
        if self._cluster is None or not self._cluster.session.alive:
            self._cluster = _ClusterState(self, self._new_session(jobs))
        return self._cluster

    def _demand(self, jobs: LoaderJobs) -> Demand:
        return Demand(
            self.head_address,
            self.worker_options or {},
            [stage for stage, _ in jobs.later],
            self.num_workers,
            self.persistent_workers,
        )

    def _new_session(self, jobs: LoaderJobs) -> CarrierSession:
        demand = self._demand(jobs)
        # A Ray that starts later changes nothing for a loader that has found none.
        wanted = demand.head_address, demand.only_ray
        if self._chosen is None or self._chosen[0] != wanted or self._chosen[1] == "auto":
            had_ray = self._chosen == (wanted, "auto")
            self._chosen = wanted, choose_address(demand, again=had_ray)
        return new_session(demand, self._chosen[1])

    def _record(self, iterator: DistributedIter | TorchIter) -> DistributedIter | TorchIter:
        """Record dpex's iterator, because a subclass may return another one that contains it."""
        self._newest = weakref.ref(iterator)
        return iterator

    def _inner(self) -> DistributedIter | TorchIter | None:
        """Return dpex's iterator in the one that a subclass returned, or None."""
        return None if self._newest is None else self._newest()

    def _drop_outdated_session(self) -> None:
        """Drop the session if an attribute that it depends on has changed, unless workers persist.

        Iterators that still use the session keep it. It is released with the last of them.
        """
        options = (self.head_address, self.num_workers, dict(self.worker_options or {}))
        if self._iterator is None and self._session_options != options:
            self._session_options = options
            self._cluster = None

    @untraced
    def warm_up(self, *, wait: bool = False) -> None:
        """Connect to Ray, and start a pipeline with one worker process for the next ``iter()``.

        It returns when this process is connected; the pipeline and the worker process start in the
        background. Call it before the program loads a model or a checkpoint. It does nothing if the
        loader has an iterator with persistent workers, or if its workers are processes of this
        machine: ``iter()`` starts those, as in torch.

        Args:
            wait: Whether to return only when a worker process waits for work.

        Raises:
            ClusterError: Ray does not start, or this process cannot connect to it.
            SerializationError: The dataset cannot be pickled.
        """
        if not self._distributed or self._iterator is not None:
            return
        jobs = self._jobs()
        session = self._state(jobs).session
        session.warm_up(session.store(jobs, self._pickle), binding=initial_binding(self), wait=wait)

    def _note_pickling(self, seconds: float) -> None:
        """Warn once, from the second epoch on, if every ``iter()`` pickles the dataset slowly.

        dpex must pickle it every time: only its bytes show whether it has changed.
        """
        if seconds < tuning.SLOW_PICKLING_S or self.persistent_workers:
            return
        if self._pickled_slowly:
            warn_once(
                f"iter() took {seconds:.1f} s to pickle the dataset, and does so in every epoch, "
                "because it may have changed since the last one. Pass persistent_workers=True to "
                "pickle it once, or keep the data in a numpy array, an Arrow table or a file",
                key="dataset size",  # one warning about a large dataset is enough
            )
        self._pickled_slowly = True

    def _pickle(self, job: Any, same_host: bool) -> Pickled:
        readers = Readers(same_host, read_once=not self.persistent_workers)
        started = time.monotonic()
        pickled = dump(job, "loader", readers)
        self._note_pickling(time.monotonic() - started)
        return pickled

    def _jobs(self) -> LoaderJobs:
        job, later = divide(
            self.dataset,
            self.collate_fn,
            self.worker_init_fn,
            auto_collation=self._auto_collation,
            skips_errors=self.on_error == "skip",
            drop_last=self.drop_last,
        )
        stream = self._dataset_kind == DatasetKind.Iterable
        context = self.multiprocessing_context or multiprocessing.get_context()
        return LoaderJobs(job, later, stream, context)

    def check_worker_number_rationality(self) -> None:
        """Check ``num_workers`` against this machine's cores, unless dpex makes the batches."""
        if not self._distributed:
            super().check_worker_number_rationality()

    @untraced
    def __iter__(self) -> BaseDataLoaderIter:
        if isinstance(self._iterator, DistributedIter) and not self._iterator.alive:
            self._iterator = None  # the Ray of its persistent workers is gone
        meter = Meter()
        self._newest = None
        with meter.asked(for_batch=False):
            try:
                iterator = super().__iter__()
            except SerializationError as error:
                # The message names the object. The frames are dpex's, and tell the user nothing.
                raise error.with_traceback(None) from error.__cause__
            own = iterator if isinstance(iterator, DistributedIter | TorchIter) else self._inner()
            if isinstance(own, TorchIter):
                own.read_on()
        self._meter = meter
        if own is not None:
            own.meter = meter
            meter.count_samples_of(own._sampler_iter.epoch)
        return iterator

    @untraced
    def stats(self) -> LoaderStats:
        """Return the statistics of the newest epoch, up to now.

        Returns:
            Statistics whose ``repr()`` shows what bounds the training loop. If torch's own
            iterators load the data, only times, batches, samples and ``in_flight`` are counted.
        """
        return self._meter.stats()

    @property
    def _source(self) -> IndexSource:
        index_sampler = super()._index_sampler
        return IndexSource(
            index_sampler,
            self._auto_collation,
            self.generator,
            self.dataset,
            num_workers=self.num_workers,
            distribute_mode=self._distributed,
        )

    @property
    def _index_sampler(self) -> IndexSampler:
        return IndexSampler(self._source, self._progress)

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, from which another process can resume.

        The position counts delivered batches, not batches in flight. In the middle of an epoch, the
        state holds the generator states from the beginning of the epoch. ``load_state_dict`` does
        not restore the global generators of the training process: save and restore them yourself.

        Returns:
            A dict ``{"version": 2, ...}`` of strings, numbers, lists and dicts, 15 to 55 kB. It
            includes the ``state_dict()`` of every sampler, dataset and iterator that has one. An
            ``IterableDataset`` with a state adds 14 kB for each logical worker. ``checksum`` is
            the SHA-256 of the content.

        Raises:
            RuntimeError: torch's own workers load the data with ``in_order=False``, and do not
                report which batches they have delivered.

        Source:
            The protocol of torchdata's ``StatefulDataLoader``, with dpex's own keys.
        """
        if not self._distributed and self.num_workers and not self.in_order:
            raise RuntimeError(
                "with in_order=False torch's workers do not say which batches they have made: "
                "state_dict() needs in_order=True, or distribute_mode=True"
            )
        return self._progress.state_dict(self._source, persistent_workers=self.persistent_workers)

    @untraced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume at the next ``iter()`` from the position of a loader.

        That loader may have had another ``num_workers``, ``batch_size`` or cluster. With torch's
        ``DistributedSampler`` it may have had another number of ranks. In the middle of an epoch,
        an ``IterableDataset`` must keep ``num_workers`` and ``batch_size``. If the state is from
        the middle of an epoch, dpex calls ``set_epoch`` of the samplers with the state's epoch.

        Args:
            state_dict: The dict that ``state_dict()`` returned; ``{}`` discards a loaded state, so
                the next epoch starts at its beginning.

        Raises:
            TypeError: The state is not a dict, or one of its fields has another type than
                ``state_dict`` returns.
            ValueError: The state has another version, was altered, belongs to another dataset or
                sampler, or does not fit the arguments of this loader. If ``load_state_dict``
                raises, then loader, dataset, sampler and generators are unchanged.

        Source:
            The protocol of torchdata's ``StatefulDataLoader``.
        """
        self._progress.load_state_dict(state_dict, self._source)
        if state_dict.get("dataset") is not None:
            self._end_iterator()  # persistent workers hold copies of the old dataset

    @untraced
    def close(self) -> None:
        """Stop the workers and release their resources; a later ``iter()`` starts new workers."""
        self._end_iterator()
        state, self._cluster = self._cluster, None
        if state is not None:
            state.session.close()

    def _end_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, DistributedIter):
            iterator._shutdown_workers()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, without session, iterator and epoch; a loaded state stays."""
        own = dict.fromkeys(["_cluster", "_chosen", "_iterator", "_newest"])
        progress = Progress(self._progress.pending)
        return {**self.__dict__, **own, "_progress": progress, "_meter": Meter()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DataLoader(DpexDataLoader[T_co]):
    """A ``torch.utils.data.DataLoader`` that uses a Ray cluster if there is one.

    It is ``DpexDataLoader`` with ``distribute_mode=True`` as default. Without a cluster, its
    workers are processes of this machine.

    Args:
        dataset: This and all other arguments are those of ``DpexDataLoader``.
    """

    if not TYPE_CHECKING:  # mypy does not know partialmethod(); the types are the same
        __init__ = functools.partialmethod(DpexDataLoader.__init__, distribute_mode=True)


class _ClusterState:
    """The state that a loader keeps from one iteration to the next."""

    def __init__(self, loader: DpexDataLoader[Any], session: CarrierSession) -> None:
        self.session = session
        self.versions = DatasetVersions()
        self.epochs = SamplerEpochs(loader)
        self._planned_for: dict[str, int] = {}

    def planner_for(self, loader: DpexDataLoader[Any]) -> ChunkPlanner:
        """Return the planner of the last iteration, or a new one if its arguments have changed."""
        assert loader.prefetch_factor is not None
        arguments = {
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "prefetch_bytes": loader.prefetch_bytes,
        }
        if arguments != self._planned_for:
            self._planned_for = arguments
            self._planner = ChunkPlanner(**arguments, claims_cpus=self.session.claims_cpus())
        return self._planner


def _warn_of_ignored(**arguments: tuple[Any, Any]) -> None:
    """Warn once of arguments that are given, although torch's own workers ignore them.

    Args:
        **arguments: Value and default of each argument.
    """
    given = [
        f"{name}={value!r}" for name, (value, default) in arguments.items() if value != default
    ]
    if given:
        warn_once(
            f"distribute_mode=False ignores {', '.join(given)}. Pass distribute_mode=True, or use "
            "dpex.DataLoader, whose default it is",
        )


def _check_options(
    distribute_mode: Any, head_address: Any, worker_options: Any, prefetch_bytes: Any
) -> None:
    if not isinstance(distribute_mode, bool):
        raise TypeError(f"distribute_mode must be True or False, got {distribute_mode!r}")
    parse_address(head_address, "head_address")
    check_worker_options(worker_options)
    if not isinstance(prefetch_bytes, int) or prefetch_bytes < 0:
        raise ValueError(f"prefetch_bytes must be an integer >= 0, got {prefetch_bytes!r}")


def _check_skipping(on_error: Any, max_skipped: Any, *, distributed: bool) -> None:
    if on_error not in {"raise", "skip"}:
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    if not isinstance(max_skipped, int) or max_skipped < 0:
        raise ValueError(f"max_skipped must be an integer >= 0, got {max_skipped!r}")
    if on_error == "skip" and not distributed:
        raise ValueError(
            'on_error="skip" needs distribute_mode=True and num_workers > 0: torch\'s own workers '
            "leave no sample out"
        )
