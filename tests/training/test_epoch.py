"""Tests of one epoch on a fake pipeline: order, losses, recovery, errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpex import tuning
from dpex.carriers.ray.session import StoredJob
from dpex.cluster.own_process import OwnProcess
from dpex.errors import BatchLostError, SerializationError, TooManySkippedError
from dpex.protocol.batch_order import IndexOrder
from dpex.protocol.binding import Binding
from dpex.protocol.chunk_sizes import ChunkPlanner
from dpex.protocol.chunks import Chunk, Entry, Part, Run
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.stats import Meter
from dpex.training.dataset_versions import DatasetVersions
from dpex.training.epoch import Epoch, EpochOptions, StateNotes
from dpex.wire.arrivals import Arrival
from dpex.wire.block_format import Block
from dpex.wire.timings import Costs
from dpex.worker.training_settings import Settings

WORKERS = 2
RUN = Run("first", "loader", 7, 0, WORKERS, 0, Settings(".", torch.float32))
# The fate of a chunk: its entries, its losses, or None if the pipeline ends.
Fate = Sequence[Entry | Loss] | None
DIED, BLOCK = Loss(LossCause.TASK, "died"), Loss(LossCause.BLOCK, "a block was lost")


class Indices:
    """An index iterator that records the delivered batches."""

    position = 0
    batches = 0

    def __init__(self, length: int) -> None:
        self._numbers = iter(range(length))
        self.epoch = self
        self.delivered: list[int] = []
        self.finished = False

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return [next(self._numbers)]

    def deliver(self, batch: int) -> None:
        self.delivered.append(batch)

    def finish(self) -> None:
        self.finished = True


class FakeRun:
    """A run and its arrivals. The fate of each chunk is known as soon as it is fed."""

    waits_for_ray = False

    def __init__(self, pipeline: Pipeline, key: str) -> None:
        self._pipeline, self._key = pipeline, key
        self._news: deque[Arrival | Loss] = deque()
        self._late: deque[Arrival | Loss] = deque()
        self.arrivals = self
        self._fed = 0
        self.ended = self.lost = self.closed = False

    def feed(self, chunks: Sequence[Chunk], *, alone: bool, one_by_one: bool, **_: Any) -> None:
        self._pipeline.messages.append((self._key, [list(c.numbers) for c in chunks], alone))
        for chunk in chunks:
            assert chunk.run.key == self._key
            assert chunk.number == self._fed
            self._fed += 1
            fate = None if self.ended else self._pipeline.fate(chunk, alone)
            if fate is None:
                self.ended = self.lost = True
                continue
            if entries := [part for part in fate if isinstance(part, Entry)]:
                block = Block(self._key, chunk.number, [], Costs(seconds=1e-3), 100)
                late = self._pipeline.late in chunk.numbers
                (self._late if late else self._news).append(Arrival(block, entries))
            for loss in fate:
                if isinstance(loss, Loss):
                    part = loss.part or Part(self._key, chunk.number)
                    self._news.append(replace(loss, part=part))

    def wait(self, _: float | None) -> bool:
        return bool(self._news or self.ended)

    def take(self) -> Arrival | Loss | None:
        if self._news:
            return self._news.popleft()
        self._news, self._late = self._late, self._news  # for the next call
        return None

    def failure(self) -> None:
        return None

    def lost_with_node(self, _: float) -> bool:
        return False

    def tasks_at_work(self) -> int:
        return 0

    def end(self) -> None:
        self.closed = True


class Pipeline(OwnProcess):
    """A session whose chunks get the fate that one function returns."""

    alive = True

    def __init__(self, fate: Callable[[Chunk, bool], Fate], late: int | None) -> None:
        super().__init__()
        self.fate = fate
        self.late = late
        self.messages: list[tuple[str, list[list[int]], bool]] = []
        self.runs: list[FakeRun] = []

    def open(self, run: str, job: StoredJob, **_: Any) -> Callable[[], FakeRun]:
        self.runs.append(FakeRun(self, run))
        return lambda: self.runs[-1]

    def waiting_text(self, **_: Any) -> str:
        return "busy"

    def name_dead_nodes(self) -> None:
        pass

    def check_still_possible(self, _: float) -> None:
        raise AssertionError


def made(chunk: Chunk) -> list[Entry | Loss]:
    return [Entry(batch, batch) for batch in chunk.numbers]


class Reader:
    """An epoch of some batches on a fake pipeline, as an iterable of its entries."""

    def __init__(
        self,
        fate: Callable[[Chunk, bool], Fate],
        *,
        length: int = 12,
        late: int | None = None,
        **options: Any,
    ) -> None:
        self.pipeline: Any = Pipeline(fate, late)
        self.indices: Any = Indices(length)
        planner = ChunkPlanner(num_workers=WORKERS, prefetch_factor=2, prefetch_bytes=1 << 20)
        planner.begin(free_cores=WORKERS)
        given = {"in_order": True, "max_skipped": 2, "timeout_s": 0.0, "pin_memory": False}
        self.meter = Meter()
        self.epoch = Epoch(
            RUN,
            IndexOrder(self.indices, planner, run=RUN, length=length, patient=True),
            session=self.pipeline,
            planner=planner,
            options=EpochOptions(
                **{**given, **options},
                job=StoredJob("job", [], None),
                binding=Binding.RELEASED,
            ),
            notes=StateNotes(DatasetVersions()),
        )
        self.epoch.fill()

    def __iter__(self) -> Iterator[Entry]:
        while True:
            try:
                yield self.epoch.next_entry(self.meter)
            except StopIteration:
                return

    def batches(self) -> list[int]:
        return [entry.batch for entry in self]


def test_batches_come_in_order_and_the_run_ends() -> None:
    reader = Reader(lambda chunk, _: made(chunk))
    assert reader.batches() == list(range(12))
    assert reader.indices.finished
    assert not reader.epoch.open
    assert reader.pipeline.runs[0].closed


def test_a_late_batch_is_reported_although_later_ones_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "SLOW_WAIT_S", 0.0)
    monkeypatch.setattr(tuning, "MOST_NOTE_S", 0.0)
    reader = Reader(lambda chunk, _: made(chunk), late=0)
    looked: list[None] = []
    reader.pipeline.name_dead_nodes = lambda: looked.append(None)
    reader.pipeline.check_still_possible = lambda _: None
    assert [entry.batch for entry in reader] == list(range(12))
    assert "no batch for 0 s. busy" in caplog.text
    assert looked


@pytest.mark.parametrize("in_order", [True, False])
def test_in_order_decides_whether_a_batch_waits_for_those_before_it(in_order: bool) -> None:
    reader = Reader(lambda chunk, _: made(chunk), in_order=in_order, late=0)
    batches = reader.batches()
    assert sorted(batches) == list(range(12))
    assert (batches == list(range(12))) == in_order


def test_a_batch_is_delivered_once_though_it_comes_twice() -> None:
    reader = Reader(lambda chunk, _: made(chunk) * 2)
    assert reader.batches() == list(range(12))


def test_no_batch_that_the_last_draw_waits_for_is_held_back() -> None:
    patient: dict[int, bool] = {}

    def fate(chunk: Chunk, _: bool) -> Fate:
        patient.update(dict.fromkeys(chunk.numbers, chunk.patient))
        return made(chunk)

    length = 200
    assert Reader(fate, length=length).batches() == list(range(length))
    # As in torch, the last batch is drawn once this one is delivered.
    awaited = length - 1 - 2 * WORKERS
    assert not any(held for batch, held in patient.items() if batch >= awaited)
    assert any(patient.values())


def test_what_a_worker_that_died_had_is_resent_one_by_one() -> None:
    reader = Reader(lambda chunk, alone: made(chunk) if alone or 4 not in chunk.numbers else [DIED])
    assert reader.batches() == list(range(12))
    assert [(n, alone) for _, n, alone in reader.pipeline.messages if alone] == [([[4]], True)]
    assert reader.meter.retries == 1


def test_a_batch_that_kills_every_worker_is_an_error_and_the_others_come() -> None:
    reader = Reader(lambda chunk, _: [DIED] if 4 in chunk.numbers else made(chunk))
    outcomes = {entry.batch: entry.outcome for entry in reader}
    assert [batch for batch, outcome in outcomes.items() if outcome == "error"] == [4]
    assert list(outcomes) == list(range(12))


def test_lost_blocks_are_recomputed_and_end_the_epoch_if_no_block_comes() -> None:
    lost = iter([True, True, False])

    def fate(chunk: Chunk, _: bool) -> Fate:
        return [BLOCK] if 11 in chunk.numbers and next(lost) else made(chunk)

    reader = Reader(fate)
    assert reader.batches() == list(range(12))
    assert reader.meter.retries == 2
    never = Reader(lambda chunk, _: [BLOCK] if 11 in chunk.numbers else made(chunk))
    for call in (never.batches, never.epoch.raise_failure):
        with pytest.raises(BatchLostError, match=r"the next one is 1[01].* a block was lost"):
            call()


def test_a_pipeline_that_is_lost_is_replaced_and_nothing_is_left_out() -> None:
    left = iter([True, False])

    def fate(chunk: Chunk, _: bool) -> Fate:
        return None if 5 in chunk.numbers and next(left) else made(chunk)

    reader = Reader(fate)
    assert reader.batches() == list(range(12))
    first, second = reader.pipeline.runs
    assert first.closed
    assert {key for key, *_ in reader.pipeline.messages} == {first._key, second._key}
    assert first._key != second._key


def test_an_epoch_whose_pipelines_are_all_lost_fails() -> None:
    reader = Reader(lambda *_: None)
    with pytest.raises(BatchLostError, match="the next one is 0"):
        reader.epoch.next_entry(reader.meter)
    assert not reader.epoch.open
    with pytest.raises(BatchLostError, match="the next one is 0"):
        reader.epoch.raise_failure()


def test_a_loss_delays_no_batch_that_is_not_lost() -> None:
    """All other batches are requested and delivered while the lost batches do not come."""

    def fate(chunk: Chunk, alone: bool) -> Fate:
        if 0 in chunk.numbers:
            return () if alone else [DIED]
        return made(chunk)

    reader = Reader(fate, in_order=False, length=200)
    batches = iter(reader)
    assert sorted(next(batches).batch for _ in range(199)) == list(range(1, 200))


def test_only_the_named_batches_are_resent() -> None:
    lost = iter([True])

    def fate(chunk: Chunk, _: bool) -> Fate:
        if 150 in chunk.numbers and next(lost, False):
            assert len(chunk.numbers) > 1
            kept = [Entry(batch, batch) for batch in chunk.numbers if batch != 150]
            return [*kept, replace(BLOCK, part=Part("first", chunk.number, (150,)))]
        return made(chunk)

    reader = Reader(fate, length=200)
    assert reader.batches() == list(range(200))
    assert reader.meter.retries == 1


def test_an_interrupt_while_blocks_are_taken_in_leaves_no_batch_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader(lambda chunk, _: made(chunk))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.epoch._carrier, "note_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.batches()
    with pytest.raises(BatchLostError, match="outstanding"):
        reader.epoch.raise_failure()


def test_a_warning_that_is_raised_leaves_no_lost_batch_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fate(chunk: Chunk, alone: bool) -> Fate:
        return made(chunk) if alone or 0 not in chunk.numbers else [DIED]

    reader = Reader(fate)
    warnings = iter([UserWarning("once")])

    def note(*_: Any) -> None:
        for warning in warnings:
            raise warning

    monkeypatch.setattr(reader.epoch._carrier._notes, "note", note)
    with pytest.raises(UserWarning, match="once"):
        reader.batches()
    assert reader.batches() == list(range(12))


def test_an_interrupt_during_a_recovery_leaves_no_batch_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader(lambda chunk, _: [DIED] if 4 in chunk.numbers else made(chunk))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.epoch._delivery, "_resend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.batches()
    with pytest.raises(BatchLostError, match="outstanding"):
        reader.epoch.raise_failure()


def test_a_chunk_that_cannot_be_pickled_is_an_error_in_the_place_of_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = FakeRun.feed

    def refuse(run: FakeRun, chunks: Sequence[Chunk], **how: Any) -> None:
        if 3 in chunks[0].numbers:
            raise SerializationError("a lambda")
        feed(run, chunks, **how)

    monkeypatch.setattr(FakeRun, "feed", refuse)
    monkeypatch.setattr(tuning, "GATHER_S", -1.0)  # one chunk in each message
    reader = Reader(lambda chunk, _: made(chunk))
    outcomes = [(entry.batch, entry.outcome) for entry in reader]
    assert ((3, "error") in outcomes, len(outcomes)) == (True, 12)


def test_samples_left_out_are_counted_and_too_many_end_the_epoch() -> None:
    def fate(chunk: Chunk, _: bool) -> Fate:
        return [Entry(b, b, left_out=((b, "broken"),)) for b in chunk.numbers]

    reader = Reader(fate)
    batches = iter(reader)
    assert [next(batches).batch for _ in range(2)] == [0, 1]
    with pytest.raises(TooManySkippedError, match=r"max_skipped=2\. The last is sample 2"):
        next(batches)
    assert reader.meter.skipped == 3
    assert not reader.epoch.open


def test_a_batch_without_samples_is_passed_over() -> None:
    def fate(chunk: Chunk, _: bool) -> Fate:
        return [Entry(b, None, "nothing" if b % 3 == 0 else "batch") for b in chunk.numbers]

    assert Reader(fate).batches() == [b for b in range(12) if b % 3]


def test_a_timeout_names_the_batch_and_its_indices() -> None:
    reader = Reader(lambda *_: (), timeout_s=0.01)
    with pytest.raises(RuntimeError, match=r"waiting for batch 0 \(dataset indices \[0\]\)"):
        reader.epoch.next_entry(reader.meter)
