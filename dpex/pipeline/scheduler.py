"""Hand chunks to the tasks that ask for them, and start tasks.

A task has a lease: the time for which it asks for chunks. Starting a task costs Ray some ten
milliseconds in which a worker does nothing; asking for the next chunk costs one. So a task keeps
asking while there are chunks, and waits a while for more. The scheduler starts a task only when
it wants one.

A bound logical worker lives in one process. The lease that was given its first chunk gets that
worker's chunks and no others, and waits for them while the iterator lives (``worker/binding.py``).
Streams are always bound. A watched one may move after each chunk that has left its copy unchanged.
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
"""How often a worker process may die with the same chunk or block. Ray starts tasks for ever."""

_LEASE_S = 30.0
# Where other tasks may wait for a CPU it is theirs soon.
_SHARED_LEASE_S = 5.0
# Where another trainer's do.
_WAITED_FOR_LEASE_S = 1.0
# A stream's lease goes on, and a task that has waited has its CPU again, free or not: where another
# trainer's task waits those of streams get nothing for so long, then go on for as long.
_HELD_BACK_S = 5.0
# Where CPUs are free another trainer's task waits for its process, most likely, which loads torch.
_PROCESS_STARTS_S = 10.0
# So long it takes until a cluster knows that a node's CPU is free again (Ray's nodes tell one
# another ten times a second): a task that begins before would not go where it had rather be.
_FREED_S = 0.25
# A task that asks for its next chunk has stored all blocks of the chunks before its last one.
_KEPT_CHUNKS = 2
# How long a task waits for its next chunk: while the run goes on, and until the next one begins.
# One that waits longer than the former holds no CPU of the cluster's; other resources it does hold.
_IDLE_S = 0.5
_BETWEEN_RUNS_S = 30.0
# If no task asks for so long, samples may wait for those of logical workers that have not started.
# Without an idle processor they may also just be long, so dpex waits longer before it starts more.
_STUCK_IDLE_S = 1.0
_STUCK_S = 3.0
# A task that has not begun for so long asks for what no node has.
_HOPELESS_S = 60.0
# How often conditions are looked at that change with time.
_LOOK_S = 0.1
# Leases that are over are kept, for Ray starts a task again if what it made is lost.
_MAX_OVER = 256


@dataclass(frozen=True)
class OtherJobs:
    """The other trainers whose tasks share the cluster's CPUs.

    Attributes:
        wait: Whether a task of theirs has not begun yet.
        room: How many tasks of ours may wait to begin, though some run.
    """

    wait: bool
    room: int


@dataclass(frozen=True)
class _Waiting:
    """A chunk that no task has.

    Attributes:
        payload: The pickled chunk.
        worker: The logical worker whose batches it has.
        alone: Whether its task may make no other.
    """

    payload: bytes
    worker: int
    alone: bool


@dataclass
class _Lease:
    """One task's lease.

    Attributes:
        name: Its name.
        began: When it asked first.
        chunks: The last chunks that it was given.
        blocks: How many blocks were made before each of these.
        given: How many chunks it was given in all.
        run: In which iteration it was given the last one.
        alone: Whether the last one was to be made alone.
        workers: The logical workers that are bound to its process.
        last_worker: The logical worker whose chunk it was given last.
        restarted: Whether its next chunk is the first one of a worker that was bound elsewhere.
        deaths: How often its process has died since it was given the last chunk.
        busy: Whether it makes a chunk.
        over: Whether it is to get no more.
        attempt: Its process: another one when Ray starts the task again.
        made: How many blocks this attempt has made, or is about to have made.
        delivered: How many of them have been delivered.
        news: Done when a chunk, or the end, has come for the task that waits.
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
    """Hands a pipeline's chunks to the tasks that ask for them.

    Args:
        loop: The event loop that all methods are called in.
        on_quiet: Called when ``quiet_at`` has changed.
        holds_resources: Whether a task that waits keeps others from running.
        claims_cpus: Whether others may wait for the CPUs of these tasks.
        choosy: Whether tasks prefer some nodes to others.
        num_workers: How many logical workers there are.
        binding: Whether they are bound to processes, to begin with.
        persistent: Whether they outlive an iteration.
        idle: Tells whether the machine has a processor to spare; None where Ray counts them.
        somebody_waits: Tells whether other tasks may wait for what these hold.
        first_tasks: Number of tasks that start by themselves.

    Attributes:
        parallel: Number of tasks that may be at work at once, if no logical worker is bound.
        starting: Number of tasks that may be about to begin at once, if they are bound.
        one_by_one: Whether one task at a time is to work.
        in_run: Whether an iteration goes on.
        started: Number of tasks that were ever started.
        quiet_at: Number of the chunks that were fed when last all of them were done, and what was
            made of them delivered or lost.
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
        # A task that goes on after it has waited has its CPU again, free or not.
        self._between_runs_s = _IDLE_S if holds_resources or claims_cpus else _BETWEEN_RUNS_S
        self._num_workers = num_workers
        self._binding = binding
        self._persistent = persistent
        self._idle_machine = idle
        self._somebody_waits = somebody_waits
        self._lease_s = _SHARED_LEASE_S if claims_cpus else _LEASE_S
        self._on_quiet = on_quiet
        self.quiet_at = 0
        # Set when another task may be wanted.
        self._changed = asyncio.Event()
        self._waiting: deque[_Waiting] = deque()
        # Logical workers that have had a process, in this iteration or as long as they persist.
        self._placed: set[int] = set()
        # Leases that make batches of which nobody knows yet whether they change their copies, and
        # the logical worker of each.
        self._unreported: dict[str, int] = {}
        # Logical workers whose first batches have left their copies unchanged.
        self._unchanged: set[int] = set()
        # When a task last asked, and whether any has come back for a second chunk.
        self._asked_at = math.inf
        self._warm = False
        # Whether samples of this iteration have waited for something.
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
        # Until when the CPU of each task that has ended lately is taken for one in use.
        self._freed: deque[float] = deque()
        self.parallel = self.starting = 1
        self.one_by_one = False
        self.in_run = True
        self._others: OtherJobs | None = None
        self._waited_for_since = math.inf

    def begin(self, *, in_run: bool) -> None:
        """Note that an iteration begins, or that there is none."""
        self._run += in_run
        self._stuck = False
        for lease in self._leases.values():
            lease.made = lease.delivered  # nobody waits for what was in flight
        self._asked_at = math.inf
        self._unreported.clear()
        self._unchanged.clear()
        if in_run and not self._persistent:
            self._unbind()
        self.in_run = in_run

    def _unbind(self) -> None:
        """Forget which process each logical worker is bound to: it begins again, on a new copy."""
        self._placed.clear()
        for lease in self._leases.values():
            lease.workers.clear()

    @property
    def _bound(self) -> bool:
        return self._binding.bound

    def note_state(self, name: str, unchanged: bool) -> None:
        """Note whether a batch has left its copy as it was.

        Until a batch changes its copy a logical worker is bound only while one of its batches is
        made. Workers are released when the first batch of each of them has left its copy as it was.

        Args:
            name: Of the lease that made it.
            unchanged: Whether it has.
        """
        self._unreported.pop(name, None)
        lease = self._leases.get(name)
        if not unchanged:
            self._binding = Binding.ALWAYS
            if lease and not lease.workers and lease.last_worker not in self._bound_workers():
                self._bind(lease, lease.last_worker)  # whose state its process has now
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
            worker: The logical worker whose batches it has.
            alone: Whether its task may make no other: it has killed one before, perhaps.
        """
        self._fed += 1
        if self._releasing and self._bound:
            self._settle()
            return  # lost with its worker; the reader sends it again
        self._waiting.append(_Waiting(payload, worker, alone))
        self._hand_out()
        if self._waiting:
            self._changed.set()

    def note_others(self, others: OtherJobs | None) -> None:
        """Note how the other trainers on the cluster fare; None where there are none."""
        self._others = others
        if others is None or not others.wait:
            self._waited_for_since = math.inf
        else:
            since = time.monotonic() + (_PROCESS_STARTS_S if others.room else 0.0)
            self._waited_for_since = min(since, self._waited_for_since)
        self._hand_out()
        self._changed.set()

    def _hand_out(self) -> None:
        """Give what waits to the leases that wait for it."""
        while self._waiting:
            fitting = (n for n, lease in self._idle.items() if self._place_for(lease) is not None)
            name = next(fitting, None)
            # One that is held back from this very moment on waits for the next note.
            if name is None or not self._advance(self._idle[name]):
                break
            self._tell(self._idle.pop(name))

    async def next_chunk(
        self, name: str, place: int, made: int, attempt: str = ""
    ) -> AssignedChunk | None:
        """Answer a task.

        Args:
            name: Of its lease: the same when Ray starts the task again.
            place: How many chunks it has made; one that was started again begins at 0.
            made: How many blocks it has made of them, or is about to have made.
            attempt: Name of its process.

        Returns:
            Its next chunk, or None where its lease is over.

        Raises:
            MemoryError: It has died too often with one chunk, which is lost.
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
        self._unreported.pop(name, None)  # such a batch was given up, or could not begin
        if not self._bound:
            lease.workers.clear()
        if lease.over or self._advance(lease):
            self._tell(lease)  # an attempt before this one may have waited
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
        """Return a chunk that the lease has had: Ray has started its task again."""
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
            name: Of the lease that made it.
            attempt: The process that did.
        """
        lease = self._leases.get(name)
        if lease is not None and lease.attempt == attempt:
            lease.delivered += 1
            self._settle()

    def _settle(self) -> None:
        """Tell once when nothing is in flight."""
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
        """Return the binding of the chunk that a lease has: it reports as it was to report."""
        released = self._binding is Binding.RELEASED
        return Binding.WATCHED if released and lease.name in self._unreported else self._binding

    async def _wait_for_news(self, lease: _Lease) -> None:
        idle_since = time.monotonic()
        while lease.news is not None and not lease.news.done():
            await asyncio.wait([lease.news], timeout=_IDLE_S)
            self._hand_out()
            waited_s = time.monotonic() - idle_since
            if lease.name not in self._idle or waited_s < self._patience_s(lease):
                continue
            if not self._adopt(lease):
                self._end(lease)
            del self._idle[lease.name]
            self._tell(lease)

    def _patience_s(self, lease: _Lease) -> float:
        """Return how long a lease waits for its next chunk, or for the next iteration."""
        # With its lease the state of its logical workers would end.
        keeps_state = bool(lease.workers) and (self.in_run or self._persistent)
        if not keeps_state:
            return _IDLE_S if self.in_run else self._between_runs_s
        if not self._holds_resources:
            return math.inf
        others_wait = self._others is not None and self._others.wait
        wanted = self._homeless_worker() is not None or others_wait or self._somebody_waits()
        return math.inf if self.in_run and not wanted else _IDLE_S

    def _adopt(self, lease: _Lease) -> bool:
        """Bind one more logical worker to a lease, and give it that worker's chunk.

        The tasks hold resources that a further task would need, so that worker may get no process.
        """
        worker = self._homeless_worker() if self.in_run and lease.workers else None
        if worker is None:
            return False
        self._bind(lease, worker)
        return self._advance(lease)

    def _homeless_worker(self) -> int | None:
        """Return the first logical worker that has a chunk waiting, and no process."""
        if not self._bound:
            return None
        taken = self._bound_workers()
        return next((chunk.worker for chunk in self._waiting if chunk.worker not in taken), None)

    def _bind(self, lease: _Lease, worker: int) -> None:
        lease.workers.add(worker)
        lease.restarted = worker in self._placed
        self._placed.add(worker)

    def _advance(self, lease: _Lease) -> bool:
        """Give a lease the next chunk, or end it; False if it has to wait for either."""
        waited_for = time.monotonic() >= self._waited_for_since
        lease_s = _WAITED_FOR_LEASE_S if waited_for else self._lease_s
        late = lease.given > 0 and time.monotonic() - lease.began >= lease_s
        late = late and not lease.workers
        if late and not waited_for:
            # Another task takes some ten milliseconds to start, for which the first batch of an
            # iteration is not to wait: this one stays for it.
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
        """Return the place of the first waiting chunk that a lease may be given."""
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
        """Return whether a bound lease leaves its CPU to a task of another training process."""
        waited_for_s = time.monotonic() - self._waited_for_since
        # What holds other resources is not patient: its lease would end, and another one begin.
        if not lease.workers or self._holds_resources or waited_for_s < 0:
            return False
        return waited_for_s % (2 * _HELD_BACK_S) < _HELD_BACK_S

    @property
    def _most_tasks(self) -> int:
        """How many tasks may be at work at once."""
        if self.one_by_one:
            return 1
        # More processes that start at once would delay the first batch.
        all_at_once = self._stuck or (self._warm and self._binding is Binding.ALWAYS)
        return self._num_workers if all_at_once else self.parallel

    def _is_stuck(self) -> bool:
        """Return whether samples may wait for those of logical workers that have not started."""
        quiet_s = time.monotonic() - self._asked_at
        about_to_begin = self.started > self._begun
        if about_to_begin or not self._waiting or quiet_s < _STUCK_IDLE_S:
            return False
        return quiet_s >= _STUCK_S or self._idle_machine is None or self._idle_machine()

    def _bound_workers(self) -> set[int]:
        """Return the logical workers that live in a lease's process."""
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
        """Whether any task makes a chunk, or is about to."""
        return bool(self._waiting) or any(lease.busy for lease in self._leases.values())

    @property
    def fed(self) -> int:
        """Number of chunks that were ever fed."""
        return self._fed

    def drop(self) -> None:
        """Forget the chunks that no task has, and what was lost of them."""
        self._waiting.clear()
        self._releasing = False

    def release(self) -> None:
        """End the leases of the tasks that wait: something is lost.

        The reader learns what is lost when nothing is in flight. No task would make the chunks of
        a bound worker whose process has gone, so bound leases end. Workers without one can begin.
        """
        self._unreported.clear()
        if self._bound:
            self._releasing = any(not lease.over for lease in self._leases.values())
            for lease in self._leases.values():
                if lease.alone:  # it ends with its chunk, so its workers begin again elsewhere
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
        """End all turns as soon as their tasks ask again."""
        self._closed = True
        self.drop()
        self.release()
        self._changed.set()

    # --- starting tasks ---------------------------------------------------------------------------

    async def more_tasks(self, started: int) -> int | None:
        """Wait until tasks are wanted.

        Args:
            started: How many whoever asks has started. One that begins again begins at 0.

        Returns:
            How many to start now; None if none will be wanted any more.
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
        """Number of tasks that have not ended, or are about to begin."""
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
            # Batches are needed in order: fewer processes that start at once are ready sooner.
            wanted = min(wanted, self.starting)
        if self._binding is not Binding.ALWAYS and self._others is not None:
            # One task can make all batches. A second one would have to start another process, and
            # the others' tasks would wait for it.
            next_one = not active and not self._others.wait
            wanted = min(wanted, max(self._others.room, int(next_one)))
        room = self._most_tasks - active
        if self._choosy:
            room -= self._not_known_free()
        return max(0, min(room, wanted - self._not_begun))

    def _not_known_free(self) -> int:
        """Return how many tasks have ended lately."""
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
        """Whether a task has not begun yet that may be about to: others hold theirs back for it."""
        about_to = time.monotonic() - self._started_at < _HOPELESS_S
        return self.started > self._begun and about_to
