"""Tests that a fork of the training process ends as any process does, and disturbs nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster_programs import processes_in, run_program, wait_until, workplace

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# A child that hangs is killed after a minute, and its status is -9. A hang of the training process
# at its own exit ends it by a traceback.
LOOP = """
import atexit, faulthandler, json, multiprocessing, os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import Dataset
from dpex import DataLoader

class Slow(Dataset):
    def __len__(self): return 1200
    def __getitem__(self, index): time.sleep(0.002); return index

def fork(end):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        end()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fail(): raise ValueError("an error of the fork")

def spawn_by_multiprocessing(end):
    child = multiprocessing.get_context("fork").Process(target=end)
    child.start()
    child.join(60)
    return child.exitcode

atexit.register(lambda: Path(f"exit-of-{os.getpid()}").touch())
if __name__ == "__main__":
    loader = DataLoader(Slow(), batch_size=10, num_workers=2, head_address=sys.argv[1])
    ends = {
        0: lambda: sys.exit(3),
        20: lambda: sys.exit(4),
        40: fail,
        60: lambda: os._exit(5),
    }
    alone = sys.argv[1] == "processes"
    if alone:
        # multiprocessing ends the workers when a fork exits, and those of torch's loader too.
        ends = {60: ends[60]}
    indices, statuses = [], []
    for number, batch in enumerate(loader):
        indices += batch.tolist()
        if number in ends:
            statuses.append(fork(ends[number]))
        if number == 80:
            statuses.append(spawn_by_multiprocessing(time.time))
        if number == 100 and not alone:
            pid = os.fork()
            if pid == 0:
                break  # and so ends as the training process does
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        assert indices == list(range(1200))
        assert [len(batch) for batch in loader] == [10] * 120
        print(json.dumps([statuses, len(list(Path().glob("exit-of-*")))]), flush=True)
        faulthandler.dump_traceback_later(60, exit=True)
"""

# No fork removes what worker processes read, and none that still runs keeps it.
MEMORY = """
import os, sys
from dpex.datasets import node_memory

node_memory.use_until_exit("arrays", "a-job-of-a-test")
directory = node_memory.job_directory("arrays", "a-job-of-a-test")
if (pid := os.fork()) == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
print(directory, directory.exists(), flush=True)
read, write = os.pipe()
if os.fork() == 0:
    os.closerange(1, read)
    os.close(write)
    os.read(read, 1)  # returns when the parent has ended
    os._exit(0)
"""


@pytest.mark.parametrize("carrier", ["local", "processes"])
def test_a_fork_in_the_loop_ends_with_its_status(carrier: str) -> None:
    with workplace() as place:
        program = place / "program.py"
        program.write_text(LOOP)
        done = run_program(program, carrier, place=place, seconds=160)
        assert done.returncode == 0, done.stdout + done.stderr
        statuses, exits = json.loads(done.stdout.splitlines()[-1])
        if carrier == "processes":
            assert (statuses, exits) == ([5, 0], 0), done.stderr
        else:
            assert statuses == [3, 4, 1, 5, 0, 0], done.stderr
            assert exits == 4, "the program's exit handlers run in forks, except after os._exit"
            assert done.stderr.count("ValueError: an error of the fork") == 1
        wait_until(lambda: not processes_in(place), 20, "end of all processes")


def test_a_fork_removes_no_memory_that_its_parent_shares() -> None:
    with workplace() as place:
        program = place / "program.py"
        program.write_text(MEMORY)
        done = run_program(program, place=place, seconds=100)
        assert done.returncode == 0, done.stderr
        directory, existed = done.stdout.split()
        assert existed == "True"
        assert not Path(directory).exists(), "the parent removes it"
