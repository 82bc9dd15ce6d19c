"""Ctrl-C reaches the main thread, whatever dpex's threads start meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from cluster_programs import spawn, workplace

WAITS = """
import signal
import sys
import threading
from dpex.background_thread import BackgroundThread

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
rounds = 0
begun = False  # the start of a thread waits too

def start_threads():
    announced = None
    while True:
        threads = [threading.Thread(target=sum, args=([],)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        current = rounds
        frame = sys._current_frames()[threading.main_thread().ident]
        if begun and announced != current and frame.f_code.co_name == "wait":
            announced = current
            print("the main thread waits", flush=True)

BackgroundThread(target=start_threads, daemon=True).start()
begun = True
while rounds < 30:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        rounds += 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the program ends with pytest on Linux only")
def test_ctrl_c_wakes_the_main_thread_while_a_background_thread_starts_threads() -> None:
    with (
        workplace() as place,
        spawn([sys.executable, "-c", WAITS], place, stdout=subprocess.PIPE) as program,
    ):
        assert program.stdout is not None
        try:
            for _ in program.stdout:
                program.send_signal(signal.SIGINT)
            assert program.wait(timeout=60) == 0
        finally:
            program.kill()
