"""Tests that worker processes of a local Ray are forks of the training process, like torch's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from cluster_programs import (
    PROGRAM_SECONDS,
    PROGRAMS,
    environment,
    processes_in,
    rank_variables,
    run_program,
    spawn,
    wait_until,
    workplace,
)

from dpex.cluster.local import forkserver
from dpex.compat.job_ids import new_job_id

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="no forks"),
]

PROGRAM = PROGRAMS / "fork_program.py"
# A module ``ray`` whose import never ends, and a training process that ends during the import.
STALLED = "import pathlib, threading; pathlib.Path('reached').touch(); threading.Event().wait()"
IMPATIENT = """
import os, pathlib, time
from dpex.cluster.local import forkserver
from dpex.wire.pickling import dump
from dpex.worker.inherited_job import Bequest

job = Bequest(dump(0, "job"), 0)
assert forkserver.address(lambda: job, forkserver.FIRST_JOB)
while not pathlib.Path("reached").exists():
    time.sleep(0.05)
os._exit(0)
"""


def outcomes_of(*scenarios: str) -> list[Any]:
    with workplace() as place:
        done = run_program(PROGRAM, *scenarios, place=place, seconds=PROGRAM_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: not processes_in(place), 20, "end of Ray and of the fork server")
        return json.loads(done.stdout)


def test_workers_are_forks_of_the_training_process() -> None:
    forked, ids, groups, beside_spawned, after_shutdown = outcomes_of(
        "forked", "random_ids", "groups", "spawned_beside_forked", "after_shutdown"
    )
    assert forked == [True, 1]
    assert ids == [40, 40], "no two draw the same"
    assert groups == [[False, False]], "in a group with neither the server nor the training process"
    assert beside_spawned == [True, False], "each loader's start method counts"
    assert after_shutdown == [True, True, False], "they end with their Ray, a new one forks again"


def test_the_workers_of_ranks_are_forks_of_their_own_rank() -> None:
    with workplace() as place:
        ranks = [
            spawn(
                [sys.executable, str(PROGRAM), "rank"],
                place,
                env=environment(place, **rank_variables(place, number)),
                stdout=subprocess.PIPE,
            )
            for number in range(2)
        ]
        for number, process in enumerate(ranks):
            output, _ = process.communicate(timeout=PROGRAM_SECONDS)
            first, after_shutdown = json.loads(output)[0]
            variables = [str(number), f"of rank {number}"]
            assert first == [[True, *variables]]
            assert after_shutdown == [[False, *variables]], "of the Ray that the rank joins again"
        wait_until(lambda: not processes_in(place), 20, "end of Ray and of the fork servers")


def test_the_id_of_a_server_is_kept_until_a_job_has_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_job_ids", {forkserver.FIRST_JOB})
    monkeypatch.setattr(forkserver, "_job_id", forkserver.FIRST_JOB)
    assert forkserver.unused_job_id() is None, "every local Ray of one process has this job"
    first, second = new_job_id(), new_job_id()
    assert first != second
    monkeypatch.setattr(forkserver, "_job_id", first)
    assert forkserver.unused_job_id() == first, "the process has not joined yet"
    forkserver.record_job(first)
    assert forkserver.unused_job_id() is None


def test_only_the_job_of_a_server_gets_forks_that_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_job_id", "02000000")
    monkeypatch.setattr(forkserver, "_bequeathed", "digest")
    assert forkserver.is_inherited("digest", "02000000")
    assert not forkserver.is_inherited("another", "02000000")
    assert not forkserver.is_inherited("digest", "03000000")


@pytest.mark.parametrize("public_only", ["0", "1"])
@pytest.mark.extended
def test_without_a_fork_server_workers_have_the_variables_of_their_rank(public_only: str) -> None:
    with workplace() as place:
        variables = rank_variables(place, 1) | {"DPEX_PUBLIC_RAY_ONLY": public_only}
        done = run_program(
            PROGRAM, "no_fork_of_a_rank", place=place, seconds=PROGRAM_SECONDS, **variables
        )
        assert done.returncode == 0, done.stdout + done.stderr
        [[first, after_shutdown]] = json.loads(done.stdout)
        assert first == after_shutdown == [[False, "1", "of rank 1"]]


def test_every_iteration_has_a_copy_of_its_own_of_what_is_inherited() -> None:
    [sums] = outcomes_of("fresh_copies")
    for first, second in zip(*[iter(sums)] * 2, strict=True):
        # A new copy counts from 1, to at most 8 if one process makes all samples.
        assert first[0] == second[0] == 1.0
        assert max(*first, *second) <= 8.0


def test_forks_use_the_objects_of_a_large_dataset_themselves() -> None:
    own, reduced, small = outcomes_of("own_objects", "reduced_objects", "small_objects")
    first, second, changed = own
    assert first == {"own": True, "seen": 8, "value": 0, "state": "live"}
    assert second == first | {"own": False}, "a new copy, in which no sample has been counted"
    assert changed == first | {"own": False, "value": 7}
    assert reduced[0] == first | {"own": False, "state": "pickled"}, "by its own __getstate__"
    assert small[0]["own"] is False, "a small copy is compared, and may serve all logical workers"


@pytest.mark.extended
def test_workers_write_to_memory_that_the_training_process_shares() -> None:
    assert outcomes_of("shared_memory") == [[list(range(8)), 8.0]]


@pytest.mark.extended
@pytest.mark.parametrize("scenario", ["spawned", "with_ray_loaded"])
def test_workers_that_are_no_forks_of_the_training_process_are_those_of_a_new_process(
    scenario: str,
) -> None:
    [parent] = outcomes_of(scenario)
    assert parent.startswith("python")


@pytest.mark.extended
def test_ray_starts_the_workers_when_the_server_has_gone() -> None:
    assert outcomes_of("without_server") == [[True, False]]


@pytest.mark.extended
def test_ray_starts_the_workers_where_the_process_cannot_be_forked() -> None:
    assert outcomes_of("no_fork") == [False]


def test_ray_s_own_program_takes_the_place_of_a_fork_that_fails() -> None:
    assert outcomes_of("forks_that_fail") == [False]


@pytest.mark.extended
@pytest.mark.long
def test_a_server_that_never_answers_is_told_of_and_ray_starts_the_workers() -> None:
    with workplace() as place:
        scenario = "a_server_that_never_answers"
        done = run_program(PROGRAM, scenario, place=place, seconds=PROGRAM_SECONDS)
        assert json.loads(done.stdout) == [False], done.stdout + done.stderr
        assert "waiting for the process that runs the pipeline" in done.stderr
        assert "The worker processes are starting" in done.stderr


@pytest.mark.extended
@pytest.mark.long
def test_a_wait_for_a_worker_that_never_starts_is_told_again_and_again() -> None:
    with workplace() as place:
        command = [sys.executable, str(PROGRAM), "no_worker_program"]
        process = spawn(command, place, stderr=subprocess.PIPE)
        assert process.stderr is not None
        told = 0
        while told < 2:
            line = process.stderr.readline()
            assert line, "the program has ended"
            told += "waiting for the process that runs the pipeline" in line
        process.kill()
        process.wait()
        wait_until(lambda: not processes_in(place), 20, "end of Ray and of the fork server")


def test_workers_end_with_a_training_process_that_is_killed() -> None:
    with workplace() as place:
        process = spawn([sys.executable, str(PROGRAM), "killed"], place, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "[true]\n"
        process.kill()
        process.wait()
        wait_until(lambda: not processes_in(place), 20, "end of Ray and of the fork server")


def test_the_server_ends_with_its_training_process_also_where_ray_cannot_be_loaded() -> None:
    with workplace() as place:
        (place / "ray.py").write_text(STALLED)
        program = place / "impatient.py"
        program.write_text(IMPATIENT)
        # The server inherits the program's output, so this waits for the end of both.
        done = run_program(program, place=place, seconds=60)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not processes_in(place), 20, "end of the fork server")
