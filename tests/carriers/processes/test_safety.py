"""Tests of worker processes in surroundings that are dangerous for forks, or short of something."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_programs import (
    environment,
    processes_in,
    run_program,
    spawn,
    wait_until,
    workplace,
)
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

OURS: dict[str, Any] = {"distribute_mode": True, "head_address": "processes"}
PROGRAM_SECONDS = 100
GONE_SECONDS = 30


def run(text: str, *under: str) -> str:
    """Run a program to its end, under a command, and return its output; it must leave nothing."""
    with workplace() as place:
        (place / "program.py").write_text(text)
        command = [*under, sys.executable, "program.py"]
        done = subprocess.run(
            command,
            cwd=place,
            env=environment(place),
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of all processes")
        return done.stdout


# --- a training process that is connected to Ray --------------------------------------------------

WITH_RAY = """
import atexit, os, signal
from pathlib import Path
import ray, torch
from torch.utils.data import Dataset
from dpex import DpexDataLoader

class Asks(Dataset):
    # Samples that call Ray, of which one first kills its process.
    def __init__(self, ref, actor, call, deadly=False):
        self.ref, self.actor, self.call, self.deadly = ref, actor, call, deadly
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 3 and self.deadly and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.call(self, index)

def get(dataset, index): return ray.get(dataset.ref)[index]
def put(dataset, index): return ray.get(ray.put(index))
def start(dataset, index): return ray.get(task.remote(index))
def ask(dataset, index): return ray.get(dataset.actor.ask.remote(index))
def drop(dataset, index):
    dataset.ref = dataset.actor = None  # Ray gets a message when Python frees them
    return index

def outcome(dataset, **options):
    loader = DpexDataLoader(dataset, batch_size=4, num_workers=2, distribute_mode=True, timeout=30,
                            head_address="processes", **options)
    try:
        return [batch.tolist() for batch in loader]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"

if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)

    @ray.remote
    def task(index): return index

    @ray.remote(num_cpus=0)
    class Actor:
        def ask(self, index): return index

    atexit.register(lambda: Path(f"exit-{os.getpid()}").touch())
    ref, actor = ray.put(list(range(8))), Actor.remote()
    for call in (get, put, start, ask):
        print(outcome(Asks(ref, actor, call)))
    print(outcome(Asks(ref, actor, drop, deadly=True)), Path("killed").exists())
    print(outcome(Asks(ref, None, get), multiprocessing_context="spawn"))
    assert ray.get(ref) == list(range(8))
    assert ray.get([actor.ask.remote(5), task.remote(6)], timeout=60) == [5, 6]
    atexit.register(lambda: print(len(list(Path().glob("exit-*")))))
"""


@pytest.mark.multiprocess
def test_worker_processes_leave_the_ray_of_the_training_process_alone() -> None:
    *calls, dropped, spawned, exits = run(WITH_RAY).splitlines()
    assert len(calls) == 4
    for call in calls:
        # The last is the call of an actor, before which Ray does not check the connection.
        assert call.startswith("AttributeError: " if call is calls[-1] else "ClusterError: ")
        assert "was forked from one connected to Ray" in call
        assert "call ray.get() before iter(loader)" in call
        assert "head_address='auto'" in call
    assert dropped == "[[0, 1, 2, 3], [4, 5, 6, 7]] True"
    assert "Ray has not been started yet" in spawned, "no second Ray starts"
    assert exits == "0", "the exit handlers have run only in the training process, after this one"


# --- processes and threads of the user ------------------------------------------------------------


def outcome(kind: str) -> Any:
    """Return the batches of a loader, or its error."""
    make: Any = DataLoader if kind == "torch" else DpexDataLoader
    try:
        loader = make(range(8), batch_size=4, num_workers=2, **(OURS if kind == "dpex" else {}))
        return [batch.tolist() for batch in loader]
    except AssertionError as error:
        return repr(error)


class Nested(Dataset[list[str]]):
    """Samples that are what loaders in a worker process do."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[str]:
        return [str(outcome(kind)) for kind in ("torch", "dpex")]


def test_daemonic_processes_get_torch_s_error() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        torchs, ours = pool.map(outcome, ["torch", "dpex"])
    assert ours == torchs
    assert "daemonic processes are not allowed to have children" in ours
    [(torchs, ours)] = DpexDataLoader(Nested(), batch_size=None, num_workers=1, **OURS)
    assert ours == torchs
    assert "daemonic" in ours


def test_the_thread_that_has_called_iter_may_end() -> None:
    """The kernel's PR_SET_PDEATHSIG fires when the thread ends that has forked."""
    options = {"batch_size": 4, "num_workers": 2, "prefetch_factor": 1, "prefetch_bytes": 0}
    loader = DpexDataLoader(range(80), **options, **OURS)
    iterators: list[Any] = []
    thread = threading.Thread(target=lambda: iterators.append(iter(loader)))
    thread.start()
    thread.join()
    native = Path(f"/proc/self/task/{thread.native_id}")
    wait_until(lambda: not native.exists(), GONE_SECONDS, "end of the thread in the kernel")
    assert torch.cat(list(iterators.pop())).tolist() == list(range(80))


# --- interrupts and output ------------------------------------------------------------------------

INTERRUPTED = """
import os, threading
from pathlib import Path
from dpex import DpexDataLoader

class Waits:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 20 and not Path("waits").exists():
            Path("waits").touch()
            threading.Event().wait()
        if index == 20:
            print("a sample's line", flush=True)
        return index

loader = DpexDataLoader(Waits(), batch_size=4, num_workers=2, distribute_mode=True,
                        head_address="processes")
try:
    list(loader)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print([int(i) for batch in loader for i in batch] == list(range(40)), flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("interrupt", [os.kill, os.killpg], ids=["notebook's", "terminal's"])
def test_an_interrupt_ends_the_epoch_and_not_the_loader(interrupt: Any) -> None:
    with workplace() as place:
        (place / "program.py").write_text(INTERRUPTED)
        process = spawn(
            [sys.executable, "program.py"],
            place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wait_until((place / "waits").exists, GONE_SECONDS, "sample that waits")
        interrupt(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=PROGRAM_SECONDS)
        assert output.splitlines() == ["interrupted", "a sample's line", "True"], errors
        assert "Traceback" not in errors
        assert process.returncode == 0
        wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the worker processes")


# --- resources that are short ---------------------------------------------------------------------

LITTLE_SHARED_MEMORY = """
import os, torch
from torch.utils.data import Dataset
from dpex import DpexDataLoader

class Large(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return torch.full((2_000_000,), float(index))

shared = os.statvfs("/dev/shm")
assert shared.f_blocks * shared.f_frsize == 64 << 20
loader = DpexDataLoader(Large(), batch_size=2, num_workers=4, prefetch_factor=2,
                        distribute_mode=True, head_address="processes")
for _ in range(2):
    kept = list(loader)
    assert sum(batch.nbytes for batch in kept) > 2 * (64 << 20)
    for number, batch in enumerate(kept):
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]
        assert bool((batch == batch[:, :1]).all())
print("the end is reached")
"""


@pytest.mark.multiprocess
def test_shared_memory_may_be_short() -> None:
    """Docker gives a container 64 MiB."""
    mount = "mount -t tmpfs -o size=64m none /dev/shm"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"needs the right to mount: {probe.stderr.decode()}")
    under = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
    assert run(LITTLE_SHARED_MEMORY, *under) == "the end is reached\n"


FEW_FILES = """
import os, resource, torch
from torch.utils.data import Dataset
from dpex import DpexDataLoader

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

class Several(Dataset):
    def __len__(self):
        return 800
    def __getitem__(self, index):
        return [torch.full((20_000,), float(index)) for _ in range(3)]

def loader_of(**options):
    return DpexDataLoader(Several(), batch_size=2, num_workers=8, prefetch_factor=8,
                          distribute_mode=True, head_address="processes", **options)

for options in ({}, {"persistent_workers": True}):
    with loader_of(**options) as loader:
        for _ in range(2):
            kept = list(loader)
            for number, batch in enumerate(kept):
                for tensor in batch:
                    assert tensor[:, 0].tolist() == [2 * number, 2 * number + 1]
print("the end is reached")
"""


@pytest.mark.multiprocess
def test_the_number_of_open_files_may_be_small() -> None:
    """macOS and many shells allow 256. torch needs a file for each tensor of each kept batch."""
    assert run(FEW_FILES) == "the end is reached\n"


ENDS_IN_MID_EPOCH = """
import multiprocessing
from dpex import DpexDataLoader

def train():
    global batches
    loader = DpexDataLoader(range(400), num_workers=6, distribute_mode=True)
    batches = iter(loader)
    next(batches)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        rank = multiprocessing.get_context(method).Process(target=train)
        rank.start()
        rank.join()
        print(rank.exitcode)
"""


@pytest.mark.multiprocess
def test_a_process_of_multiprocessing_may_end_in_mid_epoch() -> None:
    with workplace() as place:
        (place / "program.py").write_text(ENDS_IN_MID_EPOCH)
        done = run_program(place / "program.py", place=place, seconds=PROGRAM_SECONDS)
    assert done.stdout.split() == ["0", "0"], done.stderr
    assert "Traceback" not in done.stderr
