"""The state of simulated dataset copies, against the state that torch's workers would have.

Invariant: a logical worker that keeps state makes its batches in order, in one process, on a copy
that has made exactly the batches before. If that state is lost, dpex reports this exactly once, and
the state starts again at the batch after the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Chunk
from simulation.machines import Copy

if TYPE_CHECKING:
    from simulation.attempts import Attempt
    from simulation.schedule import World

__all__ = ["States"]


@dataclass(slots=True)
class _Life:
    """The state of one logical worker on one dataset version.

    Attributes:
        owner: The attempt that made its last batch as a bound logical worker, if any.
        holder: The last attempt that made a watched batch of it, or whose copy it changed late, or
            that was cancelled during one of its batches.
        begins: Iteration and batch at which the state started again, as reported.
        known: The last iteration in which any of its batches changed a copy.
        lost: Whether a process that had it has ended, and no report has followed.
        free: Whether the state may start again at its next batch, because dpex has reported a loss
            of all workers' state, or a late change.
    """

    owner: Attempt | None = None
    holder: Attempt | None = None
    begins: tuple[int, int] | None = None
    known: int = -1
    lost: bool = False
    free: bool = False


class States:
    """The states of all logical workers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lives: dict[tuple[int, int], _Life] = {}
        # For each iteration, the numbers of each logical worker's first and last batch.
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        # For each dataset version, the last iteration that was delivered to its end.
        self._finished: dict[int, int] = {}
        # The binding that each chunk had when it was first given.
        self._given: dict[tuple[str, int], Binding] = {}
        # The logical workers whose batches a task has made because they are bound to it.
        self._bound: dict[tuple[str, int], set[int]] = {}
        # The same for watched batches, after which the logical worker may stay bound.
        self._watched: dict[tuple[str, int], set[int]] = {}
        # Tasks, dataset versions and logical workers. A task may keep the state of its logical
        # worker, which it made before logical workers were bound, and get further ones.
        self._kept: set[tuple[str, int, int]] = set()
        # The tasks whose leases have ended. Ray may restart such a task.
        self._ended: set[str] = set()
        # The batches of the present iteration that were sent, and the chunks with batches that were
        # sent before, because they were lost.
        self._sent: set[int] = set()
        self._resent: set[tuple[str, int]] = set()
        # Logical workers that had a chunk sent alone, for which leases ended.
        self._alone: set[tuple[int, int]] = set()
        # Dataset versions with a full store, so that one task works at a time and the others end.
        self._one_by_one: set[int] = set()
        self._late: set[int] = set()
        # Iteration, logical worker and number of each batch that has killed a process.
        self._deadly: set[tuple[int, int, int]] = set()
        # Pipelines and logical workers with a batch that was compared with its copy.
        self._compared: set[tuple[int, int]] = set()

    def _life(self, key: tuple[int, int]) -> _Life:
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = _Life()
        return life

    def _bound_to(self, attempt: Attempt, chunk: Chunk) -> set[int]:
        """Return the logical workers that are bound to a task."""
        return self._bound.setdefault((attempt.name, chunk.run.dataset_version), set())

    def _note_kept(self, attempt: Attempt, chunk: Chunk) -> None:
        """Note that a task may keep a logical worker, and also get others later."""
        self._kept.add((attempt.name, chunk.run.dataset_version, chunk.worker))

    # --- what the training process does -----------------------------------------------------------

    def begin(self, iteration: int, ranges: list[tuple[int, int]]) -> None:
        """Note an iteration, and the numbers of each logical worker's first and last batch."""
        self._ranges[iteration] = ranges
        self._sent.clear()

    def finish(self, iteration: int, version: int) -> None:
        """Note that an iteration has been delivered to its end."""
        self._finished[version] = iteration

    def send(self, version: int, chunk: Chunk, *, alone: bool, single: bool) -> None:
        """Note how a chunk is sent.

        Args:
            version: The dataset version.
            chunk: The chunk.
            alone: Whether its task makes no other chunk.
            single: Whether only one task works at a time.
        """
        batches = set(chunk.numbers)
        if not self._sent.isdisjoint(batches):
            self._resent.add((chunk.run.key, chunk.number))
        self._sent |= batches
        if alone:
            self._alone.add((version, chunk.worker))
        if single:
            self._one_by_one.add(version)

    def forget(self, version: int) -> None:
        """Note a report that all logical workers of a dataset version have lost their state."""
        for worker in range(self._world.plan.workers):
            self._lives[version, worker] = _Life(free=True)

    # --- what happens to tasks and processes ------------------------------------------------------

    def give(self, attempt: Attempt, assigned: AssignedChunk) -> None:
        """Check that a task with a bound logical worker gets chunks of no other one."""
        chunk: Any = assigned.payload
        version, worker, plan = chunk.run.dataset_version, chunk.worker, self._world.plan
        self._given.setdefault((chunk.run.key, chunk.number), assigned.binding)
        if not assigned.binding.bound:
            if assigned.again:  # the process that was watched has ended before it reported a change
                self._given[chunk.run.key, chunk.number] = assigned.binding
                self._bound_to(attempt, chunk).discard(worker)
            return
        attempt.had.append((version, worker))
        life = self._life((version, worker))
        if attempt.over or attempt.replaced:
            self._lose(attempt, life)
        watched = self._watched.setdefault((attempt.name, version), set())
        if assigned.binding is Binding.WATCHED:
            watched.add(worker)
        if assigned.binding is not Binding.ALWAYS:
            return
        bound = self._bound_to(attempt, chunk)
        if assigned.again:
            # It may repeat chunks of several logical workers, which were not bound then.
            if self._given[chunk.run.key, chunk.number] is not Binding.ALWAYS:
                self._note_kept(attempt, chunk)
            return
        if (attempt.name, version, worker) in self._kept:
            return
        if worker in watched or (life.holder is not None and life.holder.name == attempt.name):
            bound.add(worker)  # it was watched here, or it changed a copy of this task late
        # A further task cannot start if waiting tasks hold the resources.
        idle_s = self._world.clock.now - attempt.asked_at
        if bound and worker not in bound and not (plan.holds_resources and idle_s >= tuning.IDLE_S):
            self._world.fail(f"{attempt.name} gets chunks of logical workers {bound | {worker}}")
        bound.add(worker)

    def end_lease(self, attempt: Attempt) -> None:
        """Note that a lease has ended, although its task's process does not know this yet."""
        attempt.ended, attempt.waited_s = True, self._world.clock.now - attempt.asked_at
        self._ended.add(attempt.name)

    def lose(self, attempt: Attempt) -> None:
        """Note that the process of an attempt has ended, or that Ray takes it for dead."""
        for key in attempt.had:
            self._lose(attempt, self._life(key))

    def _lose(self, attempt: Attempt, life: _Life) -> None:
        life.lost = life.lost or life.owner is None or life.owner is attempt

    def report(self, attempt: Attempt, chunk: Chunk) -> None:
        """Check a report that the state of a logical worker starts again."""
        if attempt.replaced or attempt.pipeline.closed:
            return
        if attempt.again and attempt.name in self._ended:
            return
        life = self._life((chunk.run.dataset_version, chunk.worker))
        if not self._is_lost(life, chunk):
            self._world.fail(
                f"the state of logical worker {chunk.worker} is reported to start again in "
                f"{attempt.id}, but it is not lost"
            )
        life.lost, life.owner, life.holder = False, None, None

    def _is_lost(self, life: _Life, chunk: Chunk) -> bool:
        """Return whether the state of a logical worker may be lost."""
        owner = life.owner or life.holder
        if life.lost or owner is None:
            return life.lost
        if owner.replaced or not owner.process.alive:
            return True
        if not owner.ended:
            return False
        # Its lease has ended. Each reason is documented.
        plan, version = self._world.plan, chunk.run.dataset_version
        idle = plan.holds_resources and owner.waited_s >= tuning.IDLE_S
        alone = not self._alone.isdisjoint(owner.had)
        # Before a later stage, the lease of a restarted task ends with its iteration.
        ends = plan.later_stages and plan.persistent and owner.follows
        # The lease of a released logical worker may end before its late change is known.
        late = life.owner is None and version in self._late
        return idle or alone or ends or late or version in self._one_by_one

    # --- batches ----------------------------------------------------------------------------------

    def kill(self, chunk: Chunk, index: int) -> None:
        """Note that a batch has killed its process."""
        self._deadly.add((self._world.iteration_of(chunk.run.key), chunk.worker, index))

    def kills(self, batch: int) -> bool:
        """Return whether a batch of the present iteration has killed a process."""
        index, worker = divmod(batch, self._world.plan.workers)
        return (self._world.training.iteration, worker, index) in self._deadly

    def cancel(self, attempt: Attempt, chunk: Chunk, binding: Binding) -> None:
        """Note that a batch is cancelled, of which a bound logical worker has made samples."""
        if binding.bound and not attempt.replaced and not attempt.pipeline.closed:
            self._hold(attempt, chunk, self._life((chunk.run.dataset_version, chunk.worker)))

    def compare(self, attempt: Attempt, chunk: Chunk, binding: Binding, *, changes: bool) -> None:
        """Note that a batch has been compared with its copy."""
        key = attempt.pipeline.number, chunk.worker
        life = self._life((chunk.run.dataset_version, chunk.worker))
        if binding is Binding.WATCHED:
            self._compared.add(key)
            if changes:  # its logical worker is bound to its task from now on
                self._bound_to(attempt, chunk).add(chunk.worker)
        elif changes:
            if self._world.plan.binding is Binding.WATCHED and key not in self._compared:
                self._world.fail(
                    f"logical worker {chunk.worker} is released before one of its batches was "
                    "compared"
                )
            self._note_late(chunk.run.dataset_version)
            self._note_kept(attempt, chunk)
            self._hold(attempt, chunk, life)

    def _hold(self, attempt: Attempt, chunk: Chunk, life: _Life) -> None:
        """Note the holder of a state. If the last holder has lost it, a report may still follow."""
        if life.owner is None and life.holder is not attempt:
            life.lost = self._is_lost(life, chunk)
        life.holder = attempt

    def _note_late(self, version: int) -> None:
        """Note that dpex reports a late change: until then, any process made any batch."""
        if version not in self._late:
            self._late.add(version)
            for worker in range(self._world.plan.workers):
                life = self._life((version, worker))
                life.free = life.free or life.owner is None

    def make(
        self, attempt: Attempt, chunk: Chunk, index: int, copy: Copy, binding: Binding
    ) -> None:
        """Check a batch before it is made.

        Args:
            attempt: The attempt that makes it.
            chunk: Its chunk.
            index: Its number among the batches of its logical worker.
            copy: The copy that it is made on.
            binding: The binding that the chunk was given with now.
        """
        if attempt.replaced or attempt.pipeline.closed:
            return  # a later attempt makes its batches again
        if attempt.again and attempt.name in self._ended:
            # Ray has lost output of a task that had ended. Only the batches of that output matter.
            return
        life = self._life((chunk.run.dataset_version, chunk.worker))
        if binding.bound:
            self._hold(attempt, chunk, life)
        # A repeated chunk may be one of a logical worker that was bound to no process then.
        given = self._given[chunk.run.key, chunk.number]
        changes = self._world.plan.keeps_state(chunk.worker, index)
        place = self._world.iteration_of(chunk.run.key), index
        current = place[0] == self._world.training.iteration  # else its batches are not delivered
        if given is Binding.ALWAYS or (given is Binding.WATCHED and changes):
            if current:
                self._check_process(attempt, chunk, life)
            life.owner = attempt
        if not changes:
            return
        if (chunk.run.key, chunk.number) in self._resent:
            # dpex reports the loss. The copy may have made this batch before, and later ones.
            copy.rewound = chunk.stream
            return
        if given is Binding.RELEASED:
            # dpex reports the change as late: until then, any process made any batch.
            copy.last = max(copy.last or place, place)
        else:
            if current:
                self._check_state(attempt, chunk, place, copy, life)
            if copy.last is None and (copy.restarted or chunk.stream):
                life.begins = place
            copy.last, life.free = place, False
        life.known, copy.rewound = max(life.known, place[0]), False

    def _check_process(self, attempt: Attempt, chunk: Chunk, life: _Life) -> None:
        """Check that a bound logical worker has the process that it had."""
        worker = chunk.worker
        owner = life.owner
        if owner is not None and owner.process is not attempt.process:
            if not self._is_lost(life, chunk):
                self._world.fail(
                    f"logical worker {worker} moved from {owner.process.name} to "
                    f"{attempt.process.name}"
                )
            life.lost = True

    def _check_state(
        self, attempt: Attempt, chunk: Chunk, place: tuple[int, int], copy: Copy, life: _Life
    ) -> None:
        """Check that the copy's state is exactly what torch's worker would have."""
        if self._is_right(chunk, place, copy, life):
            return
        if life.free:
            life.begins = place
        elif chunk.stream:
            # Its process has read the stream again from the beginning, so the state is right.
            if not (copy.rewound or life.lost):
                self._world.fail(f"{attempt.id} reads stream {chunk.worker} again")
            life.lost = False
        elif copy.last is not None or not copy.restarted:
            self._world.fail(
                f"{attempt.id} makes batch {place} of logical worker {chunk.worker} on a copy "
                f"whose last batch is {copy.last}, and does not report this"
            )

    def _is_right(self, chunk: Chunk, place: tuple[int, int], copy: Copy, life: _Life) -> bool:
        """Return whether the last batch on a copy is the one before ``place``."""
        last, begins, (iteration, index) = copy.last, place == life.begins, place
        if not (begins or self._is_first(chunk.worker, iteration, index)):
            if last is None and self._kill_all(chunk.worker, iteration, index):
                return True
            return last == (iteration, index - 1)
        if last is None:
            return begins or not (0 <= life.known < iteration)
        # Between iterations, a copy stays, and has made all batches of an iteration that was
        # delivered to its end. A restarted task does not repeat batches that were delivered.
        finished = self._finished.get(chunk.run.dataset_version, -1)
        if not finished <= last[0] < iteration:
            return False
        restarted = life.begins is not None and life.begins[0] == finished
        whole = last[1] == self._ranges[last[0]][chunk.worker][1]
        return last[0] > finished or whole or restarted

    def _is_first(self, worker: int, iteration: int, index: int) -> bool:
        """Return whether no earlier batch of the iteration changes the logical worker's copy."""
        first, _ = self._ranges[iteration][worker]
        return index == first or not self._world.plan.keeps_state(worker, index - 1)

    def _kill_all(self, worker: int, iteration: int, index: int) -> bool:
        """Return whether all earlier batches of the iteration kill every process.

        They leave no copy, and errors take their places.
        """
        first, _ = self._ranges[iteration][worker]
        return all((iteration, worker, each) in self._deadly for each in range(first, index))
