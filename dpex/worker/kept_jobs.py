"""What a worker process keeps for a pipeline: its jobs, until the pipeline is closed."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from dpex.cluster.local.forkserver import inheritance
from dpex.cluster.releasing import be_ready, release_later
from dpex.compat.objects import private_mappings
from dpex.wire.memory_map import shared_memory
from dpex.worker.actor_calls import ACTOR_DIED, ask_actor, pipeline_actor

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dpex.wire.pickling import Pickled
    from dpex.worker.map_style import Job

__all__ = ["read_job", "release_when_closed", "working"]

# Until a pipeline actor that could not be reached is asked again when a pipeline is closed.
_ASK_AGAIN_S = 2.0
# As long as torch gives its workers to end.
_MOST_END_S = 5.0
# Which copy of an inherited job uses the very memory that was inherited.
_borrowers: dict[str, weakref.ref[Job]] = {}
_stored_jobs: dict[str, Pickled] = {}
# The pipelines that this process keeps something for, each with the jobs that it reads.
_jobs_of: dict[str, set[str]] = {}
# The pipelines that a task is at work for.
_at_work: set[str] = set()
_keeping = threading.Lock()


def read_job(job: list[ray.ObjectRef], job_key: str, actor_name: str) -> Any:
    """Make one more copy of a job; large arrays are copied where and when they are written to."""
    from dpex.wire.pickling import Pickled, load, own_copy

    inherited = inheritance.get(job_key)
    if inherited is not None:
        borrower = _borrowers.get(job_key)
        # Once the last copy has gone its memory serves again, if it was left as it is.
        if borrower is None or (borrower() is None and inherited.digest == job_key):
            shared = shared_memory()

            def own(buffer: Any) -> Any:
                # Memory that the trainer shares on purpose, with a file or with other processes,
                # is not copied by writing to it.
                return own_copy(buffer) if buffer.flags.writeable and shared(buffer) else buffer

            copy = _with_size(load(inherited, own), inherited)
            _borrowers[job_key] = weakref.ref(copy)
            return copy
    pickled = _stored_jobs.get(job_key)
    if pickled is None:
        if not job:  # one more copy, in a process that inherited the first
            job = ask_actor(actor_name, "stored_job", job_key)
        search_path, *content = ray.get(job[0])
        # What the script can import a worker of its host can, as with torch's spawned workers.
        sys.path.extend(p for p in search_path if p not in sys.path and Path(p).is_dir())
        pickled = _stored_jobs[job_key] = Pickled(*content)
    buffers = pickled.buffers
    mapped = dict(zip(map(id, buffers), private_mappings(buffers), strict=True))

    def take(view: Any) -> Any:
        own = mapped[id(view)]
        return own_copy(view) if own is None else own

    return _with_size(load(pickled, take), pickled)


def _with_size(job: Any, pickled: Pickled) -> Any:
    """Tell a ``Job`` how large its pickle was."""
    if hasattr(job, "pickled_bytes"):
        return replace(job, pickled_bytes=(len(pickled.head), pickled.size_bytes))
    return job


def release_when_closed(actor_name: str, pipeline_key: str, job_key: str) -> None:
    """Drop what this process keeps for a pipeline as soon as the actor has closed it, or has died.

    The process may have no task then. So a call waits at the pipeline actor, one for each pipeline.
    """
    with _keeping:
        known = pipeline_key in _jobs_of
        _jobs_of.setdefault(pipeline_key, set()).add(job_key)
    if not known:
        be_ready()
        _ask_for_the_end(actor_name, pipeline_key)


def _ask_for_the_end(actor_name: str, pipeline_key: str) -> None:
    def answered(closed: Future[None]) -> None:
        error = closed.exception()
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ACTOR_DIED):
            # The pipeline actor cannot be reached at this moment.
            _later(_ASK_AGAIN_S, _ask_for_the_end, actor_name, pipeline_key)
        else:
            release_later(functools.partial(_release, pipeline_key))
            if error is None:
                _later(_MOST_END_S, _end_work, pipeline_key)

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # there is no host any more
        closed = pipeline_actor(actor_name).closed.remote(pipeline_key).future()
        closed.add_done_callback(answered)
        return
    release_later(functools.partial(_release, pipeline_key))


def _later(seconds: float, function: Callable[..., None], *args: Any) -> None:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


def _end_work(pipeline_key: str) -> None:
    """End this process if it is still at work for a pipeline that was closed.

    torch terminates its workers then. Ray starts the task again, and that one ends at once.
    """
    with _keeping:
        at_work = pipeline_key in _at_work
    if at_work:
        os._exit(1)


def _release(pipeline_key: str) -> None:
    """Drop what this process keeps for a pipeline; a task at work for it does that at its end."""
    from dpex.wire.pickling import give_back_memory
    from dpex.worker.dataset_copies import release_copies

    with _keeping:
        _jobs_of.pop(pipeline_key, None)
        if pipeline_key in _at_work:
            return
        for job_key in set(_stored_jobs).difference(*_jobs_of.values()):
            del _stored_jobs[job_key]
    release_copies(pipeline_key)
    gc.collect()
    with _keeping:
        if not (_jobs_of or _at_work):
            # Every object that is left belongs to a module. Later collections skip all of them.
            gc.freeze()
    give_back_memory()


@contextlib.contextmanager
def working(pipeline_key: str) -> Iterator[None]:
    """Use what this process keeps for a pipeline: it is not released inside the block."""
    from dpex.worker.dataset_copies import kept_for

    with _keeping:
        outer = pipeline_key in _at_work
        _at_work.add(pipeline_key)
    try:
        with kept_for(pipeline_key):
            yield
    finally:
        with _keeping:
            if not outer:
                _at_work.discard(pipeline_key)
            # The pipeline actor has closed the pipeline since, or before the task began its chunk.
            released = not outer and pipeline_key not in _jobs_of
        if released:
            _release(pipeline_key)
