"""``DataLoader`` and ``DpexDataLoader``: torch DataLoaders whose workers are Ray tasks."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch.utils.data
from torch.utils.data import IterableDataset, IterDataPipe

from dpex import tuning
from dpex.carriers.processes.session import ProcessJob, ProcessSession, check_system
from dpex.cluster.connect import PROCESSES, connect, fork_first_workers, parse_address
from dpex.cluster.limits import usable_cores
from dpex.cluster.local import forkserver
from dpex.compat.torch_names import BaseDataLoaderIter, DatasetKind
from dpex.compat.untraced import untraced
from dpex.errors import SerializationError
from dpex.log import announce, warn
from dpex.pipeline.worker_options import WorkerOptions, needs_ray
from dpex.pipeline.worker_options import check as check_worker_options
from dpex.protocol.binding import Binding
from dpex.protocol.chunk_sizes import ChunkPlanner
from dpex.stats import LoaderStats, Meter
from dpex.training.checkpoint import Progress
from dpex.training.cluster_iterator import ClusterIter, initial_binding
from dpex.training.dataset_versions import DatasetVersions
from dpex.training.index_iterator import IndexSampler
from dpex.training.index_source import IndexSource
from dpex.training.local_iterator import LocalIter, local_iterator
from dpex.training.sampler_epochs import SamplerEpochs
from dpex.training.stage_plan import divide
from dpex.training.starting_session import StartingSession, UnstoredJob
from dpex.transforms.mapped import MappedDataset
from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import Pickled, dump
from dpex.worker.inherited_job import Bequest
from dpex.worker.state_watch import is_watchable
from dpex.worker.training_settings import InheritedSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.utils.data import Dataset, Sampler

    from dpex.pipeline.session import Session
    from dpex.training.starting_session import PickleJob
    from dpex.transforms.stage import Stage
    from dpex.worker.later_stage import StageJob
    from dpex.worker.map_style import Job

    _Session = Session | StartingSession | ProcessSession

__all__ = ["DEFAULT_MAX_SKIPPED", "DEFAULT_PREFETCH_BYTES", "DataLoader", "DpexDataLoader"]

T_co = TypeVar("T_co", covariant=True)

DEFAULT_PREFETCH_BYTES = 512 << 20
DEFAULT_MAX_SKIPPED = 100


class DpexDataLoader(torch.utils.data.DataLoader[T_co]):
    """A ``torch.utils.data.DataLoader`` whose workers are Ray tasks, here or on a cluster.

    The arguments up to ``in_order`` are torch's and keep their meaning. ``docs/semantics.md``
    compares every argument with torch. With ``distribute_mode=False`` or ``num_workers=0``, torch's
    own iterators load the data. The constructor starts nothing: the first ``iter()`` connects to
    Ray. Iteration raises an exception of a worker with its own type, as torch does. dpex's own
    errors are subclasses of ``DpexError``.

    Args:
        dataset: A map-style dataset, or an ``IterableDataset``, of which every logical worker reads
            a copy, as in torch. Every ``iter()`` pickles the dataset, and sends it only if its
            bytes have changed. With ``persistent_workers`` only the first ``iter()`` pickles it.
        batch_size: Samples per batch; None disables automatic batching.
        shuffle: Whether to draw a new permutation for every epoch.
        sampler: Iterable of indices. The training process draws from it, no further ahead than
            ``prefetch_factor`` and ``prefetch_bytes`` allow.
        batch_sampler: Iterable of lists of indices.
        num_workers: Number of logical workers, and the limit on parallel tasks. 0 loads the data in
            the training process.
        collate_fn: Makes a batch from a list of samples, in the worker process.
        pin_memory: Whether batches arrive in page-locked memory.
        drop_last: Whether to drop an incomplete last batch.
        timeout: Seconds to wait for a batch before a ``RuntimeError``; 0 waits without a limit.
        worker_init_fn: Function called with the worker id before a logical worker's first sample.
        multiprocessing_context: How torch starts workers. With a local Ray, ``"fork"`` (torch's
            default on Linux before Python 3.14) forks the worker processes from the training
            process; other methods do not. On a cluster it has no effect.
        generator: Generator of the sampler's seed and of the workers' base seed.
        prefetch_factor: Batches per logical worker that may always be in flight; 2 if None.
        persistent_workers: Whether workers keep their copies of the dataset across epochs.
        pin_memory_device: Deprecated by torch.
        in_order: Whether batches come in the sampler's order. If False, they come as workers finish
            them.
        distribute_mode: Whether workers are Ray tasks. False by default; ``DataLoader`` is this
            class with True.
        head_address: The Ray to use. ``"auto"``: the Ray that this process is connected to, else
            ``RAY_ADDRESS``, else this user's cluster on this machine, else a local Ray.
            ``"cluster"``: the same without a local Ray. ``"local"``: always a local Ray. A local
            Ray ends with the process. ``"host:port"``: the cluster at this address, of which this
            machine must be a node. ``"ray://host:port"``: the cluster at this address, through Ray
            Client. ``"processes"``: no Ray; each worker is a process of this machine, which starts
            at ``iter()`` as torch's workers do.
        worker_options: Ray options of one worker, as ``Dataset.map_batches`` takes them:
            ``num_cpus``, ``memory``, ``resources``, ``accelerator_type``, ``label_selector``,
            ``fallback_strategy``, ``runtime_env``. ``scheduling_strategy`` is deprecated.
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
        self._warmed: StartingSession | None = None
        # The values for which the session was made.
        self._session_options: tuple[Any, ...] | None = None
        self._progress = Progress()
        self._meter = Meter()
        self._newest: weakref.ref[ClusterIter | LocalIter] | None = None
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
            _warn_once(
                "accelerate",
                "Accelerate makes a plain torch DataLoader of this DpexDataLoader: its workers run "
                "on this machine. Call dpex.integrations.accelerate.prepare(accelerator, ...) in "
                "place of accelerator.prepare(...)",
            )
        return bool(self._accelerate_knows)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool | None) -> None:
        self._accelerate_knows = prepared

    @property
    def _forks(self) -> bool:
        """Whether torch would fork its workers from this process."""
        context = self.multiprocessing_context or multiprocessing
        # Without allow_none, this call would set the start method. The first of all methods is the
        # platform's default.
        method = context.get_start_method(allow_none=True)
        return (method or multiprocessing.get_all_start_methods()[0]) == "fork"

    def _get_iterator(self) -> BaseDataLoaderIter:
        if not self._distributed:
            if self.distribute_mode:
                _announce_once(
                    "num_workers=0: this process makes the batches, as with torch. Set num_workers "
                    "to the number of tasks that may make batches at once"
                )
            return self._record(local_iterator(self))

        if self.prefetch_factor <= 0:  # type: ignore[operator]  # for None, torch's TypeError
            raise AssertionError(
                f"prefetch_factor must be greater than 0, got {self.prefetch_factor}"
            )
        self._drop_outdated_session()
        jobs = self._jobs()
        state = self._cluster
        if state is None or not state.session.alive:
            state = self._cluster = _ClusterState(self, self._new_session(jobs))
        session = state.session
        stored: Any = None
        settings: Any = InheritedSettings()
        if isinstance(session, ProcessSession):
            stored = self._process_job(jobs)
        else:
            stored = session.store(jobs.pickle_job, jobs.pickled_stages)
            settings = Settings.now(forks=self._forks)
        return self._record(
            ClusterIter(
                self,
                stored,
                state.session,
                state.planner_for(self),
                state.versions,
                state.epochs,
                max_skipped=self.max_skipped,
                settings=settings,
                seeded=self._progress.seeded,
            )
        )

    def _new_session(self, jobs: _Jobs) -> _Session:
        if self.head_address == PROCESSES:
            self._check_processes(jobs)
            return ProcessSession(self.num_workers, persistent=self.persistent_workers)
        warmed, self._warmed = self._warmed, None
        if warmed is not None and warmed.alive:
            return warmed
        session = self._starting_session(jobs, warms_up=False)
        return session or self._connected(jobs.bequest)

    def _process_job(self, jobs: _Jobs) -> ProcessJob:
        """Return what worker processes of this machine start with."""
        context = self.multiprocessing_context or multiprocessing.get_context()
        later = [job for _, job, _ in jobs.later]
        stream = self._dataset_kind == DatasetKind.Iterable
        return ProcessJob(context, jobs.job, later, stream)

    def _check_processes(self, jobs: _Jobs) -> None:
        """Check that processes of this machine can do the loader's work, and say what they ignore.

        Raises:
            ValueError: The work needs Ray.
        """
        check_system()
        needed = [f"worker_options[{name!r}]" for name in needs_ray(self.worker_options or {})]
        needed += [repr(stage) for stage, _, _ in jobs.later if stage.needs_ray]
        if needed:
            raise ValueError(
                f"head_address={PROCESSES!r} cannot meet {', '.join(needed)}: only Ray assigns "
                'resources to worker processes. Pass head_address="local" or a cluster\'s address'
            )
        ignored = [f"worker_options[{name!r}]" for name in self.worker_options or {}]
        ignored += [f"max_workers of {stage!r}" for stage, _, _ in jobs.later if stage.max_workers]
        if ignored:
            _warn_once(
                f"processes {ignored}",
                f"head_address={PROCESSES!r} ignores {', '.join(ignored)}: each logical worker has "
                "one process, which runs all stages",
            )
        cores = usable_cores()
        _announce_once(
            f"{self.num_workers} worker process{'es' * (self.num_workers != 1)} on "
            f"{cores} core{'s' * (cores != 1)} of this machine"
        )

    def _record(self, iterator: ClusterIter | LocalIter) -> ClusterIter | LocalIter:
        """Record dpex's iterator, because a subclass may return another one that contains it."""
        self._newest = weakref.ref(iterator)
        return iterator

    def _inner(self) -> ClusterIter | LocalIter | None:
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
            warmed, self._warmed = self._warmed, None
            if warmed is not None:
                warmed.close()

    def _starting_session(self, jobs: _Jobs, *, warms_up: bool) -> StartingSession | None:
        """Fork first workers, if the next iteration can begin on them while a local Ray starts.

        Args:
            jobs: The loader's jobs.
            warms_up: Whether Ray is to start in a thread also without first workers.
        """
        by_first_workers = (
            self._forks
            and initial_binding(self) is Binding.WATCHED
            and not (jobs.later or self.worker_options)
        )
        if not (by_first_workers or warms_up):
            return None

        def most() -> int:
            """Return 0 if a first worker could not tell whether a batch changes its copy."""
            pickled = jobs.pickle_job(True)
            watchable = is_watchable(len(pickled.head), pickled.size_bytes)
            return self.num_workers if by_first_workers and watchable else 0

        bequest = jobs.bequest if self._forks else None
        connections = fork_first_workers(self.head_address, bequest, most)
        if not (connections or warms_up):
            return None
        return StartingSession(
            functools.partial(self._connected, jobs.bequest),
            connections,
            jobs.pickle_job(True).digest if connections else "",
            self.num_workers,
        )

    def _connected(self, bequest: Callable[[], Bequest]) -> Session:
        connection = connect(self.head_address, bequest=bequest if self._forks else None)
        from dpex.pipeline.session import Session  # loads Ray

        return Session(
            connection,
            worker_options=self.worker_options,
            fork_workers=self._forks,
            num_workers=self.num_workers,
            persistent=self.persistent_workers,
        )

    @untraced
    def warm_up(self, *, wait: bool = False) -> None:
        """Start Ray and the first worker processes in a thread, for the next ``iter()``.

        Call it before the program loads a model or a checkpoint. It starts nothing if the loader
        has workers already, or if none of them are Ray tasks. If the start fails later, the next
        ``iter()`` or ``next()`` raises the error.

        Args:
            wait: Whether to return only when a worker process waits for work. From then on, Ray
                makes all batches.

        Raises:
            ClusterError: Ray does not start. Without ``wait``: for a reason that shows at once.
            SerializationError: The dataset cannot be pickled, and this call had to pickle it.
        """
        if not self._distributed or self.head_address == PROCESSES:
            return
        self._drop_outdated_session()
        sessions = [self._warmed, None if self._cluster is None else self._cluster.session]
        session = next((s for s in sessions if s is not None and s.alive), None)
        if session is None:
            jobs = self._jobs()
            session = self._warmed = self._starting_session(jobs, warms_up=True)
            assert session is not None
            unstored = UnstoredJob(jobs.pickle_job, jobs.pickled_stages)
            session.warm_up(unstored, binding=initial_binding(self))
        if wait and isinstance(session, StartingSession):
            session.started()

    def _note_pickling(self, seconds: float) -> None:
        """Warn once, from the second epoch on, if every ``iter()`` pickles the dataset slowly.

        dpex must pickle it every time: only its bytes show whether it has changed.
        """
        if seconds < tuning.SLOW_PICKLING_S or self.persistent_workers:
            return
        told = self._cluster is not None and self._cluster.session.warned_of_size
        if self._pickled_slowly and not told:
            _warn_once(
                "pickling",
                f"iter() took {seconds:.1f} s to pickle the dataset, and does so in every epoch, "
                "because it may have changed since the last one. Pass persistent_workers=True to "
                "pickle it once, or keep the data in a numpy array, an Arrow table or a file",
            )
        self._pickled_slowly = True

    def _pickle(self, job: Any, same_host: bool) -> Pickled:
        parent = forkserver.fork_parent() if self._forks else None
        readers = Readers(same_host, parent, read_once=not self.persistent_workers)
        started = time.monotonic()
        pickled = dump(job, "loader", readers)
        self._note_pickling(time.monotonic() - started)
        return pickled

    def _jobs(self) -> _Jobs:
        job, later = divide(
            self.dataset,
            self.collate_fn,
            self.worker_init_fn,
            auto_collation=self._auto_collation,
            skips_errors=self.on_error == "skip",
            drop_last=self.drop_last,
        )
        pickle_job = functools.cache(functools.partial(self._pickle, job))
        stages = [(stage, own, functools.partial(self._pickle, own)) for stage, own in later]
        return _Jobs(job, pickle_job, stages)

    def check_worker_number_rationality(self) -> None:
        """Check ``num_workers`` against this machine's cores, unless the workers are Ray tasks."""
        if not self._distributed:
            super().check_worker_number_rationality()

    @untraced
    def __iter__(self) -> BaseDataLoaderIter:
        if isinstance(self._iterator, ClusterIter) and not self._iterator.alive:
            self._iterator = None  # the Ray of its persistent workers is gone
        meter = Meter()
        self._newest = None
        with meter.asked(for_batch=False):
            try:
                iterator = super().__iter__()
            except SerializationError as error:
                # The message names the object. The frames are dpex's, and tell the user nothing.
                raise error.with_traceback(None) from error.__cause__
            own = iterator if isinstance(iterator, ClusterIter | LocalIter) else self._inner()
            if isinstance(own, LocalIter):
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
            Statistics whose ``repr()`` shows what bounds the training loop. If the loader has no
            workers on Ray, only times, batches, samples and ``in_flight`` are counted.
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
        warmed, self._warmed = self._warmed, None
        if state is not None:
            state.session.close()
        if warmed is not None:
            warmed.close()

    def _end_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, ClusterIter):
            iterator._shutdown_workers()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, without session, iterator and epoch; a loaded state stays."""
        own = dict.fromkeys(["_cluster", "_warmed", "_iterator", "_newest"])
        progress = Progress(self._progress.pending)
        return {**self.__dict__, **own, "_progress": progress, "_meter": Meter()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DataLoader(DpexDataLoader[T_co]):
    """``torch.utils.data.DataLoader`` whose workers are Ray tasks unless an argument changes that.

    It is ``DpexDataLoader`` with ``distribute_mode=True`` as default.

    Args:
        dataset: This and all other arguments are those of ``DpexDataLoader``.
    """

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
        distribute_mode: bool = True,
        head_address: str = "auto",
        worker_options: WorkerOptions | None = None,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = DEFAULT_MAX_SKIPPED,
    ) -> None:
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
            distribute_mode=distribute_mode,
            head_address=head_address,
            worker_options=worker_options,
            prefetch_bytes=prefetch_bytes,
            on_error=on_error,
            max_skipped=max_skipped,
        )


@dataclass(frozen=True)
class _Jobs:
    """What an iteration asks of the worker processes.

    Attributes:
        job: The job of the first stage.
        pickle_job: Pickles the job, once for each value of its argument.
        later: The later stages, each with its job and a function that pickles the job.
    """

    job: Job
    pickle_job: PickleJob
    later: Sequence[tuple[Stage, StageJob, PickleJob]]

    @property
    def pickled_stages(self) -> list[tuple[Stage, PickleJob]]:
        """The later stages, each with a function that pickles its job."""
        return [(stage, pickle_job) for stage, _, pickle_job in self.later]

    def bequest(self) -> Bequest:
        """Return the job that forks of this process inherit."""
        return Bequest(self.pickle_job(True), self.job)


class _ClusterState:
    """The state that a loader keeps from one iteration to the next."""

    def __init__(self, loader: DpexDataLoader[Any], session: _Session) -> None:
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


_warned: set[str] = set()


def _warn_once(key: str, text: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warn(text)


@functools.cache
def _announce_once(text: str) -> None:
    announce(text)


def _warn_of_ignored(**arguments: tuple[Any, Any]) -> None:
    """Warn once of arguments that are given, although torch's own workers ignore them.

    Args:
        **arguments: Value and default of each argument.
    """
    given = [
        f"{name}={value!r}" for name, (value, default) in arguments.items() if value != default
    ]
    if given:
        _warn_once(
            " ".join(given),
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
