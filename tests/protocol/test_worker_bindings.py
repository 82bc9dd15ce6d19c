"""Tests of the bindings of logical workers to task leases."""

from __future__ import annotations

from typing import Any

import pytest

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Part, PickledChunk
from dpex.protocol.leases import Leases
from dpex.protocol.task_lease import TaskLease
from dpex.protocol.worker_bindings import WorkerBindings


def bindings(**options: Any) -> tuple[WorkerBindings, TaskLease, TaskLease]:
    leases = Leases()
    for name in "ab":
        leases.add(name, "", 0.0)
    options = {"num_workers": 2, "binding": Binding.ALWAYS, "persistent": False, **options}
    return WorkerBindings(leases, **options), leases["a"], leases["b"]


def chunks(*workers: int) -> list[PickledChunk]:
    return [PickledChunk(b"", worker, Part("run", 0)) for worker in workers]


def give(made: WorkerBindings, lease: TaskLease, worker: int) -> None:
    lease.give(*chunks(worker), run=1)
    made.note_given(lease, worker)


def ask(made: WorkerBindings, lease: TaskLease, *, early: bool = False) -> None:
    lease.note_request(lease.attempt, lease.given, lease.given, early=early)
    lease.ask()
    made.note_asked(lease)


def test_a_bound_worker_s_chunks_fit_its_own_lease_alone() -> None:
    made, a, b = bindings()
    give(made, a, 0)
    assert made.taken() == {0}
    assert made.without_process(chunks(1, 0, 1)) == [1]
    assert made.chunk_index_for(a, chunks(1, 0)) == 1
    assert made.chunk_index_for(b, chunks(0, 1)) == 1
    assert made.chunk_index_for(b, chunks(0, 0)) is None
    ask(made, a)
    assert made.chunk_index_for(b, chunks(0, 0)) is None, "it has a process, which waits"
    a.end()
    assert made.taken() == set()
    assert made.chunk_index_for(b, chunks(0)) == 0


@pytest.mark.parametrize("binding", [Binding.RELEASED, Binding.WATCHED])
def test_a_worker_s_chunks_fit_any_lease_once_no_process_makes_its_samples(
    binding: Binding,
) -> None:
    made, a, b = bindings(binding=binding)
    give(made, a, 0)
    assert made.chunk_index_for(b, chunks(0)) is None
    assert made.chunk_index_for(b, chunks(0, 1)) == 1
    assert made.without_process(chunks(0, 1)) == [1]
    made.note_state(a, unchanged=True)
    assert made.chunk_index_for(b, chunks(0)) is None, "the batch is reported, and not yet sent"
    ask(made, a)
    assert made.chunk_index_for(b, chunks(0)) == 0
    assert made.without_process(chunks(0, 1)) == [0, 1]


def test_a_task_that_asks_early_holds_its_worker_until_its_last_sample() -> None:
    made, a, b = bindings(binding=Binding.RELEASED)
    give(made, a, 0)
    ask(made, a, early=True)
    assert made.chunk_index_for(b, chunks(0)) is None
    assert made.chunk_index_for(a, chunks(0)) == 0
    give(made, a, 1)
    assert made.chunk_index_for(b, chunks(0, 1)) is None
    a.finish(place=1)
    assert made.chunk_index_for(b, chunks(1, 0)) == 1


def test_a_lease_that_has_ended_holds_its_worker_until_its_last_sample() -> None:
    made, a, b = bindings(binding=Binding.RELEASED)
    give(made, a, 0)
    ask(made, a, early=True)
    a.end()
    assert made.chunk_index_for(b, chunks(0)) is None
    a.finish(place=1)
    assert made.chunk_index_for(b, chunks(0)) == 0


def test_watched_workers_are_released_when_each_first_batch_changed_nothing() -> None:
    made, a, b = bindings(binding=Binding.WATCHED)
    for worker, lease in enumerate((a, b)):
        give(made, lease, worker)
        assert made.of(lease) is Binding.WATCHED
        made.note_state(lease, unchanged=True)
    assert made.binding is Binding.RELEASED
    assert made.taken() == set()


def test_one_change_binds_all_workers_for_good() -> None:
    made, a, _ = bindings(binding=Binding.WATCHED)
    give(made, a, 0)
    made.note_state(a, unchanged=False)
    assert made.binding is Binding.ALWAYS
    made.note_state(a, unchanged=True)
    assert made.taken() == {0}


def test_a_chunk_that_was_watched_stays_so_until_it_reports() -> None:
    made, a, b = bindings(binding=Binding.WATCHED, num_workers=1)
    give(made, a, 0)
    give(made, b, 1)
    made.note_state(a, unchanged=True)
    assert made.binding is Binding.RELEASED
    assert made.of(a) is Binding.RELEASED
    assert made.of(b) is Binding.WATCHED
    ask(made, b)
    assert made.of(b) is Binding.RELEASED
    assert made.chunk_index_for(a, chunks(1)) == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_starts_with_new_workers_unless_they_are_persistent(persistent: bool) -> None:
    made, a, _ = bindings(persistent=persistent)
    give(made, a, 0)
    made.begin(in_run=False)
    assert made.taken() == {0}
    assert made.holds_state(a, in_run=False) is persistent
    made.begin(in_run=True)
    assert made.taken() == ({0} if persistent else set())
    assert made.keeps_state is persistent


def test_a_worker_that_had_another_process_is_restarted() -> None:
    made, a, b = bindings()
    give(made, a, 0)
    assert not a.restarted
    a.end()
    give(made, b, 0)
    assert b.restarted == {0}


def test_a_chunk_that_was_cancelled_while_it_was_watched_leaves_no_state() -> None:
    made, a, b = bindings(binding=Binding.WATCHED)
    give(made, a, 0)
    give(made, b, 1)
    for lease in (a, b):
        made.note_state(lease, unchanged=True)
    assert made.binding is Binding.RELEASED
    made.binding = Binding.WATCHED
    give(made, a, 0)
    made.binding = Binding.RELEASED
    ask(made, a)
    made.note_change(b, 0)
    assert b.workers == {0}
    assert b.restarted == set()
