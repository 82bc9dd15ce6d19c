"""Tests of the name of this machine, and of the start times of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from dpex.wire.machine import boot_id, machine, process_start, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TELL = """
import os
from dpex.wire.machine import machine, process_start, started
print(process_start(), machine(), started(os.getppid()))
"""


def test_two_processes_of_a_machine_find_each_other_by_its_name() -> None:
    before = time.time()
    told = subprocess.check_output([sys.executable, "-c", TELL], text=True, timeout=60)
    start_s, its_machine, our_start = told.split()
    assert its_machine == machine() != ""
    assert our_start == started(os.getpid())
    # The kernel counts the start in whole ticks, and the clocks are read one after another.
    assert before - 2 * TICK_S <= float(start_s) <= time.time()
    assert process_start() < float(start_s)


def test_the_name_needs_a_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert boot_id()
    monkeypatch.setattr("dpex.wire.machine.boot_id", lambda: "")
    assert machine.__wrapped__() == ""


def test_a_process_that_has_ended_has_no_start() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert int(started(process.pid)) >= int(started(os.getpid()))
        process.kill()
    assert started(process.pid) == ""
