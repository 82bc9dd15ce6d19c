"""One iteration on a pipeline, as the training process sees it."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from dpex import tuning
from dpex.carriers.ray.actor import PipelineActor
from dpex.carriers.ray.node_health import Nodes
from dpex.carriers.ray.remote_pipelines import ACTOR_LOST, RunToken, wait_for_release
from dpex.cluster.interrupted_exit import die_at_once
from dpex.errors import ClusterError
from dpex.protocol.chunks import Chunk
from dpex.wire.arrivals import Arrivals
from dpex.wire.packed_calls import pack
from dpex.worker.map_style import pickled_chunks

if TYPE_CHECKING:
    from dpex.wire.receiver import Receiver

__all__ = ["RemoteRun"]

_PIPELINE_LOST = (
    *ACTOR_LOST,
    ray.exceptions.ObjectLostError,
    ray.exceptions.NodeDiedError,
)

_open_runs: weakref.WeakSet[RemoteRun] = weakref.WeakSet()
# Includes receivers of ended runs while their threads run.
_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


@atexit.register  # registered after Ray's own hook, so it runs before that hook
def _end_open_runs() -> None:
    """End all open runs, so that no thread is inside Ray when Ray shuts down."""
    for run in list(_open_runs):
        run.end(wait=False)
    deadline = time.monotonic() + tuning.UNPICKLED_S
    for receiver in list(_receivers):
        receiver.join(max(0.0, deadline - time.monotonic()))


def _leave_runs_to_parent() -> None:
    """Forget the runs in a fork, whose exit would end the runs of its parent."""
    _open_runs.clear()
    _receivers.clear()


os.register_at_fork(after_in_child=_leave_runs_to_parent)
die_at_once()  # registered last, so its handler runs first


class RemoteRun:
    """One iteration on a pipeline, as the training process sees it.

    Attributes:
        arrivals: The blocks and losses that have arrived.
    """

    def __init__(
        self,
        actor: PipelineActor,
        pipeline_key: str,
        run: str,
        nodes: Nodes,
        token: RunToken,
        *,
        pin_device: int | None,
        through_client: bool,
        persistent: bool,
    ) -> None:
        self._persistent = persistent
        self.arrivals = Arrivals()
        self._fed = 0
        self._first_task: ray.ObjectRef | None = None
        self._actor = actor
        self._pipeline_key = pipeline_key
        self._run = run
        self._nodes = nodes
        self._token: RunToken | None = token
        self._began_at = time.monotonic()
        self._failure: BaseException | None = None
        self._pin_device = pin_device
        self._through_client = through_client
        self._receiver: Receiver | None = None
        _open_runs.add(self)

    @property
    def receiver(self) -> Receiver:
        """The receiver of the run's blocks, which starts on first use."""
        from dpex.wire.receiver import Receiver

        if self._receiver is None:
            self._receiver = Receiver(
                self._actor,
                self._pipeline_key,
                self._run,
                self.arrivals,
                pin_device=self._pin_device,
                through_client=self._through_client,
            )
            _receivers.add(self._receiver)
            weakref.finalize(self, self._receiver.stop).atexit = False
        return self._receiver

    def feed(
        self,
        chunks: Sequence[Chunk],
        *,
        alone: bool,
        resent: bool,
        one_by_one: bool,
        parallel: int,
        starting: int,
    ) -> None:
        """Pickle chunks and send them; see ``CarrierRun``."""
        fed = pack(
            self._pipeline_key,
            self._run,
            self._fed,
            pickled_chunks(chunks, alone=alone, resent=resent),
            one_by_one=one_by_one,
            parallel=parallel,
            starting=starting,
        )
        self._actor.handle.feed.remote(fed)
        self._fed += len(chunks)
        # Not earlier: the receiver starts while the first chunk is on its way.
        _ = self.receiver

    def start_task(self, timeout_s: float) -> bool:
        """Start a task before the first chunk is sent, and wait until it waits for chunks.

        Returns:
            False after the timeout. If the pipeline is lost, True: the next iteration gets the
            error.
        """
        if self._first_task is None:
            self._first_task = self._actor.handle.start_task.remote(self._pipeline_key, self._run)
        done, _ = ray.wait([self._first_task], timeout=timeout_s)
        return bool(done)

    def lost_with_node(self, batch_s: float) -> bool:
        """Return whether the run waits in vain because a node died.

        If it does, ``failure`` returns the error.

        Args:
            batch_s: Seconds that a worker process needs for a batch.
        """
        try:
            self._nodes.look()
        except ClusterError as error:
            self._failure = error.with_traceback(None)  # its frames refer to this object
            return True
        died_at = self._nodes.died_at
        quiet_s = time.monotonic() - max(died_at, self.arrivals.arrived_at)
        if died_at < self._began_at or quiet_s < tuning.NODE_REPLACED_S + batch_s:
            return False
        self._failure = ray.exceptions.NodeDiedError("a node died, and no batch has come since")
        if self._token is not None:
            self._token.abandon_pipeline()
        return True

    def tasks_at_work(self) -> int | None:
        """Return how many tasks make batches now; None if the pipeline actor does not answer."""
        try:
            # Ray Client raises an Exception already here once the connection is lost.
            asked = self._actor.handle.tasks_at_work.remote(self._pipeline_key, self._run)
            return int(ray.get(asked, timeout=tuning.HEAD_ANSWER_S))
        except Exception as error:
            # A frame of Ray's has the error, whose traceback has that frame and this one.
            error.__traceback__ = None
            return None

    def failure(self) -> BaseException | None:
        """Return the error that ended the run, or None; the next run replaces a dead actor."""
        failure = self._failure or self.receiver.failure
        if isinstance(failure, ACTOR_LOST):
            self._actor.lost = True
        return failure

    @property
    def lost(self) -> bool:
        """Whether a new pipeline can continue.

        It can if a node, the actor or its blocks were lost, or if a private name of Ray failed.
        """
        failure = self._failure or self.receiver.failure
        return isinstance(failure, _PIPELINE_LOST) or self.receiver.replaceable

    def end(self, *, wait: bool = True) -> None:
        """Cancel the run, finished or not, so that its pipeline is free for the next run.

        Args:
            wait: Whether to return only when worker processes have dropped their dataset copies,
                unless logical workers are persistent.
        """
        if self._token is not None:
            self._token.cancel()
            self._token = None
            _open_runs.discard(self)
            if self._receiver is not None:
                self._receiver.stop()
            if wait and not self._persistent and self._actor.alive:
                wait_for_release(self._actor, [self._pipeline_key])
