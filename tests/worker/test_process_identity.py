"""Tests of the names of worker processes, and of the wait for their end."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from dpex import tuning
from dpex.wire.machine import started
from dpex.worker.process_identity import (
    attempt_name,
    place_of,
    process_name,
    process_of,
    runs_here,
    wait_for_end,
)

SECONDS = 20


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def name_of(process: subprocess.Popen[bytes]) -> str:
    machine, _, _, *rest = process_name().split(" ")
    return " ".join([machine, str(process.pid), started(process.pid), *rest])


def never() -> bool:
    return False


def waits(*names: str) -> threading.Thread:
    """Return a thread that waits for the end of these processes."""
    waiting = threading.Thread(target=wait_for_end, args=(names, never), daemon=True)
    waiting.start()
    waiting.join(0.05)
    return waiting


def test_a_process_is_waited_for_until_it_has_ended(child: subprocess.Popen[bytes]) -> None:
    waiting = waits(process_name(), name_of(child))
    assert waiting.is_alive()
    child.kill()  # and not waited for, so it stays as a zombie
    waiting.join(SECONDS)
    assert not waiting.is_alive()


def test_a_process_that_does_not_end_is_killed(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "END_S", 0.0)
    wait_for_end([name_of(child)], never)
    assert child.wait(SECONDS) == -9


def test_a_wait_ends_if_nothing_needs_the_batches(child: subprocess.Popen[bytes]) -> None:
    wait_for_end([name_of(child)], lambda: True)
    assert child.poll() is None


def test_other_processes_are_not_waited_for(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "END_S", 0.0)
    machine, pid, started, own = name_of(child).split(" ", 3)
    of_another_machine = f"another {pid} {started} {own}"
    of_an_earlier_process = f"{machine} {pid} {int(started) - 1} {own}"
    of_no_known_machine = f" {pid} {started} {own}"
    others = [of_another_machine, of_an_earlier_process, of_no_known_machine]
    assert [runs_here(name) for name in others] == [None, False, None]
    wait_for_end(others, never)
    wait_for_end([process_name(), attempt_name()], never)
    assert child.poll() is None


def test_a_process_has_one_name_and_another_name_for_each_attempt() -> None:
    attempts = {attempt_name() for _ in range(2)}
    assert len(attempts) == 2
    assert {process_of(attempt) for attempt in attempts} == {process_name()}
    assert place_of(process_name()) == (os.uname().nodename, os.getpid())
    assert runs_here(process_name())


def test_a_fork_has_a_name_of_its_own() -> None:
    read_end, write_end = os.pipe()
    before = process_name()
    if (pid := os.fork()) == 0:
        os.write(write_end, process_name().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    name = os.read(read_end, 1000).decode()
    assert name != before
    assert name.split(" ")[1] == str(pid)
