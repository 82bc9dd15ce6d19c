"""The scheduler of a pipeline, which gives chunks to tasks that ask, and starts tasks.

Ray needs some 10 ms to start a task, and meanwhile the worker process is idle. Asking for the next
chunk takes 1 ms. So a task keeps asking while there are chunks, and then waits a while for more.
The scheduler starts a task only if the waiting chunks need it.

The scheduler decides when a lease gets a chunk or ends. ``task_lease.py`` has the states of a
lease, ``worker_bindings.py`` has the logical workers that are bound to leases, and
``task_starts.py`` counts tasks.

Each event has a time, and returns what it decides. ``carriers/ray/task_requests.py`` performs that.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, PickledChunk, Replaced, insert_in_turn
from dpex.protocol.leases import Leases
from dpex.protocol.loss_causes import Loss, LossCause, lost_block
from dpex.protocol.task_lease import DeadlyChunkError, LeaseState, TaskLease
from dpex.protocol.task_starts import TaskStarts
from dpex.protocol.worker_bindings import WorkerBindings

__all__ = ["Answer", "OtherJobs", "Scheduler"]


@dataclass(frozen=True)
class Answer:
    """The answer to a task's request for its next chunk.

    Attributes:
        name: Name of the task's lease.
        attempt: Name of the process that made the request.
        chunk: The chunk. None if the lease has ended: for example, because the processes of the
            task died too often on one chunk, which is lost.
    """

    name: str
    attempt: str
    chunk: AssignedChunk | Replaced | None


@dataclass(frozen=True)
class OtherJobs:
    """The other training jobs whose tasks share the cluster's CPUs.

    Attributes:
        wait: Whether any of their tasks has not started yet.
        may_wait: Number of tasks of this job that may wait for a CPU while other tasks of it run.
    """

    wait: bool
    may_wait: int


class Scheduler:
    """The chunks of a pipeline, and the leases of the tasks that make them.

    Invariant: each request gets one answer, which the same event returns, or a later one. If a
    process repeats a request, both have the same answer.

    Args:
        now: The time, in seconds of any clock that does not go back.
        holds_resources: Whether a waiting task holds resources that keep other tasks from running.
        claims_cpus: Whether other Ray tasks may wait for the CPUs of these tasks.
        later_stages: Whether later stages take the blocks. A restarted task then yields an empty
            block for each block that it had made, so its lease must not be long.
        prefers_nodes: Whether the tasks prefer some nodes to others.
        in_actors: Whether the tasks run in actors. Soon after a lease, its process ends.
        num_workers: Number of logical workers.
        binding: Initial binding of logical workers to processes.
        persistent: Whether logical workers outlive an iteration.
        idle: Returns whether the machine has an idle processor; None if Ray counts the CPUs.
        somebody_waits: Returns whether other tasks may wait for the resources of these tasks.
        first_tasks: Number of tasks that start with the pipeline.
        replaced: The latest processes that may not have ended, although Ray has restarted their
            tasks. The pipelines of an actor share them.

    Attributes:
        parallel: Number of tasks that may work at once, if no logical worker is bound.
        starting: Number of tasks that may be starting at once, if logical workers are bound.
        one_by_one: Whether only one task at a time may work.
        in_run: Whether the pipeline serves an iteration.
        prepared: Whether a task must wait before the first chunks of an iteration come.
        run: Number of the iteration that the pipeline serves or served last, from 1.
        closed: Whether all leases end.
    """

    def __init__(
        self,
        now: float,
        *,
        holds_resources: bool = False,
        claims_cpus: bool = False,
        later_stages: bool = False,
        prefers_nodes: bool = False,
        in_actors: bool = False,
        num_workers: int = 1,
        binding: Binding = Binding.RELEASED,
        persistent: bool = False,
        idle: Callable[[], bool] | None = None,
        somebody_waits: Callable[[], bool] = lambda: True,
        first_tasks: int = 0,
        replaced: deque[str] | None = None,
    ) -> None:
        self._now = now
        self._actions: list[Answer | Loss] = []
        self._holds_resources = holds_resources
        self._later_stages = later_stages
        self._prefers_nodes = prefers_nodes
        self._num_workers = num_workers
        self._idle_machine = idle
        self._somebody_waits = somebody_waits
        limited = holds_resources or claims_cpus or later_stages
        # A pipeline with later stages keeps the process of a lease that has ended.
        self._ends_process = in_actors and not later_stages
        lease_s = tuning.ACTOR_LEASE_S if self._ends_process else tuning.LEASE_S
        self._lease_s = lease_s if limited else math.inf
        # A task that resumes after a wait gets its CPU back, even if none is free.
        self._patience_s = tuning.IDLE_S if holds_resources or claims_cpus else tuning.LONG_IDLE_S
        # The same while no other task is known to wait, if it differs.
        self._undisturbed_s: float | None = None
        if in_actors:
            # A later stage may wait for a CPU of the first stage, and is not known to wait.
            self._undisturbed_s = tuning.LEASE_S if later_stages else tuning.LONG_IDLE_S
        self.parallel = self.starting = 1
        self.one_by_one = False
        self.in_run = True
        self.run = 0
        self._chunks: deque[PickledChunk] = deque()
        self._leases = Leases()
        # The leases that wait, in the same order.
        self._waiting: OrderedDict[str, TaskLease] = OrderedDict()
        self._bindings = WorkerBindings(self._leases, num_workers, binding, persistent)
        # Ray seemed to give the CPU of an actor that ends to an actor that waits already, and never
        # to another job's task.
        self._leaves_cpus = in_actors and holds_resources
        freed_s = tuning.ACTOR_FREED_S if self._leaves_cpus else tuning.FREED_S
        self._tasks = TaskStarts(now, first_tasks, freed_s)
        # The leases of restarted tasks, and the chunks that they have to repeat.
        self._repeating: dict[str, tuple[TaskLease, AssignedChunk]] = {}
        # Whether a further task may be needed.
        self._changed = False
        self._replaced = deque(maxlen=tuning.MAX_REPLACED) if replaced is None else replaced
        self.prepared = False
        # When a task last asked for a chunk or got one.
        self._asked_at = math.inf
        # Whether any task has asked for a second chunk.
        self._warm = False
        # Whether samples of this iteration may have waited for logical workers without a process.
        self._stuck = False
        self.closed = False
        self._others: OtherJobs | None = None
        self._waited_for_since = math.inf

    # --- events -----------------------------------------------------------------------------------

    def begin(self, now: float, *, in_run: bool) -> list[Answer | Loss]:
        """Reset the state for a new iteration, or for a pause between iterations."""
        self._now = now
        self.run += in_run
        self._stuck = False
        self.prepared = False
        self._asked_at = math.inf
        self._bindings.begin(in_run=in_run)
        self.in_run = in_run
        return self._decided()

    def feed(self, now: float, chunk: PickledChunk) -> list[Answer | Loss]:
        """Add a chunk to those that wait: after the others, or if it is resent, before new ones."""
        self._now = now
        self.prepared = False
        insert_in_turn(self._chunks, chunk)
        self._changed = True
        return self._decided()

    def request(
        self,
        now: float,
        name: str,
        place: int,
        made: int,
        attempt: str = "",
        *,
        early: bool = False,
        unchanged: bool | None = None,
    ) -> list[Answer | Loss]:
        """Record that a task requests its next chunk.

        Args:
            now: The time.
            name: Name of the task's lease, which does not change if Ray restarts the task.
            place: How many chunks the task has made; a restarted task begins at 0.
            made: How many blocks the process has made of these chunks, or is about to finish.
            attempt: Name of the task's process.
            early: Whether the task still makes samples of its last chunk; see ``finish``.
            unchanged: Whether the last batch left its dataset copy unchanged; None if unknown.
        """
        self._now = now
        lease = self._leases.get(name)
        if lease is None and place == 0:
            lease = self._leases.add(name, attempt, now)
            self._tasks.note_running()
            self._leases.forget_ended(max(tuning.MAX_ENDED_LEASES, 4 * self.parallel))
        if lease is None or lease.is_past(attempt):
            # A lease that is not known ended so long ago that it is forgotten.
            answer = None if lease is None else Replaced()
            self._actions.append(Answer(name, attempt, answer))
            return self._decided()
        if lease.has_asked(attempt, place):
            if not lease.unanswered:
                self._actions.append(Answer(name, attempt, lease.answer))
            return self._decided()
        # A repeated request would report the state of the chunk that has been given since.
        if unchanged is not None:
            self._bindings.note_state(lease, unchanged)
        self._asked_at = now
        self._warm = self._warm or place > 0
        self._leases.move_to_end(name)
        self._waiting.pop(name, None)
        self._repeating.pop(name, None)
        replaced = lease.attempt
        if lease.unanswered and replaced != attempt:
            self._actions.append(Answer(name, replaced, Replaced()))
        unfinished = lease.note_request(attempt, place, made, early=early)
        if unfinished:
            self._replaced.append(replaced)
        lease.unanswered, lease.asked_at = True, now
        if place < lease.given and not self.closed:
            self._repeat(lease, place, unfinished=unfinished)
        else:
            lease.ask()
            self._bindings.note_asked(lease)
            if lease.ended:
                self._answer(lease, None)
            elif not self._advance(lease):
                self._waiting[name] = lease
        return self._decided()

    def finish(self, now: float, name: str, attempt: str, place: int) -> list[Answer | Loss]:
        """Record that a task that asked early has no more samples to make.

        Args:
            now: The time.
            name: Name of the task's lease.
            attempt: Name of the task's process.
            place: The ``place`` of the task's request.
        """
        self._now = now
        lease = self._leases.get(name)
        if lease is not None and lease.attempt == attempt:
            lease.finish(place)
        elif attempt in self._replaced:  # it makes no samples any more
            self._replaced.remove(attempt)
        return self._decided()

    def note_change(self, now: float, name: str, worker: int) -> list[Answer | Loss]:
        """Record that a batch changed its dataset copy after the logical workers were released.

        Args:
            now: The time.
            name: Name of the lease whose task made the batch.
            worker: The logical worker of the batch.
        """
        self._now = now
        lease = self._leases.get(name)
        if lease is not None and lease.run != self.run and not self._bindings.persistent:
            lease = None  # the copy goes with its iteration
        self._bindings.note_change(lease, worker)
        return self._decided()

    def note_others(self, now: float, others: OtherJobs | None) -> list[Answer | Loss]:
        """Record the state of the cluster's other training jobs; None if there are none."""
        self._now = now
        self._others = others
        if others is None or not others.wait:
            self._waited_for_since = math.inf
        else:
            since = now + (tuning.PROCESS_STARTS_S if others.may_wait else 0.0)
            self._waited_for_since = min(since, self._waited_for_since)
        self._changed = True
        return self._decided()

    def prepare(self, now: float) -> list[Answer | Loss]:
        """Start a task before there are chunks, unless one waits.

        Until the first chunk or the end of the iteration, a task replaces each that ends.
        """
        self._now = now
        self.prepared = not self.closed
        self._changed = True
        return self._decided()

    def stop_preparing(self, now: float) -> list[Answer | Loss]:
        """Start no task without a chunk."""
        self._now = now
        self.prepared = False
        return self._decided()

    def tick(self, now: float) -> list[Answer | Loss]:
        """Record that time has passed: some leases have waited for too long, or chunks have."""
        self._now = now
        self._changed = self._changed or bool(self._chunks)
        self._hand_out()
        for lease in list(self._waiting.values()):
            too_long = now - lease.asked_at >= self._patience_of(lease)
            if lease.waiting and too_long and not self._bind_one_more(lease):
                self._end(lease)
        for lease, _ in list(self._repeating.values()):
            if self._holds_resources and now - lease.asked_at >= tuning.IDLE_S:
                self._give_back(lease)
        wanted: set[int | None] = {chunk.worker for chunk in self._chunks}
        wanted |= {lease.repeats for lease, _ in self._repeating.values()}
        for worker in wanted:
            for lease in list(self._leases.holding(worker)):
                quiet = now - lease.asked_at >= tuning.STATE_QUIET_S
                if lease.ended and quiet and lease.name not in self._repeating:
                    # Ray may have replaced the process, so that nobody learns of its end.
                    self._give_back(lease)
        return self._decided()

    @property
    def tick_s(self) -> float | None:
        """Maximum time until the next ``tick``; None if the next event comes first."""
        if self._chunks:
            return tuning.LOOK_S
        return tuning.IDLE_S if self._waiting or self._repeating else None

    def drop(self) -> None:
        """Drop the chunks that no task has."""
        self._chunks.clear()

    def close(self, now: float) -> list[Answer | Loss]:
        """End all leases: at once if their tasks wait, else when the tasks ask again."""
        self._now = now
        self.closed = True
        self.drop()
        for lease in list(self._waiting.values()):
            self._end(lease)
        self.prepared = False
        return self._decided()

    def note_joined(self) -> None:
        """Record that the tasks have ended, after ``close``.

        A process that was making a chunk and has not asked since may be one that Ray cannot reach.
        One that has asked, also early, has ended its task. Ray may have given it another task.
        """
        unheard = (lease for lease in self._leases.values() if lease.runs is not None)
        self._replaced.extend(lease.attempt for lease in unheard)

    def _decided(self) -> list[Answer | Loss]:
        """Return what the present event has decided, and start the tasks that are needed now."""
        self._hand_out()
        for lease, chunk in list(self._repeating.values()):
            if not self._bindings.runs_elsewhere(lease, lease.repeats):
                lease.begin_repeat()
                del self._repeating[lease.name]
                self._answer(lease, chunk)
        while self._changed and not self.closed:
            self._changed = False
            if tasks := self._wanted():
                self._tasks.start(self._now, tasks)
                self._changed = True
        actions, self._actions = self._actions, []
        return actions

    def _answer(self, lease: TaskLease, chunk: AssignedChunk | None) -> None:
        """Answer the last request of a lease."""
        if chunk is not None and self._replaced:
            chunk = replace(chunk, replaced=tuple(self._replaced))
        lease.unanswered, lease.answer = False, chunk
        self._actions.append(Answer(lease.name, lease.attempt, chunk))

    # --- chunks -----------------------------------------------------------------------------------

    def _repeat(self, lease: TaskLease, place: int, *, unfinished: bool) -> None:
        """Give a restarted task a chunk that it has to make again, once its logical worker is free.

        Such a chunk waits only for a process that makes samples of its logical worker. A lease may
        hold the logical worker for a later chunk, and wait in turn for a chunk to repeat.

        Args:
            lease: The lease.
            place: How many chunks the task has made since it was restarted.
            unfinished: Whether its process before had not reported the end of its samples.
        """
        had_ended = lease.ended
        made = lease.state is LeaseState.ENDED and not (unfinished or self._later_stages)
        if made or (had_ended and lease.run != self.run):
            # Nothing needs output of this task again. If the process is one that Ray has replaced,
            # nobody learns of its end, so it must not hold a logical worker.
            self._give_back(lease)
            return
        try:
            chunk = lease.repeat(place, self._bindings.of(lease))
            if chunk.iteration == self.run and self.in_run:
                self._bindings.note_repeated(lease)
            else:  # a new process does not know that the iteration has ended
                chunk = replace(chunk, iteration=0)
            self._repeating[lease.name] = lease, chunk
        except DeadlyChunkError as error:
            if not had_ended:
                self._note_ended()
            self._actions += [Loss(LossCause.TASK, str(error), part) for part in error.parts]
            self._answer(lease, None)

    def _give_back(self, lease: TaskLease) -> None:
        """End the lease of a restarted task, so that another task makes its chunks.

        The process that makes samples of its logical worker may be dead too, and unable to restart,
        because this task holds the resources. Or the lease had ended.
        """
        had_ended = lease.ended
        chunks = lease.give_back(self.run)
        if had_ended:
            # They had been made. Their logical workers may have made later chunks since, and must
            # not make these after them unless their blocks are lost.
            reason = "the process that made it has ended"
            self._actions += [lost_block(reason, chunk.part) for chunk in chunks]
        else:
            self._note_ended()
            self._chunks.extendleft(reversed(chunks))
        self._repeating.pop(lease.name, None)
        if lease.unanswered:
            self._answer(lease, None)
        self._changed = True

    def _patience_of(self, lease: TaskLease) -> float:
        """Return how long a lease waits for its next chunk or for the next iteration."""
        # The state of bound logical workers ends with their lease.
        holds_state = self._bindings.holds_state(lease, in_run=self.in_run)
        if holds_state and not self._holds_resources:
            return math.inf
        if not holds_state and self._undisturbed_s is None:
            return self._patience_s
        others_wait = self._others is not None and self._others.wait
        wanted = (
            self._bindings.without_process(self._chunks) or others_wait or self._somebody_waits()
        )
        if not holds_state and self._undisturbed_s is not None:
            return self._patience_s if wanted else self._undisturbed_s
        return math.inf if self.in_run and not wanted else tuning.IDLE_S

    def _bind_one_more(self, lease: TaskLease) -> bool:
        """Bind one more logical worker to a lease, and give it that worker's chunk.

        A further task would need resources that the waiting tasks hold. So that logical worker
        might never get a process of its own.
        """
        without_process = self._bindings.without_process(self._chunks)
        if not (self.in_run and lease.workers and without_process):
            return False
        self._bindings.bind(lease, without_process[0])
        return self._advance(lease)

    def _hand_out(self) -> None:
        """Give the waiting chunks to the waiting leases, first to the task that asked first."""
        while self._chunks and self._waiting:
            if not any(self._may_be_given(chunk) for chunk in self._chunks):
                break  # most often, and the search below takes longer
            leases = self._waiting.values()
            lease = next((t for t in leases if self._chunk_index_for(t) is not None), None)
            if lease is None:
                break
            self._advance(lease)
        if self.one_by_one and self._chunks:  # no other task can start for them
            for lease in list(self._waiting.values()):
                self._end(lease)

    def _advance(self, lease: TaskLease) -> bool:
        """Give a lease its next chunk, or end it; return False if it has to wait."""
        place = self._chunk_index_for(lease)
        chunk = None if place is None else self._chunks[place]
        if self._must_end(lease, chunk):
            self._end(lease)
        elif place is not None and chunk is not None:
            del self._chunks[place]
            self._waiting.pop(lease.name, None)
            lease.give(chunk, self.run)
            self._asked_at = self._now
            self._bindings.note_given(lease, chunk.worker)
            self._answer(lease, lease.last_chunk(self._bindings.of(lease)))
        else:
            return False
        return True

    def _must_end(self, lease: TaskLease, chunk: PickledChunk | None) -> bool:
        """Return whether a lease ends, instead of getting ``chunk`` or waiting."""
        if self.closed or self.running > self._most_tasks or self._expired(lease):
            return True
        # The dead process had yielded blocks of chunks that are cancelled by now. Ray counts
        # blocks, so it would drop as many blocks of the next iteration.
        if self._later_stages and lease.was_restarted and lease.given and lease.run != self.run:
            return True
        return lease.alone or (chunk is not None and chunk.alone and lease.given > 0)

    def _expired(self, lease: TaskLease) -> bool:
        """Return whether a lease has taken its time."""
        waited_for = self._now >= self._waited_for_since
        lease_s = tuning.WAITED_FOR_LEASE_S if waited_for else self._lease_s
        late = lease.given > 0 and self._now - lease.began >= lease_s
        if not late or lease.workers:
            return False
        starting = self._tasks.pending or self._tasks.not_known_free(self._now)
        if self._ends_process and starting and not waited_for:
            return False  # else no process would make batches until the next ones have started
        # A new task takes some 10 ms to start, and the first batch of an iteration must not
        # wait for it. So an expired lease stays until it has had a chunk of this iteration.
        return waited_for or (lease.run == self.run and bool(self._chunks))

    def _may_be_given(self, chunk: PickledChunk) -> bool:
        """Return whether a lease that waits may get a chunk, if it has no bound worker."""
        holders = self._leases.holders
        if chunk.worker not in holders:
            return True
        holder = holders[chunk.worker]
        return holder is not None and holder.waiting

    def _chunk_index_for(self, lease: TaskLease) -> int | None:
        """Return the index of the first waiting chunk that a lease may get, or None."""
        if self._held_back(lease):
            return None
        place = self._bindings.chunk_index_for(lease, self._chunks)
        if place is None or not self._chunks[place].alone or lease.workers or not lease.given:
            return place
        # For a chunk that is sent alone, the lease ends, unless enough tasks are about to start.
        alone = [chunk for chunk in self._chunks if chunk.alone]
        if self._tasks.pending < len(self._bindings.without_process(alone)):
            return place
        workers = {chunk.worker for chunk in alone}
        rest = [chunk for chunk in self._chunks if chunk.worker not in workers]
        place = self._bindings.chunk_index_for(lease, rest)
        return None if place is None else self._chunks.index(rest[place])

    def _held_back(self, lease: TaskLease) -> bool:
        """Return whether a bound lease leaves its CPU to a task of another training job."""
        waited_for_s = self._now - self._waited_for_since
        # A lease that holds other resources waits only briefly; it would end, and another begin.
        if not lease.workers or self._holds_resources or waited_for_s < 0:
            return False
        return waited_for_s % (2 * tuning.HELD_BACK_S) < tuning.HELD_BACK_S

    @property
    def has_work(self) -> bool:
        """Whether any chunk waits or is being made."""
        return bool(self._chunks) or any(t.busy or t.running for t in self._leases.values())

    @property
    def tasks_at_work(self) -> int:
        """Number of tasks that make a chunk."""
        return sum(lease.busy for lease in self._leases.values())

    @property
    def keeps_state(self) -> bool:
        """Whether logical workers keep state from one iteration to the next."""
        return self._bindings.keeps_state

    # --- the end of leases ------------------------------------------------------------------------

    def _end(self, lease: TaskLease) -> None:
        self._waiting.pop(lease.name, None)
        if not lease.ended:
            lease.end()
            self._bindings.note_ended(lease)
            self._note_ended()
            if lease.unanswered:
                self._answer(lease, None)

    def _note_ended(self) -> None:
        self._tasks.note_ended(self._now)
        self._changed = True

    # --- starting tasks ---------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether all tasks have ended."""
        return not self._active

    @property
    def pending(self) -> int:
        """Number of tasks that have been started and have not asked for a chunk."""
        return self._tasks.pending

    @property
    def has_run(self) -> bool:
        """Whether any task has asked for a chunk."""
        return self._tasks.pending < self._tasks.started

    @property
    def started(self) -> int:
        """Number of tasks started so far."""
        return self._tasks.started

    def waits(self, now: float) -> bool:
        """Return whether a task may begin soon, for which other jobs hold their tasks back."""
        return self._tasks.may_run_soon(now)

    @property
    def running(self) -> int:
        """Number of tasks that have asked for a chunk and have not ended."""
        return self._leases.running

    @property
    def _active(self) -> int:
        """Number of tasks that have not ended, pending tasks included."""
        return self.running + self._tasks.pending

    @property
    def _most_tasks(self) -> int:
        """Number of tasks that may work at once."""
        if self.one_by_one:
            return 1
        # Starting more processes at once would delay the first batch.
        all_at_once = self._stuck or (self._warm and self._bindings.binding is Binding.ALWAYS)
        return self._num_workers if all_at_once else self.parallel

    def _wanted(self) -> int:
        """Return how many tasks to start."""
        if not (self._chunks or self.prepared):
            return 0
        active = self._active
        self._stuck = self._stuck or self._is_stuck()
        allowed = self._most_tasks - active
        if self._prefers_nodes or self._leaves_cpus:
            allowed -= self._tasks.not_known_free(self._now)
        if allowed <= 0:
            return 0  # most often, and the search below takes longer
        wanted = len(self._bindings.without_process(self._chunks))
        if self._bindings.bound:
            # Batches are needed in order, and fewer processes that start at once are ready sooner.
            wanted = min(wanted, self.starting)
        wanted = max(wanted, int(self.prepared and not self.running))
        if self._bindings.binding is not Binding.ALWAYS and self._others is not None:
            # One task can make all batches. A second task would have to start another process, and
            # tasks of the other jobs would wait for that.
            next_one = not active and not self._others.wait
            wanted = min(wanted, max(self._others.may_wait, int(next_one)))
        return max(0, min(allowed, wanted - self._tasks.pending))

    def _is_stuck(self) -> bool:
        """Return whether samples may wait for logical workers that have not started."""
        quiet_s = self._now - self._asked_at
        if self._tasks.pending or not self._chunks or quiet_s < tuning.STUCK_IDLE_S:
            return False
        return quiet_s >= tuning.STUCK_S or self._idle_machine is None or self._idle_machine()
