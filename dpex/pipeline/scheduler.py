"""The scheduler of a pipeline, which gives chunks to tasks that ask, and starts tasks.

A task lease is the time for which one task asks for chunks. Ray needs some 10 ms to start a task,
and meanwhile the worker process is idle. Asking for the next chunk takes 1 ms. So a task keeps
asking while there are chunks, and then waits a while for more. The scheduler starts a task only if
the waiting chunks need it.

A bound logical worker lives in one worker process (``worker/binding.py``). The task lease that got
its first chunk gets only chunks of logical workers that are bound to this lease. The lease waits
for these chunks while the iterator lives. Streams are always bound. A watched logical worker may
move to another process after each chunk that left its dataset copy unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dpex.worker.actor_calls import AssignedChunk
from dpex.worker.binding import Binding

__all__ = ["MAX_DEATHS", "OtherJobs", "Scheduler"]

MAX_DEATHS = 4
"""How often a worker process may die on one chunk or block. Ray restarts tasks without limit."""

# The length of a lease.
_LEASE_S = 30.0
# The length of a lease if other Ray tasks may wait for the task's CPU.
_SHARED_LEASE_S = 5.0
# The length of a lease while a task of another training job waits.
_WAITED_FOR_LEASE_S = 1.0
# The lease of a bound logical worker has no time limit. A task that has waited gets its CPU back
# even if none is free. So bound leases alternate while a task of another training job waits. They
# get no chunks for this time, then get chunks for the same time.
_HELD_BACK_S = 5.0
# If CPUs are free, a waiting task of another training job most likely waits until its process has
# started and loaded torch. The job counts as waiting only after this time.
_PROCESS_STARTS_S = 10.0
# The time until the cluster knows that a node's CPU is free again: Ray's nodes exchange this ten
# times a second. A task that starts earlier would not get the node that it prefers.
_FREED_S = 0.25
# Invariant: a task that asks for its next chunk has stored all blocks of the chunks before its last
# chunk. So a restarted task repeats at most this many chunks.
_KEPT_CHUNKS = 2
# How long a task waits for its next chunk: if other Ray tasks may want what it holds, and if not.
# Without the longer wait, most tasks would end in the last second of each iteration. With 32 tasks
# that use public names of Ray, starting them again takes two seconds of an iteration of seven.
_IDLE_S = 0.5
_LONG_IDLE_S = 30.0
# If no task asks for this time, samples may wait for samples of logical workers that have not
# started. On a machine without an idle processor, samples may also just take long. So dpex then
# waits for the longer time before it starts more tasks.
_STUCK_IDLE_S = 1.0
_STUCK_S = 3.0
# A task that has not started after this time requests resources that no node has.
_HOPELESS_S = 60.0
# How often the scheduler checks conditions that change with time.
_LOOK_S = 0.1
# How many ended leases are kept, because Ray restarts a task if its output is lost.
_MAX_OVER = 256


@dataclass(frozen=True)
class OtherJobs:
    """The other training jobs whose tasks share the cluster's CPUs.

    Attributes:
        wait: Whether any of their tasks has not started yet.
        room: How many tasks of this job may wait to begin, even if other tasks of it run.
    """

    wait: bool
    room: int


@dataclass(frozen=True)
class _Waiting:
    """A chunk that no task has yet.

    Attributes:
        payload: The pickled chunk.
        worker: The logical worker that its batches belong to.
        alone: Whether its lease may contain no other chunk.
    """

    payload: bytes
    worker: int
    alone: bool


@dataclass
class _Lease:
    """The lease of one task.

    Attributes:
        name: The task's ID, which does not change if Ray restarts the task.
        began: When the task first asked.
        chunks: The last chunks that the task got.
        blocks: For each of these chunks, how many blocks the task had made before.
        given: How many chunks the task got in all.
        run: Number of the iteration in which it got the last chunk.
        alone: Whether the lease may contain no chunk but the last chunk.
        workers: The logical workers that are bound to the task's process.
        last_worker: The logical worker of the last chunk.
        restarted: Whether the next chunk is the first chunk here of a logical worker that was bound
            to another process before.
        deaths: How often the process has died since the task got the last chunk.
        busy: Whether the task makes a chunk.
        over: Whether the task gets no more chunks.
        attempt: Name of the task's process, which changes if Ray restarts the task.
        made: How many blocks this process has made, or will have made when it finishes the chunk.
        delivered: How many of these blocks have been delivered.
        news: Future of the waiting task; done when there is a chunk or the lease is over. None if
            the task does not wait.
    """

    name: str
    began: float
    chunks: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT_CHUNKS))
    blocks: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_CHUNKS))
    given: int = 0
    run: int = 0
    alone: bool = False
    workers: set[int] = field(default_factory=set)
    last_worker: int = 0
    restarted: bool = False
    deaths: int = 0
    busy: bool = False
    over: bool = False
    attempt: str = ""
    made: int = 0
    delivered: int = 0
    news: asyncio.Future[None] | None = None


class Scheduler:
    """The chunks of a pipeline, and the leases of the tasks that make them.

    Args:
        loop: The event loop in which all methods run.
        on_quiet: Called when ``quiet_at`` has changed.
        holds_resources: Whether a waiting task holds resources that keep other tasks from running.
        claims_cpus: Whether other Ray tasks may wait for the CPUs of these tasks.
        choosy: Whether the tasks prefer some nodes to others.
        num_workers: Number of logical workers.
        binding: Initial binding of logical workers to processes.
        persistent: Whether logical workers outlive an iteration.
        idle: Returns whether the machine has an idle processor; None if Ray counts the CPUs.
        somebody_waits: Returns whether other tasks may wait for the resources of these tasks.
        first_tasks: Number of tasks that start with the pipeline.

    Attributes:
        parallel: Number of tasks that may work at once, if no logical worker is bound.
        starting: Number of tasks that may be starting at once, if logical workers are bound.
        one_by_one: Whether only one task at a time may work.
        in_run: Whether the pipeline serves an iteration.
        started: Number of tasks started so far.
        quiet_at: How many chunks had been fed when last all of them were done, and all their blocks
            were delivered or lost.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_quiet: Callable[[], None],
        *,
        holds_resources: bool = False,
        claims_cpus: bool = False,
        choosy: bool = False,
        num_workers: int = 1,
        binding: Binding = Binding.RELEASED,
        persistent: bool = False,
        idle: Callable[[], bool] | None = None,
        somebody_waits: Callable[[], bool] = lambda: True,
        first_tasks: int = 0,
    ) -> None:
        self._loop = loop
        # A task that resumes after a wait gets its CPU back, even if none is free.
        self._patience_s = _IDLE_S if holds_resources or claims_cpus else _LONG_IDLE_S
        self._num_workers = num_workers
        self._binding = binding
        self._persistent = persistent
        self._idle_machine = idle
        self._somebody_waits = somebody_waits
        self._lease_s = _SHARED_LEASE_S if claims_cpus else _LEASE_S
        self._on_quiet = on_quiet
        self.quiet_at = 0
        # Set when a further task may be needed.
        self._changed = asyncio.Event()
        self._waiting: deque[_Waiting] = deque()
        # Logical workers that have had a process, in this iteration or, if persistent, in any.
        self._placed: set[int] = set()
        # Leases that have not reported yet whether their chunk changes its dataset copy, and the
        # logical worker of each chunk.
        self._unreported: dict[str, int] = {}
        # Logical workers whose first batches left the dataset copy unchanged.
        self._unchanged: set[int] = set()
        # When a task last asked for a chunk or got one.
        self._asked_at = math.inf
        # Whether any task has asked for a second chunk.
        self._warm = False
        # Whether samples of this iteration may have waited for logical workers without a process.
        self._stuck = False
        self._releasing = False
        self._holds_resources = holds_resources
        self._fed = 0
        self._run = 0
        self._leases: dict[str, _Lease] = {}
        self._idle: OrderedDict[str, _Lease] = OrderedDict()
        self._closed = False
        self._begun = 0
        self.started = first_tasks
        self._started_at = time.monotonic()
        self._ended = 0
        self._choosy = choosy
        # For each task that has ended lately, the time until which its CPU counts as in use.
        self._freed: deque[float] = deque()
        self.parallel = self.starting = 1
        self.one_by_one = False
        self.in_run = True
        self._others: OtherJobs | None = None
        self._waited_for_since = math.inf

    def begin(self, *, in_run: bool) -> None:
        """Reset the state for a new iteration, or for a pause between iterations."""
        self._run += in_run
        self._stuck = False
        for lease in self._leases.values():
            lease.made = lease.delivered  # blocks in flight are no longer awaited
        self._asked_at = math.inf
        self._unreported.clear()
        self._unchanged.clear()
        if in_run and not self._persistent:
            self._unbind()
        self.in_run = in_run

    def _unbind(self) -> None:
        """Release all logical workers from their processes; each restarts on a new dataset copy."""
        self._placed.clear()
        for lease in self._leases.values():
            lease.workers.clear()

    @property
    def _bound(self) -> bool:
        return self._binding.bound

    def note_state(self, name: str, unchanged: bool) -> None:
        """Record whether a batch left its dataset copy unchanged.

        Until a batch changes its copy, a logical worker is bound only while a task makes one of its
        batches. All logical workers are released once the first batch of each left its copy
        unchanged.

        Args:
            name: Name of the lease that made the batch.
            unchanged: Whether the copy is unchanged.
        """
        self._unreported.pop(name, None)
        lease = self._leases.get(name)
        if not unchanged:
            self._binding = Binding.ALWAYS
            if lease and not lease.workers and lease.last_worker not in self._bound_workers():
                self._bind(lease, lease.last_worker)  # the process has its state now
        elif lease and self._binding is not Binding.ALWAYS:
            lease.workers.discard(lease.last_worker)
            self._placed.discard(lease.last_worker)
            self._unchanged.add(lease.last_worker)
            if len(self._unchanged) == self._num_workers:
                self._binding = Binding.RELEASED
        self._hand_out()

    def feed(self, payload: bytes, worker: int, *, alone: bool) -> None:
        """Append a chunk.

        Args:
            payload: The pickled chunk.
            worker: The logical worker that its batches belong to.
            alone: Whether its lease may contain no other chunk, because it may have killed a
                process before.
        """
        self._fed += 1
        if self._releasing and self._bound:
            self._settle()
            return  # lost with its logical worker; the training process resends it
        self._waiting.append(_Waiting(payload, worker, alone))
        self._hand_out()
        if self._waiting:
            self._changed.set()

    def note_others(self, others: OtherJobs | None) -> None:
        """Record the state of the cluster's other training jobs; None if there are none."""
        self._others = others
        if others is None or not others.wait:
            self._waited_for_since = math.inf
        else:
            since = time.monotonic() + (_PROCESS_STARTS_S if others.room else 0.0)
            self._waited_for_since = min(since, self._waited_for_since)
        self._hand_out()
        self._changed.set()

    def _hand_out(self) -> None:
        """Give the waiting chunks to the waiting leases."""
        while self._waiting:
            fitting = (n for n, lease in self._idle.items() if self._place_for(lease) is not None)
            name = next(fitting, None)
            # A lease that is held back from this moment on waits for the next note_others().
            if name is None or not self._advance(self._idle[name]):
                break
            self._tell(self._idle.pop(name))

    async def next_chunk(
        self, name: str, place: int, made: int, attempt: str = ""
    ) -> AssignedChunk | None:
        """Wait for a task's next chunk, and return it.

        Args:
            name: Name of the task's lease, which does not change if Ray restarts the task.
            place: How many chunks the task has made; a restarted task begins at 0.
            made: How many blocks the process has made of these chunks, or is about to finish.
            attempt: Name of the task's process.

        Returns:
            The next chunk, or None if the lease is over.

        Raises:
            MemoryError: The process has died too often on one chunk, which is lost.
        """
        self._asked_at = time.monotonic()
        self._warm = self._warm or place > 0
        lease = self._leases.get(name)
        if lease is None:
            lease = self._leases[name] = _Lease(name, time.monotonic(), attempt=attempt)
            self._begun += 1
            self._forget_over()
        if attempt != lease.attempt:
            lease.attempt, lease.delivered = attempt, 0
        lease.made = made
        self._idle.pop(name, None)
        if place < lease.given:
            return self._chunk_again(lease, place)
        lease.busy = False
        self._unreported.pop(name, None)  # without a report, it was cancelled or not started
        if not self._bound:
            lease.workers.clear()
        if lease.over or self._advance(lease):
            self._tell(lease)  # an earlier attempt may still wait
        else:
            self._idle[name] = lease
            lease.news = lease.news or self._loop.create_future()
        self._settle()
        await self._wait_for_news(lease)
        if place == lease.given:
            return None
        lease.blocks[-1] = max(lease.blocks[-1], made)
        restarted, lease.restarted = lease.restarted, False
        return AssignedChunk(lease.chunks[-1], place, self._binding_of(lease), restarted=restarted)

    def _chunk_again(self, lease: _Lease, place: int) -> AssignedChunk:
        """Return a chunk that the lease has had before, because Ray has restarted its task."""
        lease.deaths += place == 0
        if lease.deaths >= MAX_DEATHS:
            lease.busy = False
            lease.made = lease.delivered
            self._end(lease)
            raise MemoryError(
                f"its worker process died {lease.deaths} times in a row, by the code or for want "
                "of memory: Ray's logs say why"
            )
        lease.busy = True
        kept = max(0, place - lease.given + len(lease.chunks))
        place = lease.given - len(lease.chunks) + kept
        skipped = max(0, lease.blocks[kept] - lease.made)
        lease.blocks[kept] = max(lease.blocks[kept], lease.made)
        lease.made += skipped
        lease.delivered += skipped
        return AssignedChunk(
            lease.chunks[kept],
            place,
            self._binding_of(lease),
            again=True,
            restarted=bool(lease.workers) and not kept,
            skipped_blocks=skipped,
        )

    def delivered(self, name: str, attempt: str) -> None:
        """Record that a block has been delivered, or is lost.

        Args:
            name: Name of the lease that made the block.
            attempt: Name of the process that made the block.
        """
        lease = self._leases.get(name)
        if lease is not None and lease.attempt == attempt:
            lease.delivered += 1
            self._settle()

    def _settle(self) -> None:
        """Update ``quiet_at`` if nothing is in flight, and report a change once."""
        leases = self._leases.values()
        if self._waiting or any(t.busy or t.made > t.delivered for t in leases):
            return
        self._releasing = False
        if self.quiet_at != self._fed:
            self.quiet_at = self._fed
            self._on_quiet()

    def _end(self, lease: _Lease) -> None:
        if not lease.over:
            lease.over = True
            self._ended += 1
            self._changed.set()

    def _binding_of(self, lease: _Lease) -> Binding:
        """Return the binding of a lease's chunk: a watched chunk stays watched until it reports."""
        released = self._binding is Binding.RELEASED
        return Binding.WATCHED if released and lease.name in self._unreported else self._binding

    async def _wait_for_news(self, lease: _Lease) -> None:
        idle_since = time.monotonic()
        while lease.news is not None and not lease.news.done():
            await asyncio.wait([lease.news], timeout=_IDLE_S)
            self._hand_out()
            waited_s = time.monotonic() - idle_since
            if lease.name not in self._idle or waited_s < self._patience_of(lease):
                continue
            if not self._adopt(lease):
                self._end(lease)
            del self._idle[lease.name]
            self._tell(lease)

    def _patience_of(self, lease: _Lease) -> float:
        """Return how long a lease waits for its next chunk or for the next iteration."""
        # The state of bound logical workers ends with their lease.
        keeps_state = bool(lease.workers) and (self.in_run or self._persistent)
        if not keeps_state:
            return self._patience_s
        if not self._holds_resources:
            return math.inf
        others_wait = self._others is not None and self._others.wait
        wanted = self._homeless_worker() is not None or others_wait or self._somebody_waits()
        return math.inf if self.in_run and not wanted else _IDLE_S

    def _adopt(self, lease: _Lease) -> bool:
        """Bind one more logical worker to a lease, and give it that worker's chunk.

        A further task would need resources that the waiting tasks hold. So that logical worker
        might never get a process of its own.
        """
        worker = self._homeless_worker() if self.in_run and lease.workers else None
        if worker is None:
            return False
        self._bind(lease, worker)
        return self._advance(lease)

    def _homeless_worker(self) -> int | None:
        """Return the first logical worker with a waiting chunk and without a process, if any."""
        if not self._bound:
            return None
        taken = self._bound_workers()
        return next((chunk.worker for chunk in self._waiting if chunk.worker not in taken), None)

    def _bind(self, lease: _Lease, worker: int) -> None:
        lease.workers.add(worker)
        lease.restarted = worker in self._placed
        self._placed.add(worker)

    def _advance(self, lease: _Lease) -> bool:
        """Give a lease its next chunk, or end it; return False if it has to wait."""
        waited_for = time.monotonic() >= self._waited_for_since
        lease_s = _WAITED_FOR_LEASE_S if waited_for else self._lease_s
        late = lease.given > 0 and time.monotonic() - lease.began >= lease_s
        late = late and not lease.workers
        if late and not waited_for:
            # A new task takes some 10 ms to start, and the first batch of an iteration must not
            # wait for it. So an expired lease stays until it has had a chunk of this iteration.
            late = lease.run == self._run and bool(self._waiting)
        if self._closed or lease.alone or late or self._active > self._most_tasks:
            self._end(lease)
        elif (place := self._place_for(lease)) is not None:
            chunk = self._waiting[place]
            if chunk.alone and lease.given:
                self._end(lease)
            else:
                del self._waiting[place]
                lease.chunks.append(chunk.payload)
                lease.blocks.append(0)
                lease.given += 1
                lease.busy = True
                lease.run = self._run
                lease.deaths = 0
                lease.alone = chunk.alone
                self._asked_at = time.monotonic()
                if self._bound and chunk.worker not in lease.workers:
                    self._bind(lease, chunk.worker)
                if self._binding is Binding.WATCHED:
                    self._unreported[lease.name] = chunk.worker
                lease.last_worker = chunk.worker
        elif self._releasing:
            self._end(lease)
        else:
            return False
        return True

    def _place_for(self, lease: _Lease) -> int | None:
        """Return the index of the first waiting chunk that a lease may get, or None."""
        if self._held_back(lease):
            return None
        if not self._bound:
            unknown = self._unreported.values()
            fitting = (i for i, chunk in enumerate(self._waiting) if chunk.worker not in unknown)
            return next(fitting, None)
        taken = self._bound_workers() if not lease.workers else ()
        for place, chunk in enumerate(self._waiting):
            if chunk.worker in lease.workers or not (lease.workers or chunk.worker in taken):
                return place
        return None

    def _held_back(self, lease: _Lease) -> bool:
        """Return whether a bound lease leaves its CPU to a task of another training job."""
        waited_for_s = time.monotonic() - self._waited_for_since
        # A lease that holds other resources waits only briefly; it would end, and another begin.
        if not lease.workers or self._holds_resources or waited_for_s < 0:
            return False
        return waited_for_s % (2 * _HELD_BACK_S) < _HELD_BACK_S

    @property
    def _most_tasks(self) -> int:
        """Number of tasks that may work at once."""
        if self.one_by_one:
            return 1
        # Starting more processes at once would delay the first batch.
        all_at_once = self._stuck or (self._warm and self._binding is Binding.ALWAYS)
        return self._num_workers if all_at_once else self.parallel

    def _is_stuck(self) -> bool:
        """Return whether samples may wait for logical workers that have not started."""
        quiet_s = time.monotonic() - self._asked_at
        about_to_begin = self.started > self._begun
        if about_to_begin or not self._waiting or quiet_s < _STUCK_IDLE_S:
            return False
        return quiet_s >= _STUCK_S or self._idle_machine is None or self._idle_machine()

    def _bound_workers(self) -> set[int]:
        """Return the logical workers that are bound to the process of a current lease."""
        workers: set[int] = set()
        return workers.union(*(t.workers for t in self._leases.values() if not t.over))

    def _tell(self, lease: _Lease) -> None:
        if lease.news is not None and not lease.news.done():
            lease.news.set_result(None)
        lease.news = None

    def _forget_over(self) -> None:
        over = [name for name, lease in self._leases.items() if lease.over]
        for name in over[: max(0, len(over) - max(_MAX_OVER, 4 * self.parallel))]:
            del self._leases[name]

    @property
    def at_work(self) -> bool:
        """Whether any chunk waits or is being made."""
        return bool(self._waiting) or any(lease.busy for lease in self._leases.values())

    @property
    def fed(self) -> int:
        """Number of chunks fed so far."""
        return self._fed

    def drop(self) -> None:
        """Drop the chunks that no task has, and end a release that is in progress."""
        self._waiting.clear()
        self._releasing = False

    def release(self) -> None:
        """End the leases of the waiting tasks, because chunks or blocks were lost.

        Once nothing is in flight, the training process learns of the loss. No task would make the
        chunks of a bound logical worker whose process has died, so bound leases end. Then a chunk
        still waits only if it is sent alone and its logical worker has no process.
        """
        self._unreported.clear()
        if self._bound:
            self._releasing = any(not lease.over for lease in self._leases.values())
            for lease in self._leases.values():
                if lease.alone:  # it ends with its chunk, so its logical workers restart elsewhere
                    lease.workers.clear()
            taken = self._bound_workers()
            kept = (c for c in self._waiting if c.alone and c.worker not in taken)
            self._waiting = deque(kept)
        while self._idle:
            _, lease = self._idle.popitem()
            self._end(lease)
            self._tell(lease)
        self._settle()

    def close(self) -> None:
        """End all leases: at once if their tasks wait, else when the tasks ask again."""
        self._closed = True
        self.drop()
        self.release()
        self._changed.set()

    # --- starting tasks ---------------------------------------------------------------------------

    async def more_tasks(self, started: int) -> int | None:
        """Wait until tasks are needed, and return their number.

        Args:
            started: How many tasks the caller knows of. A restarted caller counts again from
                ``first_tasks``.

        Returns:
            How many tasks to start now; None if the pipeline needs no more tasks.
        """
        while not self._closed:
            if started < self.started:
                return self.started - started
            if tasks := self._wanted():
                self.started += tasks
                self._started_at = time.monotonic()
                continue
            self._changed.clear()
            timeout = _LOOK_S if self._waiting else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)
        return None

    @property
    def _active(self) -> int:
        """Number of tasks that have not ended, including tasks that have not started."""
        alive = sum(lease.busy or not lease.over for lease in self._leases.values())
        return alive + self._not_begun

    @property
    def _not_begun(self) -> int:
        return max(0, self.started - self._begun)

    def _wanted(self) -> int:
        """Return how many tasks to start."""
        active = self._active
        self._stuck = self._stuck or self._is_stuck()
        wanted = len(self._waiting)
        if self._bound:
            wanted = len({chunk.worker for chunk in self._waiting} - self._bound_workers())
            # Batches are needed in order, and fewer processes that start at once are ready sooner.
            wanted = min(wanted, self.starting)
        if self._binding is not Binding.ALWAYS and self._others is not None:
            # One task can make all batches. A second task would have to start another process, and
            # tasks of the other jobs would wait for that.
            next_one = not active and not self._others.wait
            wanted = min(wanted, max(self._others.room, int(next_one)))
        room = self._most_tasks - active
        if self._choosy:
            room -= self._not_known_free()
        return max(0, min(room, wanted - self._not_begun))

    def _not_known_free(self) -> int:
        """Return how many tasks ended so recently that their CPUs count as in use."""
        now = time.monotonic()
        self._freed.extend([now + _FREED_S] * self._ended)
        self._ended = 0
        while self._freed and self._freed[0] <= now:
            self._freed.popleft()
        return len(self._freed)

    @property
    def keeps_state(self) -> bool:
        """Whether logical workers keep state from one iteration to the next."""
        return self._persistent and self._bound

    @property
    def waits(self) -> bool:
        """Whether a task may be about to begin, for which other jobs hold their tasks back."""
        about_to = time.monotonic() - self._started_at < _HOPELESS_S
        return self.started > self._begun and about_to
