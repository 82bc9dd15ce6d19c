"""Tests of programs that run without standard streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_programs import environment, processes_in, wait_until, workplace

from dpex.cluster.standard_streams import no_stream, stderr_for_ray

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OPEN = """
import os, sys
from pathlib import Path
from dpex.cluster.standard_streams import open_missing_streams

own = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)  # gets the descriptor of a closed stream
open_missing_streams()
links = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
free = os.open(os.devnull, os.O_RDONLY)
os.write(own, repr((own, links, free, [os.get_inheritable(n) for n in (1, 2)])).encode())
"""

PROGRAM = """
import json, sys, traceback
from pathlib import Path
from torch.utils.data import Dataset
from dpex import DataLoader

class Prints(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        print("sample", index)
        return index

if __name__ == "__main__":
    told = Path("told")
    try:
        loader = DataLoader(Prints(), batch_size=10, num_workers=2, head_address=sys.argv[1])
        batches = [batch.tolist() for _ in range(2) for batch in loader]
        told.write_text(json.dumps([batches, [str(sys.stdin), str(sys.stdout), str(sys.stderr)]]))
    except BaseException:
        told.write_text(json.dumps(traceback.format_exc()))
"""


def run_in_shell(place: Path, code: str, redirections: str, *arguments: str) -> int:
    program = place / "program.py"
    program.write_text(code)
    command = f'exec "$0" "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, str(program), *arguments],
        cwd=place,
        env=environment(place),
        timeout=150,
        check=False,
    ).returncode


def test_the_null_device_takes_the_place_of_closed_streams() -> None:
    with workplace() as place:
        file = place / "file"
        assert run_in_shell(place, OPEN, "<&- >&- 2>&-", str(file)) == 0
        own, links, free, inheritable = eval(file.read_text())
    assert (own, links) == (0, [str(file), "/dev/null", "/dev/null"]), "the user's file stays"
    assert free == 3, "no further descriptor is open"
    assert inheritable == [True, True]


@pytest.mark.parametrize("present", [False, True])
def test_ray_gets_a_stderr_only_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    before = sys.stderr if present else None
    monkeypatch.setattr(sys, "stderr", before)
    with stderr_for_ray():
        assert sys.stderr is (before if present else no_stream())
        assert os.fstat(sys.stderr.fileno() if not present else 2)
    assert sys.stderr is before


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
@pytest.mark.parametrize("carrier", ["local", "processes"])
@pytest.mark.parametrize(
    "redirections",
    ["<&- >&- 2>&-", *(pytest.param(r, marks=pytest.mark.extended) for r in ("2>&-", "<&-"))],
)
def test_workers_start_without_streams_and_leave_nothing(redirections: str, carrier: str) -> None:
    with workplace() as place:
        assert run_in_shell(place, PROGRAM, redirections, carrier) == 0
        batches, streams = json.loads((place / "told").read_text())
        assert batches == 2 * [list(range(start, start + 10)) for start in range(0, 40, 10)]
        assert [stream == "None" for stream in streams] == [
            closed in redirections for closed in ("<&-", " >&-", "2>&-")
        ]
        wait_until(lambda: not processes_in(place), 30, "end of all processes")
