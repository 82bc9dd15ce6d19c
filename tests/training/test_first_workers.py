"""Tests of epochs that begin before Ray has started, in fresh training processes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from cluster_programs import (
    PROGRAM_SECONDS,
    PROGRAMS,
    processes_in,
    run_program,
    spawn,
    wait_until,
    workplace,
)

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="no forks"),
]

PROGRAM = PROGRAMS / "first_program.py"


def outcome_of(scenario: str) -> tuple[Any, str]:
    """Run a scenario; return what it prints, and its messages."""
    with workplace() as place:
        done = run_program(PROGRAM, scenario, place=place, seconds=PROGRAM_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: not processes_in(place), 20, "end of Ray and of the first workers")
        return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("scenario", ["new_workers", "persistent_workers"])
def test_epochs_before_and_after_ray_s_start_are_torch_s(scenario: str) -> None:
    (without_ray, indices, workers), _ = outcome_of(scenario)
    assert without_ray, "two epochs end before Ray starts"
    assert indices
    assert workers


def test_first_workers_draw_the_numbers_that_ray_s_worker_processes_draw() -> None:
    assert outcome_of("drawn_alike")[0]


def test_an_epoch_goes_over_to_ray_when_a_task_waits() -> None:
    (complete, first_by_ray, last_by_ray), errors = outcome_of("handed_over")
    assert complete
    assert not first_by_ray
    assert last_by_ray
    assert "lost" not in errors


def test_no_two_processes_are_one_logical_worker_before_after_and_while_ray_starts() -> None:
    assert outcome_of("alone")[0] == [True, True]


@pytest.mark.extended
def test_samples_that_wait_have_a_process_for_each_logical_worker_also_before_ray() -> None:
    assert outcome_of("spread_out")[0] == [True, True]


def test_samples_that_ask_ray_start_no_second_ray() -> None:
    assert outcome_of("asks_ray")[0] == [True, True]


@pytest.mark.parametrize("scenario", ["counted", "counted_by_persistent_workers"])
def test_state_of_logical_workers_is_torch_s_from_the_first_batch_on(scenario: str) -> None:
    assert outcome_of(scenario)[0]


def test_batches_of_first_workers_outlive_them() -> None:
    assert outcome_of("large")[0] == [True, True]


def test_an_epoch_reads_the_dataset_of_its_iter() -> None:
    complete, values = outcome_of("changed_meanwhile")[0]
    assert complete
    assert values == [-1], "the next epoch reads the changed dataset"


def test_an_epoch_of_a_changed_dataset_waits_for_ray() -> None:
    assert outcome_of("changed_between")[0] == [True, True]


def test_an_error_names_its_index() -> None:
    text, _ = outcome_of("fails")
    assert "ZeroDivisionError in DataLoader worker process 0 (dataset index 5, batch 2" in text


@pytest.mark.extended
def test_ray_makes_the_batches_of_a_first_worker_that_died() -> None:
    complete, errors = outcome_of("dies_once")
    assert complete
    assert "1 batches were lost (a worker process died before Ray started)" in errors
    text, _ = outcome_of("dies_always")
    assert "every worker process that was given batch 1 (dataset indices [4, 5, 6, 7]) died" in text


@pytest.mark.extended
def test_a_first_worker_that_hangs_does_not_delay_the_next_epoch_and_is_killed() -> None:
    assert outcome_of("hangs")[0] == [True, False]


@pytest.mark.extended
@pytest.mark.parametrize("scenario", ["broken_off", "out_of_order"])
def test_epochs_that_end_early_or_out_of_order_are_complete(scenario: str) -> None:
    assert outcome_of(scenario)[0]


@pytest.mark.extended
def test_the_training_process_may_fork_while_ray_starts() -> None:
    outcome, errors = outcome_of("beside_torchs")
    assert outcome == [True, True]
    assert "Exception" not in errors


def test_a_fork_cannot_use_the_loaders_of_its_parent_and_does_not_disturb_them() -> None:
    errors, complete = outcome_of("forked")[0]
    assert len(errors) == 4
    for error in errors:
        assert error.startswith("ClusterError: this process was forked from one connected to Ray")
    assert complete


def test_a_fork_by_a_thread_while_ray_is_starting_gets_an_error() -> None:
    error, complete = outcome_of("forked_by_a_thread")[0]
    assert error.startswith("ClusterError: this process was forked from one connected to Ray")
    assert complete


def test_the_program_s_calls_of_ray_wait_while_ray_starts_and_use_the_same_ray() -> None:
    outcome, errors = outcome_of("calls_ray_meanwhile")
    assert outcome == [True, 3, True, True]
    assert errors.count("dpex: local Ray on") == 1
    assert "ray.init was called with num_cpus while dpex started a local Ray" in errors


@pytest.mark.parametrize("scenario", ["starts_ray_first", "starts_ray_meanwhile"])
def test_a_start_by_the_program_is_waited_for_and_its_ray_is_used(scenario: str) -> None:
    complete, errors = outcome_of(scenario)
    assert complete
    assert "(this process was connected to it): 1 node, 3 CPUs" in errors


def test_ray_s_start_leaves_generators_and_print_as_they_were() -> None:
    assert outcome_of("undisturbed")[0] == [True, True, "builtins"]


def test_the_error_of_ray_s_start_is_raised_by_next_and_iter() -> None:
    errors, _ = outcome_of("no_ray")
    assert errors == ["ClusterError: a local Ray did not start: no memory"] * 3


def test_a_process_may_end_after_its_first_batch() -> None:
    batch, errors = outcome_of("one_batch")
    assert batch == [0, 1, 2, 3]
    assert "Traceback" not in errors
    assert "Exception" not in errors


def test_a_loader_may_be_closed_while_ray_starts() -> None:
    first, text, last = outcome_of("closed")[0]
    assert first == [0, 1, 2, 3]
    assert "the loader was closed" in text
    assert last == [60, 61, 62, 63]


@pytest.mark.extended
@pytest.mark.long
def test_a_timeout_does_not_count_the_start_of_ray() -> None:
    assert outcome_of("timed")[0] == 16


def test_an_interrupt_of_a_fork_comes_after_it() -> None:
    assert outcome_of("interrupted_fork")[0] == [True, "interrupted"]


def test_an_iterator_of_a_closed_loader_does_not_begin_again() -> None:
    assert outcome_of("closed_before_the_start")[0] in ("BatchLostError", "ClusterError")


@pytest.mark.extended
def test_two_iterators_of_a_loader_are_both_complete() -> None:
    assert outcome_of("two_at_once")[0] == [True, True]


@pytest.mark.extended
def test_another_loader_may_be_read_after_one_that_was_dropped_while_ray_was_starting() -> None:
    assert outcome_of("dropped")[0] == [60, 61, 62, 63]


def test_warm_up_starts_what_the_next_iter_needs() -> None:
    for complete, all_by_ray in outcome_of("warmed_up")[0]:
        assert complete
        assert all_by_ray
    assert outcome_of("warmed_up_by_first_workers")[0] == [True, False]


def test_first_workers_wait_for_an_iteration_that_comes_after_ray_s_start() -> None:
    first, first_by_ray, *epoch = outcome_of("warmed_up_long_before")[0]
    assert first
    assert not first_by_ray
    assert epoch == [True, False, True]


def test_iter_raises_the_error_of_a_warm_up_that_failed() -> None:
    text, _ = outcome_of("warmed_up_in_vain")
    assert text == "ClusterError: a local Ray did not start: no memory"


def test_first_workers_end_with_a_training_process_that_is_killed() -> None:
    with workplace() as place:
        process = spawn([sys.executable, str(PROGRAM), "killed"], place, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "[0, 1, 2, 3]\n"
        process.kill()
        process.wait()
        wait_until(lambda: not processes_in(place), 20, "end of Ray and of the first workers")
