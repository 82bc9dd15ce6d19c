"""Tests of the wait for processes that Ray has replaced."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from dpex import tuning
from dpex.worker import replaced_processes
from dpex.worker.replaced_processes import process_name, wait_for_end

SECONDS = 20


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def name_of(process: subprocess.Popen[bytes]) -> str:
    own, machine, _, _ = process_name().split(" ")
    return f"{own} {machine} {process.pid} {replaced_processes._started(process.pid)}"


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
    own, machine, pid, started = name_of(child).split(" ")
    of_another_machine = f"{own} another {pid} {started}"
    of_an_earlier_process = f"{own} {machine} {pid} {int(started) - 1}"
    of_no_known_machine = f"{own}  {pid} {started}"
    wait_for_end([of_another_machine, of_an_earlier_process, of_no_known_machine], never)
    wait_for_end([process_name()], never)
    assert child.poll() is None


def test_a_process_has_another_name_for_each_task() -> None:
    names = {process_name() for _ in range(2)}
    assert len(names) == 2
    assert all(name.split(" ")[2] == str(os.getpid()) for name in names)
