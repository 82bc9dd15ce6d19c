"""A session's pipelines in the pipeline actor, as the training process knows them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import ray

from dpex import tuning
from dpex.carriers.ray.actor import PipelineActor
from dpex.carriers.ray.node_health import Nodes
from dpex.carriers.ray.ray_dataset import PipelineSpec
from dpex.cluster.releasing import release_later
from dpex.worker.actor_calls import ACTOR_DIED
from dpex.worker.process_identity import place_of

__all__ = [
    "ACTOR_LOST",
    "PipelineStart",
    "RemotePipelines",
    "RunToken",
    "wait_for_release",
    "warn_of_holders",
]

logger = logging.getLogger("dpex")

_SAMPLES_OF_THE_LAST_EPOCH = (
    "waiting for workers that still make samples of the last epoch: %.0f s by now"
)

ACTOR_LOST = (ray.exceptions.RayActorError, *ACTOR_DIED)
"""Errors of a pipeline actor that dpex replaces, because it is dead or cannot be reached."""


class RunToken:
    """Ownership token of a run.

    When it is garbage-collected, even after an interrupt, the run is cancelled.
    """

    def __init__(self) -> None:
        self._cancel: Callable[[], None] = lambda: None
        self._pipeline: _RemotePipeline | None = None
        self._finalizer: weakref.finalize[[Callable[[], None]], RunToken] | None = None

    def attach(self, actor: PipelineActor, pipeline: _RemotePipeline, run: str) -> None:
        """Attach the token to a run, before the run begins."""
        self._cancel = functools.partial(_cancel, actor, pipeline.key, run)
        self._pipeline = pipeline
        self._finalizer = weakref.finalize(self, release_later, self._cancel)
        self._finalizer.atexit = False

    def abandon_pipeline(self) -> None:
        """Use the pipeline for no further run, because it has lost a node."""
        if self._pipeline is not None:
            self._pipeline.ready = False

    def cancel(self) -> None:
        """Cancel the run now."""
        self._cancel()
        if self._finalizer is not None:
            self._finalizer.detach()


def _cancel(actor: PipelineActor, pipeline_key: str, run: str) -> None:
    # A Ray Client may have lost its server without knowing it yet.
    with contextlib.suppress(Exception):
        if ray.is_initialized():
            actor.handle.cancel.remote(pipeline_key, run)


@dataclass(eq=False)
class _RemotePipeline:
    key: str
    spec_key: tuple[str, ...]
    token: weakref.ref[RunToken]
    # Whether the pipeline is known to have started its last run.
    ready: bool = False

    @property
    def busy(self) -> bool:
        return self.token() is not None


@dataclass(frozen=True)
class PipelineStart:
    """A pipeline that was asked to begin a run.

    Attributes:
        pipeline: The pipeline.
        answer: The pipeline actor's answer; None for a new pipeline, which needs no confirmation.
    """

    pipeline: _RemotePipeline
    answer: ray.ObjectRef | None


class RemotePipelines:
    """The pipelines of one session."""

    def __init__(self, actor: PipelineActor, nodes: Nodes) -> None:
        self._actor = actor
        self._nodes = nodes
        self._pipelines: list[_RemotePipeline] = []
        self._lock = threading.Lock()

    def begin(self, run: str, spec: PipelineSpec, token: RunToken) -> PipelineStart:
        """Start the run with this key on an idle pipeline with the same spec key, or on a new one.

        Close the other idle pipelines.
        """
        with self._lock:
            idle = [pipeline for pipeline in self._pipelines if not pipeline.busy]
            for pipeline in idle:
                pipeline.token = weakref.ref(token)
        begins = None
        for pipeline in idle:
            if begins is None and pipeline.ready and pipeline.spec_key == spec.key:
                # Not ready before it answers: after an interrupt, the pipeline may begin this run
                # late, when the next run has started.
                pipeline.ready = False
                token.attach(self._actor, pipeline, run)
                answer = self._actor.handle.begin.remote(pipeline.key, run)
                begins = PipelineStart(pipeline, answer)
            else:
                self._drop(pipeline)
        return begins or self.new(run, spec, token)

    def begun(self, begins: PipelineStart) -> bool:
        """Wait for a pipeline to begin; return whether it has, and drop it if not."""
        if begins.answer is None:
            return True
        loses_state = False
        with contextlib.suppress(ray.exceptions.RayTaskError):  # the pipeline failed to open
            begins.pipeline.ready, loses_state = self._nodes.wait_for_answer(
                begins.answer, _SAMPLES_OF_THE_LAST_EPOCH
            )
        if not begins.pipeline.ready:
            self._drop(begins.pipeline)
        if loses_state:
            logger.warning(
                "the persistent workers of the last epoch are lost, or a worker has needed more "
                "than %.0f s for the sample that it was making. State that the workers kept "
                "(generators, counters, the result of worker_init_fn) starts again",
                tuning.STATE_QUIET_S,
            )
        return begins.pipeline.ready

    def new(self, run: str, spec: PipelineSpec, token: RunToken) -> PipelineStart:
        """Start a pipeline that first serves the run with this key."""
        pipeline = _RemotePipeline(uuid.uuid4().hex, spec.key, weakref.ref(token), ready=True)
        with self._lock:
            self._pipelines.append(pipeline)
        token.attach(self._actor, pipeline, run)
        self._actor.handle.open.remote(pipeline.key, replace(spec, pipeline_key=pipeline.key), run)
        return PipelineStart(pipeline, None)

    def _drop(self, pipeline: _RemotePipeline) -> None:
        """Close a pipeline."""
        # In this order: after an interrupt between the two, a second close() does no harm.
        self._actor.handle.close.remote(pipeline.key)
        with self._lock, contextlib.suppress(ValueError):
            self._pipelines.remove(pipeline)

    def close(self, *, wait: bool = False) -> None:
        """Close all pipelines.

        Args:
            wait: Whether to return only when worker processes have dropped their dataset copies.
        """
        if self._actor.alive:
            closed = list(self._pipelines)
            for pipeline in closed:
                self._drop(pipeline)
            if wait:
                wait_for_release(self._actor, [pipeline.key for pipeline in closed])


def wait_for_release(actor: PipelineActor, pipeline_keys: Sequence[str]) -> None:
    """Wait until worker processes hold no dataset copies of iterations that are over.

    torch waits as long for its workers. After that, the function warns of each process that still
    holds a copy.

    Args:
        actor: The pipeline actor.
        pipeline_keys: The pipelines of the iterations.
    """
    held: list[list[str]] = []
    # Without the actor, its worker processes drop everything, and nothing can wait for them.
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ConnectionError):
        answers = [actor.handle.released.remote(key) for key in pipeline_keys]
        held = ray.get(answers, timeout=tuning.END_S + tuning.HEAD_ANSWER_S)
    warn_of_holders(itertools.chain.from_iterable(held))


def warn_of_holders(processes: Iterable[str]) -> None:
    """Log a warning for each process that still holds a dataset copy; see ``process_name``."""
    for process in processes:
        node, pid = place_of(process)
        logger.warning(
            "worker process %d on node %s still holds its copy of the dataset %.0f s after the end "
            "of the iteration, because it is making a sample. The files, locks and ports of the "
            "copy are free when the sample ends",
            pid,
            node,
            tuning.END_S,
        )
