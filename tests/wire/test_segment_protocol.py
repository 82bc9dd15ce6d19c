"""A search through the protocol of segments: every interleaving of the processes' steps.

The worker process, the readers of the training process and its fork are threads here. They run the
code of ``dpex.wire.segments``. A step is one access to a word of a segment. One thread at a time
runs, up to its next step, and the search chooses which one. The search tries every choice, except
from a state that it has been in before.
"""

from __future__ import annotations

import gc
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dpex import tuning
from dpex.wire import segments
from dpex.wire.machine import machine
from dpex.wire.pickling import Bytes
from dpex.wire.segments import Place, SegmentLostError, SegmentPool, SegmentReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no anonymous files")

NBYTES = mmap.PAGESIZE  # a smaller batch would not use a segment again
STEPS_S = 20.0


class Changed(AssertionError):
    """A batch that was delivered holds something else."""


class Actor:
    """A thread that runs from step to step.

    Attributes:
        history: What it has seen and done so far, its steps included.
        over: Whether it runs to its end without stops.
        enabled: Whether it can take its next step.
        done: Whether it has ended.
        error: The error that ended it, if there was one.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.history: list[Any] = []
        self.enabled: Callable[[], bool] = lambda: True
        self.done = self.over = False
        self.error: BaseException | None = None
        self._work = work
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.done = True
        self._has_stopped.release()

    def stop_before(self, enabled: Callable[[], bool] = lambda: True) -> None:
        """Wait for the next turn of this thread, which comes once it is enabled."""
        if not self.over:
            self.enabled = enabled
            self._has_stopped.release()
            self._may_run.acquire()

    def finish(self) -> None:
        """Let the thread run to its end."""
        self.over = True
        self._may_run.release()
        self._thread.join(STEPS_S)
        assert not self._thread.is_alive(), "the thread hangs"

    def step(self) -> None:
        """Let the thread run up to its next step."""
        self.history.append("step")
        self._may_run.release()
        assert self._has_stopped.acquire(timeout=STEPS_S), "the thread hangs"
        if self.error is not None:
            raise self.error

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


class Words:
    """The words of a segment. Each access by an actor is a step."""

    def __init__(self, words: Any, world: World) -> None:
        self._words, self._world = words, world

    def __getitem__(self, word: int) -> int:
        actor = self._world.step()
        value = int(self._words[word])
        if actor is not None:
            actor.history.append((word, value))
        return value

    def __setitem__(self, word: int, value: int) -> None:
        actor = self._world.step()
        if actor is not None:
            actor.history.append((word, "set", int(value)))
        self._words[word] = value

    def values(self) -> tuple[int, ...]:
        return tuple(self._words[:4].tolist())


class World:
    """A worker process and a training process, at their start.

    Attributes:
        places: The places that the worker process has sent.
        held: The batches that the training process or its fork holds, and their content.
        words: The words of all segments.
    """

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.held: dict[Any, tuple[Bytes, int]] = {}
        self.words: list[Words] = []
        self.actors: list[Actor] = []
        self.pool = SegmentPool()
        self.reader = SegmentReader()
        self.lost: set[int] = set()

    def step(self) -> Actor | None:
        """Stop the calling actor before its next step; return it, or None for another thread."""
        actor = next((actor for actor in self.actors if actor.is_current), None)
        if actor is not None:
            actor.stop_before()
        return actor

    # --- what the actors do ---------------------------------------------------------------------

    def serve(self, run: str) -> None:
        self.pool.serve("pipeline", run, machine())

    def send(self, batch: int) -> None:
        place = self.pool.place(np.full(NBYTES, batch, np.uint8))
        if place is not None:  # else the block holds the batch
            self.places[batch] = place

    def close(self) -> None:
        self.pool.close("pipeline")

    def hold(self, batch: int, *, may_be_lost: bool = False) -> None:
        """View a batch once it is sent, and keep it."""
        actor = next(actor for actor in self.actors if actor.is_current)
        actor.stop_before(lambda: batch in self.places)
        if batch not in self.places:
            return  # the search ends here
        try:
            self.held[batch] = self.reader.view(self.places[batch]), batch
        except SegmentLostError:
            assert may_be_lost, f"batch {batch} of a live run is lost"
            self.lost.add(batch)
            actor.history.append("lost")

    def free(self, batch: int) -> None:
        self.step()
        self.held.pop(batch, None)

    def fork(self) -> None:
        """Fork the training process: the fork keeps all batches that its parent holds."""
        actor = next(actor for actor in self.actors if actor.is_current)
        actor.stop_before()
        segments._forks += 1
        for batch, (view, value) in list(self.held.items()):
            # Memory of the fork: not an array that keeps the parent's alive.
            address = view.__array_interface__["data"][0]
            memory = (np.ctypeslib.ctypes.c_uint8 * NBYTES).from_address(address)
            self.held["fork", batch] = np.frombuffer(memory, np.uint8), value
            actor.history.append(("kept", batch))

    # --- what the search sees -------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Everything that the future depends on."""
        words = tuple(words.values() for words in self.words)
        return words, tuple((*actor.history, actor.done) for actor in self.actors)

    def check(self) -> None:
        for batch, (view, value) in self.held.items():
            if not (view == value).all():
                raise Changed(f"batch {batch} holds {view[0]}")


Program = Callable[[World], None]


def search(monkeypatch: pytest.MonkeyPatch, *programs: Program) -> int:
    """Run programs, one an actor, in every order of their steps; return the number of states."""
    worlds: list[World] = []
    real = segments._mapped

    def mapped(descriptor: int, size: int) -> Any:
        words, data = real(descriptor, size)
        watched = Words(words, worlds[-1])
        worlds[-1].words.append(watched)
        return watched, data

    monkeypatch.setattr(segments, "_mapped", mapped)
    monkeypatch.setattr(segments, "_mapped_now", set())
    monkeypatch.setattr(tuning, "SEGMENT_BYTES", 1)
    seen: set[Any] = set()
    todo: list[list[int]] = [[]]
    while todo:
        choices = todo.pop()
        worlds[:] = [World()]
        segments._mapped_now.clear()
        for number, state, enabled in _run(worlds[0], programs, choices):
            if number < len(choices):
                continue
            if state in seen:
                break
            seen.add(state)
            # The run itself continues with the first choice.
            todo += [[*choices, *[0] * (number - len(choices)), c] for c in range(1, enabled)]
    return len(seen)


def _run(
    world: World, programs: tuple[Program, ...], choices: list[int]
) -> Iterator[tuple[int, Any, int]]:
    """Run the programs once, and yield before each step its number, the state and the choices."""
    world.actors = [Actor(lambda program=program: program(world)) for program in programs]
    try:
        number = 0
        while ready := [a for a in world.actors if not a.done and a.enabled()]:
            if len(ready) > 1:
                yield number, world.state, len(ready)
                chosen = choices[number] if number < len(choices) else 0
                number += 1
            else:
                chosen = 0
            ready[chosen].step()
            world.check()
        # What still waits, waits for a batch that has another way.
        assert all(actor.done or not actor.enabled() for actor in world.actors)
    finally:
        for actor in world.actors:
            actor.finish()
        world.held.clear()


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    """Let no finalizer of an earlier world run among the steps of another one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def worker_of_two_runs(world: World) -> None:
    world.serve("one")
    world.send(1)
    world.serve("two")
    world.send(2)
    world.send(3)


def late_reader(world: World) -> None:
    world.hold(1, may_be_lost=True)


def reader(world: World) -> None:
    world.hold(2)
    world.free(2)
    world.hold(3)


def worker_of_two_batches(world: World) -> None:
    world.serve("one")
    for batch in (1, 2):
        world.send(batch)


def reader_that_keeps_nothing(world: World) -> None:
    for batch in (1, 2):
        world.hold(batch)
        world.free(batch)


def test_a_late_reader_of_an_ended_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(monkeypatch, worker_of_two_runs, late_reader, reader) > 200


def test_a_segment_is_used_again_after_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    reused = 0

    def work(world: World) -> None:
        nonlocal reused
        world.serve("one")
        for batch in (1, 2, 3):
            world.send(batch)
        reused += max(words.values()[0] for words in world.words) > 1

    def read(world: World) -> None:
        for batch in (1, 2, 3):
            world.hold(batch)
            world.free(batch - 1)

    search(monkeypatch, work, read)
    assert reused


def test_a_fork_of_the_training_process_keeps_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fork's memory stays mapped here, so that its content can be compared.
    monkeypatch.setattr(SegmentReader, "_trim", lambda _: None)
    assert search(monkeypatch, worker_of_two_batches, reader_that_keeps_nothing, World.fork) > 50


def test_a_pool_at_its_limit_drops_no_unread_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_SEGMENTS", 1)

    def read(world: World) -> None:
        for batch in (1, 2, 3):
            world.hold(batch)

    def work(world: World) -> None:
        world.serve("one")
        for batch in (1, 2, 3):
            world.send(batch)

    search(monkeypatch, work, read)


def test_a_pipeline_that_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(world: World) -> None:
        world.serve("one")
        world.send(1)
        world.close()
        world.pool.serve("other", "two", machine())
        world.send(2)

    search(monkeypatch, work, late_reader, lambda world: world.hold(2))


def test_the_search_finds_memory_that_is_filled_before_it_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault of the first protocol: an unread segment of an ended run was filled again."""

    def is_free(segment: Any) -> bool:
        if segment.filling:
            return False
        unread = segment.words[1] != segment.use
        outdated = segment.owner[1] == "one"
        return not segment.sent or segment.words[2] == segment.use or (unread and outdated)

    monkeypatch.setattr(segments._Segment, "is_free", property(is_free))
    monkeypatch.setattr(SegmentPool, "_has_ended", lambda *_: False)
    with pytest.raises(Changed):
        search(monkeypatch, worker_of_two_runs, late_reader)


def test_the_search_finds_a_release_that_ignores_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SegmentReader._release

    def release(self: Any, mapping: Any, use: int, reader: tuple[int, int]) -> None:
        real(self, mapping, use, (reader[0], segments._forks))

    monkeypatch.setattr(SegmentReader, "_release", release)
    monkeypatch.setattr(SegmentReader, "_trim", lambda _: None)
    with pytest.raises(Changed):
        search(monkeypatch, worker_of_two_batches, reader_that_keeps_nothing, World.fork)
