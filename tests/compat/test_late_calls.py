"""Tests that late calls of Ray start no second Ray."""

from __future__ import annotations

import threading

import pytest
from cluster_programs import run_program, workplace

from dpex.background_thread import BackgroundThread
from dpex.compat import late_calls
from dpex.compat.late_calls import FORKS_DISCONNECTED, _NotForDpex

# The thread calls Ray when the program has shut it down, and another when Python exits.
PROGRAM = """
import atexit, threading
import torch
from torch.utils.data import TensorDataset
from dpex import DpexDataLoader
from dpex.background_thread import BackgroundThread

def call():
    try:
        ray.put(1)
    except Exception as error:
        print(type(error).__name__, ray.is_initialized(), flush=True)

def call_in(kind):
    thread = kind(target=call)
    thread.start()
    thread.join()

loader = DpexDataLoader(
    TensorDataset(torch.arange(8)), num_workers=2, distribute_mode=True, head_address="local"
)
loader.warm_up(wait=True)
import ray
ray.shutdown()
call_in(BackgroundThread)
late = threading.Event()
thread = threading.Thread(target=lambda: (late.wait(), call()), daemon=True)
thread.start()
atexit.register(lambda: (late.set(), thread.join()))
"""


@pytest.mark.parametrize("kind", [threading.Thread, BackgroundThread])
@pytest.mark.parametrize("setting", [True, False])
def test_only_threads_of_dpex_start_no_ray(kind: type[threading.Thread], setting: bool) -> None:
    seen = []
    thread = kind(target=lambda: seen.append(bool(_NotForDpex(setting))))
    thread.start()
    thread.join()
    assert seen == [setting and kind is threading.Thread]
    assert bool(_NotForDpex(setting)) == setting, "in the main thread"


@pytest.mark.filterwarnings("ignore:dpex. ray")
@pytest.mark.parametrize("value", [None, 0, "text"])
def test_a_worker_object_of_another_kind_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(FORKS_DISCONNECTED, "failed", False)
    monkeypatch.setattr("ray._private.worker.global_worker", value)
    late_calls.prepare()
    late_calls.disconnect_fork()
    assert FORKS_DISCONNECTED.failed


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_a_late_call_starts_no_second_ray() -> None:
    with workplace() as place:
        program = place / "program.py"
        program.write_text(PROGRAM)
        done = run_program(program, place=place, seconds=150)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 2, done.stdout + done.stderr
        assert all(line.endswith(" False") for line in lines), done.stdout
