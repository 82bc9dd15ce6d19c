"""Tests that a training process reads what torch's loader reads, however it is started."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from cluster_programs import (
    PROGRAM_SECONDS,
    PROGRAMS,
    processes_in,
    run_program,
    wait_until,
    workplace,
)

PROGRAM = PROGRAMS / "launch_program.py"
GLOBALS = PROGRAMS / "globals_program.py"
JOBS = PROGRAMS / "jobs_program.py"

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


# A process that multiprocessing has started does not shut its Ray down: Ray's agents end later.
AGENTS_GONE_SECONDS = 120
GONE_SECONDS = 20


def run(
    how: str, *flags: str, ranks: int = 1, seconds: float = GONE_SECONDS, **variables: str
) -> None:
    with workplace() as place:
        run_in(place, PROGRAM, how, flags=flags, ranks=ranks, seconds=seconds, **variables)


def run_in(
    place: Path,
    program: Path,
    *how: str,
    flags: tuple[str, ...] = (),
    ranks: int = 1,
    seconds: float = GONE_SECONDS,
    **variables: str,
) -> None:
    """Run a program that compares loaders in each rank, and wait until all processes have ended."""
    done = run_program(
        program, *how, place=place, seconds=PROGRAM_SECONDS, flags=flags, **variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("reads what torch's loader reads") == ranks
    wait_until(lambda: not processes_in(place), seconds, "end of all processes")


@pytest.mark.extended
@pytest.mark.parametrize(
    "flags",
    [("-I",), ("-O", "-X", "dev", "-W", "error::DeprecationWarning:__main__")],
    ids=" ".join,
)
def test_the_interpreter_may_have_any_flags(flags: tuple[str, ...]) -> None:
    run("alone", *flags)


@pytest.mark.extended
def test_the_script_may_be_a_module_that_is_run() -> None:
    with workplace() as place:
        shutil.copy(PROGRAM, place)
        shutil.copy(PROGRAM.with_name("launch_config.py"), place)
        run_in(place, Path(PROGRAM.stem), "alone", flags=("-m",))
        program = place / "runs.py"
        program.write_text(
            f"import runpy\n\nrunpy.run_module({PROGRAM.stem!r}, alter_sys=True, "
            "run_name='__main__')\n"
        )
        run_in(place, program, "alone")


@pytest.mark.extended
def test_the_script_may_lie_in_an_archive() -> None:
    with workplace() as place:
        archive = place / "program.pyz"
        with zipfile.ZipFile(archive, "w") as file:
            file.write(PROGRAM, "__main__.py")
            file.write(PROGRAM.with_name("launch_config.py"), "launch_config.py")
        run_in(place, archive, "alone")


@pytest.mark.extended
def test_accelerate_may_launch_the_script() -> None:
    with workplace() as place:
        launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1")
        run_in(place, PROGRAM, "alone", flags=launcher)


@pytest.mark.extended
@pytest.mark.parametrize("directory", ["its own", "the script's"])
def test_hydra_may_run_the_script_for_several_configurations(directory: str) -> None:
    with workplace() as place:
        chdir = f"hydra.job.chdir={directory == 'its own'}"
        run_in(place, JOBS, "--multirun", "+factor=2,3", chdir, ranks=2)


@pytest.mark.extended
def test_the_script_may_submit_itself_to_submitit() -> None:
    with workplace() as place:
        run_in(place, JOBS, "submitit")


def test_warnings_may_be_errors_and_there_may_be_no_packages_of_the_user_s() -> None:
    run("warnings are errors", "-s", PYTHONNOUSERSITE="1")  # the variable reaches Ray's processes


@pytest.mark.extended
def test_the_settings_may_change_between_iterations() -> None:
    run("settings")


@pytest.mark.extended
@pytest.mark.parametrize(("how", "ranks"), [("spawn", 2), ("pool", 1)])
def test_the_script_s_own_classes_may_come_from_a_process_that_multiprocessing_started(
    how: str, ranks: int
) -> None:
    run(how, ranks=ranks, seconds=AGENTS_GONE_SECONDS)


@pytest.mark.parametrize("carrier", ["local", "processes"])
def test_a_script_s_globals_are_those_of_a_fork(carrier: str) -> None:
    with workplace() as place:
        done = run_program(GLOBALS, carrier, place=place, seconds=PROGRAM_SECONDS)
        assert done.stdout == "as torch's fork\n", done.stdout + done.stderr
        wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of all processes")
