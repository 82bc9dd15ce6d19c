"""Tests of the loop of a worker, whose steps a test performs by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dpex import tuning
from dpex.protocol.binding import Binding
from dpex.protocol.chunks import AssignedChunk, Chunk, Run
from dpex.protocol.worker_loop import (
    Ask,
    EndChunk,
    MadeBatch,
    NextBatch,
    NextChunk,
    Open,
    Send,
    Step,
    WorkerLoop,
)

RUN = Run("run", "loader", 7, 0, 1, 0, None)


class Task:
    """A task whose clock stands still unless a batch takes time."""

    def __init__(self) -> None:
        self.loop = WorkerLoop()
        self.steps = self.loop.run()
        self.step: Step = next(self.steps)

    def answer(self, value: Any = None) -> Step:
        self.step = self.steps.send(value)
        return self.step

    def open(self, batches: int, *, patient: bool = False, **how: Any) -> None:
        """Get a chunk and open it."""
        if isinstance(self.step, Ask):
            self.answer()
        assert self.step == NextChunk()
        assigned = AssignedChunk(b"", self.loop.place, **how)
        assert self.answer(assigned) == Open(assigned)
        indices = [[0]] * batches
        chunk = Chunk(RUN, 0, 0, indices, range(batches), patient)
        assert self.answer((chunk, 0.0)) == NextBatch()

    def make(
        self,
        size: int = 0,
        *,
        seconds: float = 0.0,
        ended: bool = False,
        now: float = 0.0,
        outside: int | None = None,
    ) -> list[Step]:
        """Make a batch, and return the steps until the loop wants the next one."""
        outside = size if outside is None else outside
        return list(self._until_next(MadeBatch(now, seconds, size, outside, ended)))

    def _until_next(self, answer: Any) -> Iterator[Step]:
        while self.answer(answer) != NextBatch():
            yield self.step
            answer = 0.0 if isinstance(self.step, Send) else None


@pytest.fixture
def task() -> Task:
    return Task()


LONG = tuning.SHORT_CHUNK + 3


def test_it_sends_a_block_that_is_full_and_the_last_one(task: Task) -> None:
    task.open(LONG)
    assert task.make(tuning.BLOCK_BYTES - 1) == []
    assert task.make(tuning.BLOCK_BYTES) == [Send(None)]
    assert task.make(now=tuning.BLOCK_S) == [Send(None)]
    assert task.make(seconds=tuning.LONG_BATCH_S) == [Send(None)]
    for _ in range(LONG - 5):
        assert task.make() == []
    assert task.make() == [Ask(1, 4, None), Send(None)]
    assert task.answer() == EndChunk(None)
    assert task.answer() == NextChunk(), "it has asked already"


def test_it_sends_each_batch_of_a_short_chunk_at_once(task: Task) -> None:
    task.open(2)
    assert task.make() == [Send(None)]


def test_a_patient_chunk_waits_for_more_and_counts_no_segments(task: Task) -> None:
    task.open(5, patient=True)
    assert task.make(tuning.BLOCK_BYTES, outside=0) == []
    assert task.make(tuning.BLOCK_BYTES) == [Send(None)]
    assert task.make(now=tuning.PATIENT_S) == [Send(None)]


def test_it_sends_each_batch_of_a_repeated_chunk_at_once(task: Task) -> None:
    task.open(LONG, patient=True, again=True)
    assert task.make() == [Send(None)]
    assert task.make() == [Send(None)]


def test_the_last_block_reports_the_end_of_an_early_request(task: Task) -> None:
    task.open(2)
    task.make()
    assert task.loop.ask_early() == Ask(1, 2, None, early=True)
    assert task.loop.ask_early() is None
    assert task.make() == [Send(1)]
    assert task.answer() == EndChunk(None)
    assert task.answer() == NextChunk()


def test_a_cancelled_chunk_reports_the_end_of_an_early_request(task: Task) -> None:
    task.open(1)
    task.loop.ask_early()
    assert task.answer() == EndChunk(1)
    assert task.answer() == NextChunk()


def test_a_chunk_that_is_cancelled_before_it_is_opened_is_not_made(task: Task) -> None:
    task.answer()
    assert isinstance(task.answer(AssignedChunk(b"", 4, skipped_blocks=3)), Open)
    assert task.answer() == Ask(5, 3, None)


def test_the_end_of_a_stream_is_its_last_batch(task: Task) -> None:
    task.open(LONG, binding=Binding.ALWAYS)
    assert task.make(ended=True) == [Ask(1, 1, None), Send(None)]
    assert task.answer() == EndChunk(None)


@pytest.mark.parametrize("unchanged", [True, False])
def test_a_request_says_whether_a_watched_copy_is_unchanged(task: Task, unchanged: bool) -> None:
    task.open(1, binding=Binding.WATCHED)
    assert not task.loop.asks_early
    assert not task.loop.note_state(unchanged)
    assert task.make() == [Ask(1, 1, unchanged), Send(None)]
    assert task.answer() == EndChunk(None)
    task.answer()
    task.open(1, binding=Binding.WATCHED)
    assert task.make() == [Ask(2, 2, None), Send(None)]


def test_a_released_copy_that_has_changed_is_reported_at_once(task: Task) -> None:
    task.open(2)
    assert task.loop.note_state(False)
    assert not task.loop.note_state(True)


def test_it_ends_with_its_lease(task: Task) -> None:
    assert task.step == Ask(0, 0, None)
    assert task.answer() == NextChunk()
    with pytest.raises(StopIteration):
        task.answer(None)
