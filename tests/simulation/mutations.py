"""Planted bugs of the protocol, each of which the search has to find."""

from __future__ import annotations

import concurrent.futures
import importlib.abc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

__all__ = ["ALL", "FIRST", "MUTATIONS", "SELDOM", "Mutation", "find"]

MOST_SCHEDULES = 100_000
# A planted bug may loop for ever within one event.
SCHEDULE_S = 20
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        name: Its name.
        module: The module of ``dpex.protocol`` that has it.
        old: Text that occurs once in the module's source.
        new: The text in its place.
        carrier: The carrier whose schedules have to find it.
    """

    name: str
    module: str
    old: str
    new: str
    carrier: str = "cluster"

    @property
    def path(self) -> Path:
        """The file of the module."""
        return ROOT / "dpex" / "protocol" / f"{self.module}.py"


MUTATIONS = [
    # --- faults of the past, as in CHANGELOG.md -------------------------------------------------
    Mutation(
        "the end of a stream overtakes its last batches",
        "sent_chunks",
        "{missing for missing in sent.missing if missing < batch}",
        "set()",
    ),
    Mutation(
        "a task that asks early hangs",
        "worker_loop",
        "        self._request = _Request.SENT\n        return self.place",
        "        self._request = _Request.SENT\n        return None",
    ),
    Mutation(
        "streams are joined across a gap",
        "sent_chunks",
        "joined[place].chunk.numbers.stop == chunk.first_batch",
        "True",
    ),
    Mutation(
        "a death makes two processes one logical worker",
        "scheduler",
        "            self._replaced.append(replaced)\n",
        "            pass\n",
    ),
    Mutation(
        "a batch that arrives twice is delivered twice",
        "sent_chunks",
        "            elif entry.batch in sent.missing:\n",
        "            else:\n",
    ),
    Mutation(
        "a chunk gets the number of a later iteration, and is made after its own has ended",
        "task_lease",
        "        payload, run = self._chunks[-1].payload, self._runs[-1]\n",
        "        payload, run = self._chunks[-1].payload, self._runs[-1] + 1\n",
    ),
    Mutation(
        "of a chunk whose task died, only the first batch is resent",
        "recovery",
        "singles.setdefault(again, []).extend(sent.rest(most=1))",
        "singles.setdefault(again, []).extend(list(sent.rest(most=1))[:1])",
    ),
    Mutation(
        "a task that cannot restart keeps another one waiting",
        "scheduler",
        "if self._holds_resources and now - lease.asked_at >= tuning.IDLE_S:",
        "if False:",
    ),
    Mutation(
        "a replaced process returns, and ends its task",
        "scheduler",
        "answer = None if lease is None else Replaced()",
        "answer = None",
    ),
    Mutation(
        "a repeated request counts as a restart",
        "scheduler",
        "if lease.has_asked(attempt, place):",
        "if False:",
    ),
    Mutation(
        "a restarted task before a later stage continues in the next iteration",
        "scheduler",
        "if self._later_stages and lease.was_restarted and lease.given and lease.run != self.run:",
        "if False:",
    ),
    Mutation(
        "a chunk to repeat does not wait for the process that makes its logical worker",
        "scheduler",
        "if not self._bindings.runs_elsewhere(lease, lease.repeats):",
        "if True:",
    ),
    Mutation(
        "a process asks first after its task's lease has ended, and holds a worker for ever",
        "scheduler",
        "if made or (had_ended and lease.run != self.run):",
        "if made:",
    ),
    Mutation(
        "a restarted task that had ended gives its chunks to other tasks",
        "scheduler",
        "        if had_ended:\n            # They",
        "        if not chunks:\n            # They",
    ),
    Mutation(
        "a task gives back chunks of an iteration that has ended",
        "task_lease",
        "if its_run == run]",
        "if True]",
    ),
    Mutation(
        "a chunk that is repeated does not bind its logical worker",
        "scheduler",
        "if chunk.iteration == self.run and self.in_run:",
        "if False:",
    ),
    Mutation(
        "a task does not hold the logical workers of the chunks that it has to repeat",
        "task_lease",
        "        if self._repeats:\n            # Later",
        "        if False:\n            # Later",
    ),
    Mutation(
        "a closed pipeline forgets the processes that have not ended with their tasks",
        "scheduler",
        "extend(lease.attempt for lease in unheard)",
        "extend(())",
    ),
    Mutation(
        "a closed pipeline names processes that have ended their tasks early",
        "scheduler",
        "lease in self._leases.values() if lease.runs is not None)",
        "lease in self._leases.values() if lease.running)",
    ),
    Mutation(
        "the deaths on a chunk whose last sample kills its process are not counted",
        "scheduler",
        "not (unfinished or self._later_stages)",
        "not self._later_stages",
    ),
    Mutation(
        "a new pipeline does not know the processes that Ray has replaced",
        "scheduler",
        "deque(maxlen=tuning.MAX_REPLACED) if replaced is None else replaced",
        "deque(maxlen=tuning.MAX_REPLACED)",
    ),
    Mutation(
        "a restarted task reports only the first logical worker that starts again",
        "task_lease",
        "restarted=self.repeats in self.restarted,",
        "restarted=bool(self.workers) and not kept,",
    ),
    Mutation(
        "the state after a repeated chunk is taken for that of the last chunk",
        "worker_bindings",
        "        worker = lease.runs\n",
        "        worker = lease.last_worker\n",
    ),
    Mutation(
        "a cancelled chunk takes the report of its logical worker along",
        "task_lease",
        "elif made > self._made_before and self.runs is not None:",
        "elif self.runs is not None:",
    ),
    # --- the scheduler --------------------------------------------------------------------------
    Mutation(
        "a chunk stays after it is given",
        "scheduler",
        "            del self._chunks[place]\n            self._waiting.pop(lease.name, None)",
        "            self._waiting.pop(lease.name, None)",
    ),
    Mutation(
        "a lease of a single chunk gets a second one",
        "scheduler",
        "return lease.alone or (chunk is not None and chunk.alone and lease.given > 0)",
        "return False",
    ),
    Mutation(
        "the end of a lease is not told to a task that waits",
        "scheduler",
        "            if lease.unanswered:\n                self._answer(lease, None)",
        "            if False:\n                self._answer(lease, None)",
    ),
    Mutation(
        "waiting chunks start no task",
        "scheduler",
        "self._changed = self._changed or bool(self._chunks)\n        self._hand_out()\n",
        "self._hand_out()\n",
    ),
    # --- leases ---------------------------------------------------------------------------------
    Mutation(
        "a restarted task repeats only its last chunk",
        "task_lease",
        "kept = max(0, place - self.given + len(self._chunks))",
        "kept = max(0, len(self._chunks) - 1)",
    ),
    Mutation(
        "the number of a repeated chunk is off by one",
        "task_lease",
        "self.given - len(self._chunks) + kept,",
        "self.given - len(self._chunks) + kept + 1,",
    ),
    Mutation(
        "a restarted task skips one block too few",
        "task_lease",
        "skipped = max(0, self._blocks[kept] - self.made)",
        "skipped = max(0, self._blocks[kept] - self.made - 1)",
    ),
    Mutation(
        "deaths do not count",
        "task_lease",
        "self._deaths += place == 0",
        "self._deaths += 0",
    ),
    Mutation(
        "a task that has asked early does not hold its logical worker",
        "task_lease",
        "self.making = self.runs if early and self._finished < place else None",
        "self.making = None",
    ),
    Mutation(
        "an end of samples that overtakes its request is forgotten",
        "task_lease",
        "        self._finished = place\n        if place",
        "        if place",
    ),
    Mutation(
        "a lease holds only what it makes",
        "task_lease",
        "held = self.running if self.ended else self.running | self.workers",
        "held = self.running",
    ),
    # --- bindings -------------------------------------------------------------------------------
    Mutation(
        "a changed copy is not bound",
        "worker_bindings",
        "        self.binding = Binding.ALWAYS\n",
        "        pass\n",
    ),
    Mutation(
        "a bound lease gets chunks of any logical worker",
        "worker_bindings",
        "if alone and (chunk.worker in lease.workers or not lease.workers):",
        "if alone:",
    ),
    Mutation(
        "logical workers are released before each has reported",
        "worker_bindings",
        "if len(self._unchanged) == self._num_workers:",
        "if self._unchanged:",
    ),
    Mutation(
        "state starts again in another task without a report",
        "task_lease",
        "restarted = self.last_worker in self.restarted",
        "restarted = False",
    ),
    Mutation(
        "state starts again in a restarted task without a report",
        "task_lease",
        "restarted=self.repeats in self.restarted,",
        "restarted=False,",
    ),
    Mutation(
        "a start of state is reported for each chunk",
        "task_lease",
        "            self.restarted.discard(self.runs)\n",
        "            pass\n",
    ),
    # --- the budgets of retries -----------------------------------------------------------------
    Mutation(
        "a lost batch gets one try too many",
        "recovery",
        "attempt.tries < most_tries:",
        "attempt.tries <= most_tries:",
    ),
    Mutation(
        "a lost batch gets one try too few",
        "recovery",
        "attempt.tries < most_tries:",
        "attempt.tries < most_tries - 1:",
    ),
    Mutation(
        "a lost batch gets a new budget for its blocks",
        "recovery",
        "again = replace(attempt, tries=attempt.tries + 1, one_by_one=store_full)",
        "again = Attempt(alone=True, tries=attempt.tries + 1, one_by_one=store_full)",
    ),
    Mutation(
        "the blocks of a batch may be lost once more",
        "delivery",
        "message.attempt.lost_blocks == tuning.MOST_LOSSES for",
        "message.attempt.lost_blocks == tuning.MOST_LOSSES + 1 for",
    ),
    Mutation(
        "one more run may be lost in a row",
        "delivery",
        "or self._runs_lost == tuning.MOST_LOSSES",
        "or self._runs_lost == tuning.MOST_LOSSES + 1",
    ),
    Mutation(
        "a chunk may kill one more process",
        "task_lease",
        "if self._deaths >= tuning.MAX_DEATHS:",
        "if self._deaths > tuning.MAX_DEATHS:",
    ),
    Mutation(
        "an early request forgets the deaths on the chunk that is being made",
        "task_lease",
        "if self.making is None:  # else",
        "if True:  # else",
    ),
    Mutation(
        "an error does not name its batch",
        "sent_chunks",
        'what = f"batch {batch} (',
        'what = f"batch {chunk.first_batch - 1} (',
    ),
    # --- the order of delivery ------------------------------------------------------------------
    Mutation(
        "a loss that has no batches left resends none",
        "sent_chunks",
        "        return lost if lost.missing else None\n",
        "        return None\n",
    ),
    Mutation(
        "a new run forgets the batches in flight",
        "sent_chunks",
        "taken, self._chunks = list(self._chunks.values()), {}",
        "taken, self._chunks = list(self._chunks.values())[1:], {}",
    ),
    Mutation(
        "a chunk with a gap is resent whole",
        "sent_chunks",
        "next((n for n, b in expected if b != first + n * stride), len(missing))",
        "len(missing)",
    ),
    Mutation(
        "the error of a stream does not end it",
        "recovery",
        "found.ended.append(min(failed) + sent.chunk.stride)",
        "pass",
    ),
    Mutation(
        "the prefetch does not look at the window",
        "batch_order",
        "            if self.in_flight >= self._planner.window:\n                return False\n",
        "",
    ),
    Mutation(
        "batches are delivered as they come",
        "batch_order",
        "return self.next_batch if self.next_batch in made else None",
        "return min(made)",
    ),
    # --- the worker's loop ----------------------------------------------------------------------
    Mutation(
        "the loop takes the number of its chunk for the number of chunks",
        "worker_loop",
        "self.place, self._binding = assigned.place + 1, assigned.binding",
        "self.place, self._binding = assigned.place, assigned.binding",
    ),
    Mutation(
        "the last block stays in the loop if it is short",
        "worker_loop",
        "            if not (last or full or batch.seconds >= long_batch_s):\n",
        "            if not (full or batch.seconds >= long_batch_s):\n",
    ),
]

MUTATIONS += [
    Mutation(name, module, old, new, "processes")
    for name, module, old, new in [
        (
            "a cancelled chunk takes along that the state starts again",
            "worker_loop",
            "restarts = self._serves_one and opened is None and assigned.restarted",
            "restarts = False",
        ),
        (
            "a replacement does not say that the state starts again",
            "worker_queue",
            "self._restarted = self._restarted or self._place > 0",
            "self._restarted = False",
        ),
        (
            "the second chunk of a dead process is lost",
            "worker_queue",
            "self._waiting.extendleft(reversed(given))",
            "self._waiting.extendleft(given[:1])",
        ),
        (
            "the chunks of a dead process change their order",
            "worker_queue",
            "self._waiting.extendleft(reversed(given))",
            "self._waiting.extendleft(given)",
        ),
        (
            "a replacement gets chunks of an iteration that has ended",
            "worker_queue",
            "if not (self._open and given):",
            "if not given:",
        ),
        (
            "a chunk kills one more worker process",
            "worker_queue",
            "if deadly.deaths >= tuning.MAX_DEATHS:",
            "if deadly.deaths > tuning.MAX_DEATHS:",
        ),
        (
            "a process gets chunks that it has not requested",
            "worker_queue",
            "self._requested = self._reads = False",
            "self._reads = False",
        ),
        (
            "a new process has to request its first chunk",
            "worker_queue",
            "self._place, self._requested, self._reads = 0, True, False",
            "self._place, self._requested, self._reads = 0, False, False",
        ),
        (
            "a large chunk waits for ever",
            "worker_queue",
            "        self._given.popleft()\n        self._reads = not self._given",
            "        self._given.popleft()\n        self._reads = False",
        ),
    ]
]

# Races that only a longer search has found, as the bugs that their corrections removed.
RARE = [
    Mutation(
        "a chunk to repeat waits for ever for a dead process whose request comes late",
        "scheduler",
        "        wanted |= {lease.repeats for lease, _ in self._repeating.values()}",
        "",
    ),
    Mutation(
        "a logical worker whose only chunk was cancelled has had a process",
        "worker_bindings",
        "        self._placed -= lease.fresh",
        "",
    ),
    Mutation(
        "a block that a request has announced does not count if its chunk is cancelled",
        "worker_loop",
        "        self.made = self._made_then\n        self._request",
        "        self._request",
    ),
    Mutation(
        "a process that Ray has replaced counts as at work after its last sample",
        "scheduler",
        "            self._replaced.remove(attempt)",
        "            pass",
    ),
    Mutation(
        "a repeated early request releases a logical worker whose sample is being made",
        "task_lease",
        "known = self.unanswered or self.answer is not None or self.ended",
        "known = self.unanswered or self.answer is not None",
    ),
    Mutation(
        "a new process makes a chunk of an iteration that has ended",
        "scheduler",
        "chunk = replace(chunk, iteration=0)",
        "pass",
    ),
    Mutation(
        "a late change of an earlier iteration binds its logical worker in this one",
        "scheduler",
        "lease = None  # the copy goes with its iteration",
        "pass",
    ),
]

ALL = [*MUTATIONS, *RARE]

# Where `make test` begins to search for the bugs that few schedules show, from 0 for the others:
# the seeds that `make simulate MUTATIONS=1` prints.
FIRST = {
    "of a chunk whose task died, only the first batch is resent": 370,
    "streams are joined across a gap": 4191,
    "a cancelled chunk takes the report of its logical worker along": 343,
    "an end of samples that overtakes its request is forgotten": 1688,
    "one more run may be lost in a row": 318,
    "a chunk with a gap is resent whole": 794,
}
# The bugs that show after more schedules than `make test` plays for each.
# `make simulate MUTATIONS=1` searches for them.
SELDOM = {
    "a closed pipeline names processes that have ended their tasks early",
    "a new pipeline does not know the processes that Ray has replaced",
    "a process asks first after its task's lease has ended, and holds a worker for ever",
    "a replacement gets chunks of an iteration that has ended",
    "a task gives back chunks of an iteration that has ended",
    "a task that cannot restart keeps another one waiting",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from its changed source."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the changed module only."""
        if name != f"dpex.protocol.{self._mutation.module}":
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the changed source."""
        mutation = self._mutation
        source = mutation.path.read_text()
        assert source.count(mutation.old) == 1, mutation.name
        changed = source.replace(mutation.old, mutation.new)
        exec(compile(changed, str(mutation.path), "exec"), module.__dict__)


def _play(mutation: Mutation, first: int, count: int) -> str | None:
    """Plant a bug in this process, and return the first failure among some seeds."""
    sys.meta_path.insert(0, _Finder(mutation))
    from simulation.schedule import Failure
    from simulation.search import WORLDS

    world = WORLDS[mutation.carrier]

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise Failure("an event does not end")

    signal.signal(signal.SIGALRM, give_up)
    for seed in range(first, first + count):
        signal.alarm(SCHEDULE_S)
        try:
            world(seed).play()
        except Failure as failure:
            return f"{seed - first + 1} {failure}"
    return None


def find(name: str, *, first: int = 0, count: int = MOST_SCHEDULES) -> str | None:
    """Search for a planted bug in a process of its own.

    Args:
        name: Name of the mutation.
        first: The first seed.
        count: Maximum number of schedules.

    Returns:
        The number of schedules and the failure; None if there was no failure.
    """
    command = [sys.executable, "-m", "simulation.mutations", name, str(first), str(count)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip() or None


def main() -> int:
    """Search for all planted bugs, and print after how many schedules each was found."""
    missed = 0
    names = [mutation.name for mutation in MUTATIONS]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, found in zip(names, pool.map(find, names), strict=True):
            missed += found is None
            print(f"{name}: {found or 'not found'}", flush=True)
    print(f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} planted bugs found")
    return 1 if missed else 0


if __name__ == "__main__":
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found = _play(next(m for m in ALL if m.name == name), first, count)
    print(found or "")
