"""A loader's resources on the cluster: its pickled job and its pipelines."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import sys
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from dpex import tuning
from dpex.background_thread import BackgroundThread
from dpex.carriers.ray.actor import PipelineActor, get_pipeline_actor
from dpex.carriers.ray.metrics import publish
from dpex.carriers.ray.node_health import Nodes
from dpex.carriers.ray.ray_dataset import LaterStage, PipelineSpec, store_job
from dpex.carriers.ray.remote_pipelines import ACTOR_LOST, PipelineStart, RemotePipelines, RunToken
from dpex.carriers.ray.remote_run import RemoteRun
from dpex.carriers.ray.tasks_or_actors import wants_actors
from dpex.carriers.ray.wait_text import likely_cause, wait_text
from dpex.carriers.ray.worker_options import WorkerOptions, unmet
from dpex.cluster.connect import Connection, cluster_size, cpu_users
from dpex.cluster.interrupted_exit import importing
from dpex.cluster.local.launch import make_no_errors_of_rays_warnings, within
from dpex.cluster.machine_share import free_cores
from dpex.cluster.own_process import OwnProcess
from dpex.cluster.releasing import be_ready, release_later
from dpex.compat.cluster_state import starts_no_nodes
from dpex.errors import ClusterError, DatasetTooLargeError, SerializationError
from dpex.log import warn_once
from dpex.protocol.binding import Binding
from dpex.wire.local_modules import by_value, changed
from dpex.wire.pickling import Pickled
from dpex.wire.segments import readable_segments
from dpex.worker.training_settings import Settings

if TYPE_CHECKING:
    from dpex.stats import LoaderStats
    from dpex.transforms.stage import Stage
    from dpex.worker.loader_jobs import LoaderJobs, PickleJob

__all__ = ["Session", "StoredJob"]

logger = logging.getLogger("dpex")

_RECEIVER = "dpex.wire.receiver"
# Numbers the sessions of this process, for the tag of their metrics.
_numbers = itertools.count()


@dataclass(eq=False)
class StoredJob:
    """A job that worker processes can read.

    Attributes:
        key: Digest of the job's bytes.
        refs: Reference to the bytes in the object store; empty once the session is closed.
        later: The later stages, with their stored jobs.
    """

    key: str
    refs: list[ray.ObjectRef]
    later: tuple[LaterStage, ...] = ()


class Session(OwnProcess):
    """A loader's resources on the cluster, from its first iteration until it is closed.

    Args:
        connection: This process's connection to Ray.
        num_workers: Number of logical workers, and of a later stage's worker processes unless the
            stage sets ``max_workers``.
        persistent: Whether logical workers outlive an iteration.
        worker_options: Ray options of one worker process.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        num_workers: int,
        persistent: bool,
        worker_options: WorkerOptions | None,
    ) -> None:
        super().__init__()
        make_no_errors_of_rays_warnings()
        self._connection = connection
        self._num_workers = num_workers
        self._persistent = persistent
        self._options: dict[str, Any] = dict(worker_options or {})
        if self._connection.runtime_env:
            own = dict(self._options.get("runtime_env") or {})
            modules = [*self._connection.runtime_env["py_modules"], *own.get("py_modules", [])]
            self._options["runtime_env"] = {**own, "py_modules": modules}
        self._check_resources()
        self._number = str(next(_numbers))
        self._nodes = Nodes()
        self._served = False
        self._stored: StoredJob | None = None
        # All jobs that an iteration may still use.
        self._jobs: weakref.WeakSet[StoredJob] = weakref.WeakSet()
        # The run of ``warm_up``, until an iteration takes over its pipeline.
        self._warming: RemoteRun | None = None
        self._start()

    def _check_resources(self) -> None:
        """Raise if no node can meet ``worker_options``, or warn if such a node may still join.

        Raises:
            ClusterError: No node can join the local Ray, and it does not meet the options.
        """
        missing = self._lacking() if self._options else None
        if missing is None:
            return
        if self._connection.kind == "local":
            raise ClusterError(
                f"worker_options asks for {missing}. Ask for less, or use a cluster with a node "
                "that has it"
            )
        logger.warning(
            "worker_options asks for %s. The loader waits until such a node joins", missing
        )

    def _lacking(self) -> str | None:
        """Return which options no node meets, as text, or None; see ``unmet``."""
        if not cluster_size()[1]:
            return None  # no node with a CPU has joined yet, and its resources are unknown
        return unmet(self._options, ray.nodes())

    def check_still_possible(self, waited_s: float) -> None:
        """Raise if the loader waits in vain for a node that meets ``worker_options``.

        Args:
            waited_s: How long the loader has waited for a batch.

        Raises:
            ClusterError: No node meets the options, no such node has joined for minutes, and the
                cluster has no autoscaler to start one.
        """
        if not self._options or waited_s < tuning.NODE_JOINS_S:
            return

        def missing_for_ever() -> str | None:
            return self._lacking() if starts_no_nodes() else None

        try:
            missing = within(tuning.HEAD_ANSWER_S, missing_for_ever)
        except TimeoutError:  # a dead head is left to Ray
            return
        if missing is not None:
            raise ClusterError(
                f"worker_options asks for {missing}. No such node has joined for {waited_s:.0f} s, "
                "and the cluster has no autoscaler. Ask for less, or add such a node"
            )

    @property
    def alive(self) -> bool:
        """Whether the session is open and its Ray is still this process's Ray."""
        return not self.forked and self._release.alive and self._actor.connected

    def claims_cpus(self) -> bool:
        """Return whether Ray's CPUs limit the tasks; a local Ray has logical CPUs to spare."""
        return self._connection.kind != "local"

    def first_tasks(self) -> int:
        """Return the number of free CPUs of a cluster, or of free cores with a local Ray."""
        if self._connection.kind == "local":
            return free_cores()
        claim = float(self._options.get("num_cpus", 1)) or 1.0
        return max(1, int(ray.available_resources().get("CPU", 0) / claim))

    def store(self, jobs: LoaderJobs, pickle: PickleJob) -> StoredJob:
        """Store a loader's jobs for the worker processes, unless the same bytes are stored.

        Returns:
            The stored jobs, for ``open``.

        Raises:
            ClusterError: No node has the resources that a worker of a later stage requests.
            DatasetTooLargeError: The pickled job is larger than the object store.
            SerializationError: An object in the job cannot be pickled.
        """
        here_only = self._connection.single_host
        # Other machines lack the files beside the user's script, and a worker process on this
        # machine may have imported another version of them.
        differ = changed()
        try:
            with by_value() if differ or not here_only else contextlib.nullcontext():
                pickled = pickle(jobs.job, here_only)
                pickled_stages = [pickle(job, here_only) for _, job in jobs.later]
        except SerializationError as error:
            if differ:
                error.add_note(
                    "dpex sends your modules by value, because these have changed since their "
                    f"import: {', '.join(differ)}. After a restart, worker processes import them"
                )
            raise
        known = self._stored
        if known is None or known.key != pickled.digest:
            known = StoredJob(pickled.digest, [self._put(pickled)])
        if [stage.job_key for stage in known.later] != [job.digest for job in pickled_stages]:
            stages = [
                self._later(number, stage, job)
                for number, ((stage, _), job) in enumerate(
                    zip(jobs.later, pickled_stages, strict=True), 1
                )
            ]
            known = replace(known, later=tuple(stages))
        self._stored = known
        self._jobs.add(known)
        return known

    def settings(self) -> Settings:
        """Return the settings of this process, which worker processes apply."""
        return Settings.now()

    def warm_up(self, job: StoredJob, *, binding: Binding, wait: bool) -> None:
        """Start a pipeline and its first task, which wait for the next iteration.

        Args:
            job: The jobs that ``store`` returned.
            binding: As for ``open``.
            wait: Whether to return only when a worker process waits for work.

        Raises:
            ClusterError: As the function that ``open`` returns.
        """
        opening = self.open(uuid.uuid4().hex, job, binding=binding, pin_device=None)
        self._warming = opening()
        while not self._warming.start_task(tuning.LOOK_S if wait else 0) and wait:
            self._nodes.look()

    def _put(self, pickled: Pickled) -> ray.ObjectRef:
        capacity = _store_capacity()
        if pickled.size_bytes > capacity:
            larger = (
                "set DPEX_OBJECT_STORE_MEMORY to more bytes"
                if self._connection.kind == "local"
                else "start Ray's nodes with a larger --object-store-memory"
            )
            raise DatasetTooLargeError(
                f"the pickled dataset has {_in_units(pickled.size_bytes)}, but Ray's object store "
                f"on this node holds {_in_units(capacity)}. Let the dataset keep paths and read "
                "them in __getitem__, build it on the nodes with dpex.datasets.on_node, or "
                f"{larger}"
            )
        large = pickled.size_bytes > tuning.LARGE_DATASET_BYTES
        if large and not self._connection.single_host:
            warn_once(
                f"the pickled dataset has {pickled.size_bytes >> 20:,} MB, which travel to every "
                "node that reads from it. dpex.datasets.on_node(YourDataset, ...) builds it there "
                "instead, from its arguments",
                key="dataset size",
            )
        return store_job(pickled, same_host=self._connection.single_host)

    def _later(self, number: int, stage: Stage, pickled: Pickled) -> LaterStage:
        environment = self._options.get("runtime_env")
        options: dict[str, Any] = {"num_cpus": stage.num_cpus}
        if stage.num_gpus:
            options["num_gpus"] = stage.num_gpus
        if stage.resources:
            options["resources"] = dict(stage.resources)
        if stage.label_selector:
            options["label_selector"] = dict(stage.label_selector)
        _check_stage(number, stage, options)
        if environment:
            options["runtime_env"] = environment
        most = stage.max_workers or self._num_workers
        if stage.num_gpus:
            free = ray.available_resources().get("GPU", 0.0)
            most = min(most, max(1, int(free / stage.num_gpus)))
        return LaterStage(
            [store_job(pickled, same_host=self._connection.single_host)],
            pickled.digest,
            options,
            most,
            capped=stage.max_workers is not None,
            keeps_processes=bool(stage.num_gpus),
        )

    def open(
        self,
        run: str,
        job: StoredJob,
        *,
        binding: Binding,
        pin_device: int | None,
    ) -> Callable[[], RemoteRun]:
        """Start an iteration without waiting for it.

        Args:
            run: Key of the iteration.
            job: The jobs that ``store`` returned.
            binding: Initial binding of logical workers to processes.
            pin_device: As for ``Decoder``.

        Returns:
            A function that waits until the iteration has started, and returns its ``RemoteRun``.
            The caller can draw indices before it calls the function. The function raises
            ``ClusterError`` or ``DatasetTooLargeError`` if worker processes cannot get the job.
        """
        make_no_errors_of_rays_warnings()
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.end(wait=False)
        if self._actor.lost:
            self._replace_actor()
        spec = PipelineSpec(
            job.refs,
            job.key,
            self._actor.name,
            claims_cpus=self.claims_cpus(),
            num_workers=self._num_workers,
            binding=binding,
            persistent=self._persistent,
            options=self._options,
            later=job.later,
            reader="" if self._connection.kind == "client" else readable_segments(),
            in_actors=wants_actors(),
        )
        token = RunToken()

        def new() -> PipelineStart:
            return self._pipelines.new(run, replace(spec, actor_name=self._actor.name), token)

        begins = self._or_on_new_actor(lambda: self._pipelines.begin(run, spec, token), new)
        # The first chunk needs Ray Data, which takes about as long to load as the actor to start.
        if _RECEIVER not in sys.modules:
            loading = BackgroundThread(target=_load_ray_data, name="dpex-load", daemon=True)
            loading.start()
            importing.add(loading)

        def begun() -> PipelineStart:
            # A pipeline that has not begun this run still makes batches of a cancelled run.
            return begins if self._pipelines.begun(begins) else new()

        def opened() -> RemoteRun:
            pipeline = self._or_on_new_actor(begun, new).pipeline
            self._served = True
            return RemoteRun(
                self._actor,
                pipeline.key,
                run,
                self._nodes,
                token,
                pin_device=pin_device,
                through_client=self._connection.kind == "client",
                persistent=self._persistent,
            )

        return opened

    def _or_on_new_actor(
        self, start: Callable[[], PipelineStart], new: Callable[[], PipelineStart]
    ) -> PipelineStart:
        """Call ``start``, or ``new`` on a new pipeline actor if the old actor has died."""
        try:
            return start()
        except ACTOR_LOST:
            self._replace_actor()
            return new()

    def _replace_actor(self) -> None:
        self._actor.lost = True
        self._release()  # if the actor is only unreachable, its pipelines end later
        if self._persistent and self._served:
            logger.warning("the pipeline actor has died. State of persistent workers starts again")
        self._start()

    def _start(self) -> None:
        """Use this process's pipeline actor, or start an actor in place of a lost one."""
        self._actor: PipelineActor = get_pipeline_actor(self._connection.runtime_env)
        self._pipelines = RemotePipelines(self._actor, self._nodes)
        # Iterators refer to the session, so it outlives a loader that is dropped before them.
        self._release = weakref.finalize(self, release_later, self._pipelines.close)
        be_ready()
        self._release.atexit = False

    def publish(self, stats: LoaderStats, before: LoaderStats) -> None:
        """Publish the increase of an epoch's statistics; see ``metrics``."""
        publish(stats, before, loader=self._number)

    def waiting_text(self, *, tasks: int | None, in_flight: int) -> str:
        """Return a text that says why a batch is late; see ``wait_text``.

        Args:
            tasks: Number of tasks that make batches now; None if it is unknown.
            in_flight: Batches requested and not delivered yet.
        """
        try:
            ray_text, cause = within(
                tuning.HEAD_ANSWER_S, functools.partial(self._ray_and_cause, tasks)
            )
        except Exception as error:  # the loader can still wait
            ray_text, cause = "Ray", f"Ray does not report its CPUs: {error}"
        return wait_text(ray_text, tasks=tasks, in_flight=in_flight, cause=cause)

    def _ray_and_cause(self, tasks: int | None) -> tuple[str, str]:
        """Return the arguments ``ray`` and ``cause`` of ``wait_text``.

        The head answers some of these calls, and Ray waits for it without a limit.
        """
        _, cpus, _ = cluster_size()
        ray_text, free = str(self._connection), None
        if self.claims_cpus():
            free = ray.available_resources().get("CPU", 0.0)
            ray_text += f", of which {free:g} free"
        cause = likely_cause(
            tasks=tasks,
            cpus=cpus,
            free_cpus=free,
            lacking=self._lacking() if self._options else None,
            users=cpu_users() if self.claims_cpus() else "",
        )
        if self._stored is not None and any(s.keeps_processes for s in self._stored.later):
            gpus = ray.available_resources().get("GPU", 0)
            cause += (
                f". {gpus:g} GPUs are free. A loader whose stage has GPUs keeps them until its "
                "close()"
            )
        return ray_text, cause

    def name_dead_nodes(self) -> None:
        """Log which nodes have died; see ``Nodes.look``."""
        with contextlib.suppress(ClusterError):  # the wait for the next batch raises it
            self._nodes.look()

    def close(self) -> None:
        """Close the pipelines and release the stored jobs; running tasks stop."""
        if self.forked:
            return
        self._stored = None
        for job in self._jobs:
            job.refs, job.later = [], ()
        if self._release.alive:
            self._pipelines.close(wait=True)
            self._release.detach()


def _load_ray_data() -> None:
    with contextlib.suppress(ImportError):  # the code that needs it raises the error again
        importlib.import_module(_RECEIVER)


def _in_units(size_bytes: int) -> str:
    large = size_bytes >= 1 << 30
    return f"{size_bytes / (1 << (30 if large else 20)):,.1f} {'GiB' if large else 'MiB'}"


def _store_capacity() -> int:
    """Return the size of this node's object store, in bytes."""
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here:
            return int(node["Resources"].get("object_store_memory", 1 << 62))
    return 1 << 62


def _check_stage(number: int, stage: Stage, options: dict[str, Any]) -> None:
    """Raise ``ClusterError`` unless a node meets the options of a worker of a stage.

    If no node has a CPU, the nodes that make batches have not joined yet, and their resources are
    unknown.
    """
    nodes = ray.nodes()
    if not any(node["Alive"] and node["Resources"].get("CPU") for node in nodes):
        return
    if (missing := unmet(options, nodes)) is not None:
        what = getattr(stage.fn, "__qualname__", type(stage.fn).__qualname__)
        raise ClusterError(
            f"stage {number} ({what}) asks for {missing}. Each of its workers needs all of it. "
            "Start a node that has it, or change the Stage's num_cpus, num_gpus, resources or "
            "label_selector"
        )
