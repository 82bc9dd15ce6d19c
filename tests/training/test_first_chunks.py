"""Tests of the chunks of first workers, whose processes the tests play."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from cluster_programs import wait_until

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Chunk, Entry, Part, PickledChunk, Run
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.training.first_workers import ChunkQueue, FirstRun, FirstWorkers
from dpex.wire.arrivals import Arrival
from dpex.wire.block_format import BlockWriter
from dpex.wire.pickling import dump
from dpex.wire.timings import Costs
from dpex.worker.first_worker import CANCEL, END, ChunkMessage, Made
from dpex.worker.training_settings import Settings

LOGICAL_WORKERS = 4
LIMITS = {"parallel": 2, "starting": 2}
SECONDS = 10


def run_of(key: str) -> Run:
    return Run(key, "loader", 7, 0, LOGICAL_WORKERS, 0, Settings(".", torch.float32))


class Process:
    """The process of a first worker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, pid: int = 0) -> None:
        """Send a process id; no process has the default."""
        self._connection.send(pid)

    def message(self) -> bytes:
        assert self._connection.poll(SECONDS), "no message has come"
        return self._connection.recv_bytes()

    def given(self) -> tuple[Chunk, Binding]:
        """Return the next chunk that it gets, and how its logical worker is bound."""
        given: ChunkMessage = pickle.loads(self.message())
        chunk: Chunk = pickle.loads(given.payload)
        return chunk, given.binding

    def idle(self) -> bool:
        return not self._connection.poll()

    def deliver(self, chunk: Chunk, report: Made = Made.UNCHANGED) -> None:
        """Send the batches of a chunk, each of which is its number, and a report."""
        writer = BlockWriter(chunk.run.key, chunk.number)
        for number in chunk.numbers:
            writer.add(Entry(number, dump(number, "batch")), Costs())
        self._connection.send(writer.block())
        self.report(report)

    def report(self, report: Made) -> None:
        self._connection.send(report)

    def die(self) -> None:
        self._connection.close()


class Remote:
    """A run on the pipeline that keeps the numbers of the chunks sent to it."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.workers: list[int] = []
        self.ended = 0
        self.error: Exception | None = None

    def send(self, chunks: list[PickledChunk], **limits: Any) -> None:
        if self.error is not None:
            raise self.error
        assert limits["parallel"] == LIMITS["parallel"]
        self.sent += [chunk.part.chunk for chunk in chunks]
        self.workers += [chunk.worker for chunk in chunks]

    def end(self) -> None:
        self.ended += 1


class Played:
    """Two first workers and a run.

    Args:
        begin: Whether the first workers' processes exist.

    Attributes:
        limits: The limits that chunks are sent with.
    """

    def __init__(self, *, begin: bool = True) -> None:
        pipes = [multiprocessing.Pipe() for _ in range(2)]
        self.processes = [Process(theirs) for _, theirs in pipes]
        for process in self.processes if begin else []:
            process.begin()
        self.workers = FirstWorkers([ours for ours, _ in pipes])
        self.limits = LIMITS
        self.begun = 0
        self.run = self.new_run("run")

    def new_run(self, key: str) -> FirstRun:
        self._run = run_of(key)
        self._fed = 0
        queue = ChunkQueue(key, self.workers, LOGICAL_WORKERS, pin_device=None)
        return FirstRun(queue, self._begin, lambda: None)

    def _begin(self) -> None:
        self.begun += 1

    def feed(self, *workers: int, alone: bool = False) -> None:
        """Feed a chunk of one batch for each of these logical workers."""
        for worker in workers:
            chunk = Chunk(self._run, self._fed, self._fed * LOGICAL_WORKERS + worker, [[0]], [0])
            self._fed += 1
            self.run.feed([chunk], alone=alone, one_by_one=False, **self.limits)

    def arrived(self, count: int) -> list[int]:
        """Wait for as many batches, and return their values."""
        values: list[int] = []

        def more() -> bool:
            while (arrival := self.run.arrivals.take()) is not None:
                assert isinstance(arrival, Arrival)
                values.extend(entry.value for entry in arrival.batches)
            return len(values) >= count

        wait_until(more, SECONDS, "batches")
        return values


@pytest.fixture
def first() -> Iterator[Played]:
    made = Played()
    yield made
    for process in made.processes:
        process.die()


def attach(run: FirstRun) -> Remote:
    remote: Any = Remote()
    assert run.queue.attach(remote)
    return remote


def test_first_workers_make_the_first_chunks_and_ray_starts_after_they_are_sent(
    first: Played,
) -> None:
    first.feed(0, 1)
    assert first.begun == 2
    given = [process.given() for process in first.processes]
    assert [(chunk.number, binding) for chunk, binding in given] == [
        (0, Binding.WATCHED),
        (1, Binding.WATCHED),
    ]
    assert first.run.tasks_at_work() == 2
    for process, (chunk, _) in zip(first.processes, given, strict=True):
        process.deliver(chunk)
    assert sorted(first.arrived(2)) == [0, 5]


def test_a_watched_logical_worker_s_chunks_are_made_one_after_another(first: Played) -> None:
    left, right = first.processes
    first.feed(0, 0, 0)
    chunk, _ = left.given()
    assert right.idle(), "until the first chunk has left its dataset copy unchanged"
    left.deliver(chunk)
    assert left.given()[1] is Binding.WATCHED, "the other logical workers have made no batch"


def test_logical_workers_are_released_once_each_has_left_its_copy_unchanged(first: Played) -> None:
    left, right = first.processes
    first.feed(0, 1, 2, 3)
    for number in range(LOGICAL_WORKERS):
        chunk, binding = first.processes[number % 2].given()
        assert binding is Binding.WATCHED
        first.processes[number % 2].deliver(chunk)
        first.arrived(1)
    wait_until(lambda: not first.workers.at_work, SECONDS, "the last report")
    first.feed(0, 0, 1)
    (first_of_0, binding), (of_1, _) = left.given(), right.given()
    assert binding is Binding.RELEASED
    assert of_1.worker == 1, "the second chunk of worker 0 waits for the first"
    left.deliver(first_of_0)
    assert left.given()[0].worker == 0


def test_the_pipeline_gets_the_chunk_that_changed_its_copy_and_then_the_later_ones(
    first: Played,
) -> None:
    left, right = first.processes
    first.feed(0, 1, 0, 1, 2)
    left.given()
    right.given()
    left.report(Made.UNFINISHED)
    assert left.message() == END
    remote = attach(first.run)
    assert remote.sent == [0, 2, 4], "logical worker 1 waits for its first worker"
    right.report(Made.UNFINISHED)
    assert right.message() == END
    wait_until(lambda: remote.sent == [0, 2, 4, 1, 3], SECONDS, "the chunks of logical worker 1")


def test_chunks_go_to_the_pipeline_once_it_has_a_task(first: Played) -> None:
    left, right = first.processes
    first.feed(0, 1, 2, 3, 0)
    made = left.given()[0], right.given()[0]
    remote = attach(first.run)
    assert remote.sent == [2, 3], "a first worker still makes a chunk of worker 0"
    left.deliver(made[0])
    wait_until(lambda: remote.sent == [2, 3, 4], SECONDS, "the next chunk of worker 0")
    first.feed(1)
    assert remote.sent == [2, 3, 4], "a first worker still makes a chunk of worker 1"
    right.deliver(made[1], Made.UNCOMPARED)
    first.arrived(2)
    wait_until(lambda: not first.workers.at_work, SECONDS, "the last report")
    first.feed(0)
    assert remote.sent == [2, 3, 4, 5, 6]
    assert left.message() == right.message() == END
    first.run.end()
    assert remote.ended == 1


def test_a_chunk_that_may_have_killed_a_process_waits_for_the_pipeline(first: Played) -> None:
    first.feed(0, alone=True)
    first.feed(1)
    assert first.processes[0].given()[0].number == 1
    assert attach(first.run).sent == [0]


def test_the_chunk_of_a_process_that_dies_is_lost(first: Played) -> None:
    left, right = first.processes
    first.feed(0, 1, 0)
    left.given()
    left.die()
    assert first.run.arrivals.wait(SECONDS)
    text = "a worker process died before Ray started"
    assert first.run.arrivals.take() == Loss(LossCause.TASK, text, Part("run", 0))
    chunk, _ = right.given()
    right.deliver(chunk)
    assert right.given()[0].number == 2, "the other first worker works on"


def test_a_process_whose_connection_is_lost_is_its_worker_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dpex.training.first_workers._FirstWorker.kill", lambda _: None)
    first = Played(begin=False)
    with subprocess.Popen(["sleep", "60"]) as process:
        left, right = first.processes
        left.begin(process.pid)
        first.feed(0, 0)
        left.given()
        right.begin()
        left.die()
        [worker] = [worker for worker in first.workers._workers if worker.work is not None]
        wait_until(lambda: worker.lost, SECONDS, "loss of the connection")
        first.feed(1)
        assert right.given()[0].worker == 1
        assert first.run.arrivals.take() is None
        right.report(Made.UNCHANGED)
        wait_until(lambda: first.workers.at_work == 1, SECONDS, "the report")
        assert right.idle(), "worker 0 may still make samples"
        process.kill()
        assert right.given()[0].worker == 0
        assert isinstance(first.run.arrivals.take(), Loss)
    right.die()


def test_a_run_on_the_pipeline_begins_after_the_samples_of_runs_that_have_ended(
    first: Played,
) -> None:
    left, right = first.processes
    first.feed(0)
    chunk, _ = left.given()
    ended = first.run
    first.run = first.new_run("live")
    first.feed(1)
    right.given()
    ended.end()
    waiting = threading.Thread(target=first.workers.wait_for_ended_runs, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    left.deliver(chunk)
    waiting.join(SECONDS)
    assert not waiting.is_alive(), "a run that has not ended has its own logical workers"


def test_the_blocks_of_a_cancelled_run_are_dropped(first: Played) -> None:
    left, right = first.processes
    first.feed(0)
    chunk, _ = left.given()
    before = first.run
    before.end()
    assert left.message() == CANCEL
    first.run = first.new_run("next")
    first.feed(0, 1)
    of_next = right.given()[0]
    assert (of_next.run.key, of_next.worker) == ("next", 1), "worker 0 still makes a sample"
    left.deliver(chunk)
    chunk, _ = left.given()
    assert (chunk.run.key, chunk.worker) == ("next", 0), "idle after it has reported"
    assert before.arrivals.take() is None
    assert before.arrivals.ended


def test_a_run_that_nobody_reads_is_cancelled(first: Played) -> None:
    first.feed(0)
    first.processes[0].given()
    del first.run
    assert first.processes[0].message() == CANCEL


def test_a_pipeline_that_takes_no_chunks_ends_the_run(first: Played) -> None:
    remote = attach(first.run)
    remote.error = RuntimeError("Ray was shut down")
    first.feed(0)
    assert first.run.arrivals.ended


def test_a_run_that_has_ended_is_not_handed_over(first: Played) -> None:
    first.run.end()
    remote: Any = Remote()
    assert not first.run.queue.attach(remote)


def test_the_error_of_ray_s_start_takes_the_place_of_what_arrives(first: Played) -> None:
    def check() -> None:
        raise OSError("no memory")

    run = FirstRun(first.run.queue, lambda: None, check)
    with pytest.raises(OSError, match="no memory"):
        _ = run.arrivals


def test_no_more_first_workers_are_at_work_than_the_run_uses(first: Played) -> None:
    first.limits = {"parallel": 3, "starting": 1}
    first.feed(0, 1)
    chunk, _ = first.processes[0].given()
    assert first.processes[1].idle(), "samples that compute may seem to wait for three quarters"
    first.limits = {"parallel": 4, "starting": 1}
    first.feed(2)
    assert first.processes[1].given()[0].worker == 1
    first.processes[0].deliver(chunk)
    assert first.processes[0].given()[0].worker == 2


def test_the_pipeline_needs_as_many_tasks_as_first_workers_can_be_at_work(first: Played) -> None:
    first.feed(0, 1, 2)
    assert first.run.queue.tasks_needed == 2
    first.workers.end()
    assert first.run.queue.tasks_needed == 1, "only the pipeline can make the third chunk"


def test_the_pipeline_needs_one_task_for_a_run_that_has_ended(first: Played) -> None:
    first.feed(0, 1)
    first.run.end()
    assert first.run.queue.tasks_needed == 1


def test_a_run_waits_for_ray_if_there_are_no_first_workers_left() -> None:
    first = Played(begin=False)
    first.feed(0)
    for process in first.processes:
        process.die()
    wait_until(lambda: first.run.waits_for_ray, SECONDS, "the end of the first workers")
    assert first.run.queue.tasks_needed == 1


def test_a_first_worker_gets_no_chunk_before_its_process_exists() -> None:
    first = Played(begin=False)
    first.feed(0)
    assert first.run.tasks_at_work() == 0
    first.processes[1].begin()
    assert first.processes[1].given()[0].worker == 0
    assert first.processes[0].idle()
    for process in first.processes:
        process.die()


def test_idle_first_workers_end_and_get_no_chunk(first: Played) -> None:
    first.workers.end()
    for process in first.processes:
        assert process.message() == END
    first.feed(0)
    assert all(process.idle() for process in first.processes)
    assert attach(first.run).sent == [0]
