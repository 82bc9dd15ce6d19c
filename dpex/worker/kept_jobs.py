"""The jobs that a worker process keeps for a pipeline, until the pipeline is closed."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from dpex import tuning
from dpex.cluster.releasing import be_ready, release_later
from dpex.compat.objects import private_mappings
from dpex.protocol.chunks import ALL_ITERATIONS
from dpex.worker.actor_calls import ACTOR_DIED, pipeline_actor
from dpex.worker.module_sources import import_from
from dpex.worker.process_identity import process_name

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dpex.wire.pickling import Pickled

__all__ = ["is_over", "read_job", "release_when_closed", "working"]

_stored_jobs: dict[str, Pickled] = {}
# The open pipelines that this process keeps jobs for, each with the keys of these jobs.
_jobs_of: dict[str, set[str]] = {}
# By pipeline: how many of its iterations have ended, as far as this process knows.
_ended: dict[str, int] = {}
# The pipelines for which a task in this process is making batches, each with the iteration.
_at_work: dict[str, int] = {}
# By pipeline: what to do after the work for an iteration that is over.
_after_work: dict[str, Callable[[], None]] = {}
_keeping = threading.Lock()


def read_job(job: list[ray.ObjectRef], job_key: str) -> Any:
    """Return a new copy of a job; its large arrays are copied on write where possible."""
    from dpex.wire.pickling import Pickled, load, own_copy

    pickled = _stored_jobs.get(job_key)
    if pickled is None:
        search_path, sources, authkey, *content = ray.get(job[0])
        if authkey is not None:
            multiprocessing.current_process().authkey = authkey
        # A worker process can import the script's modules, as torch's spawned workers can, if its
        # node has the directories and archives.
        sys.path.extend(p for p in search_path if p not in sys.path and Path(p).exists())
        import_from(sources)
        pickled = _stored_jobs[job_key] = Pickled(*content)
    buffers = pickled.buffers
    mapped = dict(zip(map(id, buffers), private_mappings(buffers), strict=True))

    def take(view: Any) -> Any:
        own = mapped[id(view)]
        return own_copy(view) if own is None else own

    copy = load(pickled, take)
    if hasattr(copy, "pickled_bytes"):  # a ``Job``, and no ``StageJob``
        return replace(copy, pickled_bytes=(len(pickled.head), pickled.size_bytes))
    return copy


def release_when_closed(actor_name: str, pipeline_key: str, job_key: str) -> None:
    """Drop a pipeline's jobs and copies as soon as the actor has closed the pipeline or has died.

    The process may have no task at that time. So one pending call for each pipeline waits at the
    pipeline actor.
    """
    with _keeping:
        known = pipeline_key in _jobs_of
        _jobs_of.setdefault(pipeline_key, set()).add(job_key)
    if not known:
        be_ready()
        _await_end(actor_name, pipeline_key, 0)


def is_over(pipeline_key: str, iteration: int) -> bool:
    """Return whether nothing waits for the batches of an iteration, as far as this process knows.

    The iteration has ended, or the pipeline is closed, or the pipeline actor has died.

    Args:
        pipeline_key: The pipeline; see ``release_when_closed``.
        iteration: Number of the iteration.
    """
    return pipeline_key not in _jobs_of or iteration <= _ended.get(pipeline_key, 0)


def _await_end(actor_name: str, pipeline_key: str, seen: int) -> None:
    """Drop copies at the next end of an iteration, and everything once the pipeline is closed.

    Args:
        actor_name: Name of the pipeline actor.
        pipeline_key: The pipeline.
        seen: For how many ends this process has dropped its copies.
    """

    def release(confirm: Callable[[], None] | None = None) -> None:
        with _keeping:
            _jobs_of.pop(pipeline_key, None)
            _ended.pop(pipeline_key, None)
        release_later(functools.partial(_release, pipeline_key, confirm))

    def answered(future: Future[int | None]) -> None:
        error = future.exception()
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ACTOR_DIED):
            # The pipeline actor is temporarily unreachable.
            _later(tuning.ASK_AGAIN_S, _await_end, actor_name, pipeline_key, seen)
        elif error is not None:
            release()
        elif (ends := future.result()) is not None:
            _ended[pipeline_key] = ends
            release_later(functools.partial(_drop_copies, actor_name, pipeline_key, ends))
        else:
            release(functools.partial(_confirm_close, actor_name, pipeline_key))
            _later(tuning.END_S, _end_work, pipeline_key)

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # the actor no longer exists
        actor = pipeline_actor(actor_name)
        end = actor.next_end.remote(pipeline_key, process_name(), seen).future()
        end.add_done_callback(answered)
        return
    release()


def _confirm_close(actor_name: str, pipeline_key: str) -> None:
    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # the actor no longer exists
        pipeline_actor(actor_name).next_end.remote(pipeline_key, process_name(), ALL_ITERATIONS)


def _drop_copies(actor_name: str, pipeline_key: str, ends: int) -> None:
    """Drop the copies of iterations that have ended; during work for one of them, after it."""
    with _keeping:
        if _at_work.get(pipeline_key, ends + 1) <= ends:
            again = functools.partial(_drop_copies, actor_name, pipeline_key, ends)
            _after_work[pipeline_key] = again
            return
    from dpex.worker.dataset_copies import release_copies  # loads torch

    if release_copies(pipeline_key, ends):
        gc.collect()
    _await_end(actor_name, pipeline_key, ends)


def _later(seconds: float, function: Callable[..., None], *args: Any) -> None:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


def _end_work(pipeline_key: str) -> None:
    """End this process if a task is still making batches for a closed pipeline.

    torch terminates its workers in the same case. Ray restarts the task, which then ends at once.
    """
    with _keeping:
        at_work = pipeline_key in _at_work
    if at_work:
        os._exit(1)


def _release(pipeline_key: str, confirm: Callable[[], None] | None = None) -> None:
    """Drop a pipeline's jobs and copies; while a task uses them, ``working`` does so at its end.

    Args:
        pipeline_key: The pipeline.
        confirm: Called after that.
    """
    from dpex.wire.pickling import give_back_memory
    from dpex.wire.segments import OWN_SEGMENTS

    with _keeping:
        if pipeline_key in _at_work:
            _after_work[pipeline_key] = functools.partial(_release, pipeline_key, confirm)
            return
        for job_key in set(_stored_jobs).difference(*_jobs_of.values()):
            del _stored_jobs[job_key]
    from dpex.worker.dataset_copies import release_copies

    release_copies(pipeline_key)
    OWN_SEGMENTS.close(pipeline_key)
    gc.collect()
    with _keeping:
        if not (_jobs_of or _at_work):
            # Only objects that belong to modules are left. Later collections skip all of them.
            gc.freeze()
    if confirm is not None:
        confirm()
    give_back_memory()


@contextlib.contextmanager
def working(pipeline_key: str, iteration: int) -> Iterator[None]:
    """Keep a pipeline's jobs and copies at least until the end of the block.

    Args:
        pipeline_key: The pipeline.
        iteration: Number of the iteration that the block works for, or ``ALL_ITERATIONS``.
    """
    from dpex.worker.dataset_copies import kept_for

    with _keeping:
        outer = pipeline_key in _at_work
        _at_work.setdefault(pipeline_key, iteration)
    try:
        with kept_for(pipeline_key, iteration):
            yield
    finally:
        after: Callable[[], None] | None = None
        if not outer:
            with _keeping:
                del _at_work[pipeline_key]
                # The iteration has ended, or the pipeline was closed, during the block.
                after = _after_work.pop(pipeline_key, None)
                if after is None and pipeline_key not in _jobs_of:  # closed before the block
                    after = functools.partial(_release, pipeline_key)
        if after is not None:
            after()
