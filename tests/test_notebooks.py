"""Tests of the notebooks, and of dpex in Jupyter's kernel: interrupts, restarts, edited cells."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # builds the font cache, which a kernel would report
import nbformat
import pytest
from cluster_programs import ROOT, environment, processes_in, wait_until, workplace
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = {path.stem: path for path in (ROOT / "notebooks").glob("*.ipynb")}
# Notebooks in which no loader outlives its cell: there, a second run only repeats the first.
ALONE = {"cluster", "ddp", "find_your_bottleneck", "resume"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 190
GONE_SECONDS = 60
# Time in which a kernel must end, before Jupyter terminates it. A kernel that waits for its child
# processes waits for 28 s.
END_SECONDS = 25

# Log lines of dpex: what runs the workers, and, on a busy machine, that a batch is late.
REMARK = re.compile(
    r"^dpex: (no Ray cluster found: |\d+ worker process|local Ray on|Ray at|no batch for).*\n",
    re.MULTILINE,
)
# Messages of Ray and of its worker processes, and warnings of libraries.
CHATTER = re.compile(
    r"\((raylet|autoscaler|pid=|\S+ pid=)|(INFO|WARNING|ERROR) \w+\.(py|cc):|Warning: |"
    r"(Connect|Start)\w* .*Ray|(Execution plan of|Running|execution of) Dataset"
)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with workplace() as directory:
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(directory))
        yield directory
        wait_until(lambda: not processes_in(directory), GONE_SECONDS, "end of the kernel's Ray")


def kernel_environment(place: Path) -> dict[str, str]:
    variables = environment(place, MPLCONFIGDIR=matplotlib.get_cachedir())
    # If ipykernel finds this variable, cells do not show the output of file descriptors.
    del variables["PYTEST_CURRENT_TEST"]
    return variables


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_a_notebook_is_committed_as_it_was_before_it_ran(name: str) -> None:
    notebook = read(NOTEBOOKS[name])
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


def test_every_notebook_is_in_the_list() -> None:
    listed = re.findall(r"\((\w+)\.ipynb\)", (ROOT / "notebooks" / "README.md").read_text())
    assert sorted(listed) == sorted(NOTEBOOKS)


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "back"),
    [
        *((name, False) for name in sorted(ALONE)),
        *((name, True) for name in sorted(NOTEBOOKS.keys() - ALONE)),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in sorted(ALONE)),
    ],
)
def test_a_notebook_runs_from_top_to_bottom_and_back(name: str, back: bool, place: Path) -> None:
    notebook = read(NOTEBOOKS[name])
    if back:
        again = [copy.deepcopy(cell) for cell in notebook.cells[::-1] if cell.cell_type == "code"]
        for cell in again:
            cell.id += "-again"
        notebook.cells += again
    kernel = {"path": str(place)}
    NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": kernel}).execute(
        env=kernel_environment(place)
    )
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    streams = [output for output in outputs if output.output_type == "stream"]
    assert not REMARK.sub("", "".join(o.text for o in streams if o.name == "stderr"))
    assert not [output.text for output in streams if CHATTER.search(output.text)]
    assert any("image/png" in output.get("data", {}) for output in outputs)


class Kernel:
    """A kernel and its client.

    Args:
        place: Working directory of the kernel.

    Attributes:
        shown: Output of the newest cell so far.
    """

    def __init__(self, place: Path) -> None:
        self.manager = KernelManager(shutdown_wait_time=2 * END_SECONDS)
        self.manager.start_kernel(env=kernel_environment(place), cwd=str(place))
        self._client = self.manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(CELL_SECONDS)

    def begin(self, code: str) -> None:
        """Start a cell."""
        self.shown = ""
        self._cell = self._client.execute(code)

    def until(self, text: str) -> None:
        """Wait until the cell has printed a text."""
        while text not in self.shown:
            assert self._goes_on(), self.shown

    def _goes_on(self) -> bool:
        """Read the kernel's next message, and return whether the cell is still running."""
        message = self._client.get_iopub_msg(timeout=CELL_SECONDS)
        if message["parent_header"].get("msg_id") != self._cell:
            return True
        content = message["content"]
        if message["msg_type"] == "stream":
            said = REMARK.sub("", content["text"])
            assert content["name"] == "stdout" or not said, said
            self.shown += said
        return bool(content.get("execution_state") != "idle")

    def error(self) -> str | None:
        """Wait for the end of the cell, and return the name of its error, if any."""
        while self._goes_on():
            pass
        # A slow kernel first answers the requests that asked whether it was ready.
        while True:
            reply = self._client.get_shell_msg(timeout=CELL_SECONDS)
            if reply["parent_header"]["msg_id"] == self._cell:
                return reply["content"].get("ename")

    def run(self, code: str) -> str:
        """Run a cell to its end, and return its output."""
        self.begin(code)
        assert self.error() is None, self.shown
        return self.shown

    def restart(self, *, now: bool) -> None:
        """End the kernel, and start another with the same ports, as Jupyter does."""
        self.manager.restart_kernel(now=now)
        self._client.wait_for_ready(CELL_SECONDS)

    def end(self) -> None:
        """End the kernel as Jupyter does."""
        self._client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture
def kernel(place: Path) -> Iterator[Kernel]:
    kernel = Kernel(place)
    try:
        yield kernel
    finally:
        kernel.end()


IMPORTS = """
import threading
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader
"""

ADDRESSES: Any = pytest.mark.parametrize("address", ["auto", "local"], ids=["processes", "Ray"])

WAITING = """
class Waiting(Dataset):
    # Sample 50 waits until it is interrupted, once.
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 50 and not Path("waiting").exists():
            Path("waiting").touch()
            threading.Event().wait()
        return index

loader = DpexDataLoader(Waiting(), batch_size=10, num_workers=2, distribute_mode=True,
                        head_address={address!r})
"""


@pytest.mark.extended
@pytest.mark.multiprocess
@ADDRESSES
def test_an_epoch_that_is_interrupted_can_be_run_again(
    kernel: Kernel, place: Path, address: str
) -> None:
    kernel.run(IMPORTS)
    kernel.run(WAITING.format(address=address))
    # Interrupt the loop while it waits for a batch, and while it handles one.
    kernel.begin("for batch in loader: print(batch[0].item())")
    kernel.until("40\n")
    wait_until((place / "waiting").exists, CELL_SECONDS, "sample that waits")
    kernel.manager.interrupt_kernel()
    assert kernel.error() == "KeyboardInterrupt"
    kernel.begin("for batch in loader: print(batch[0].item()); threading.Event().wait()")
    kernel.until("0\n")
    kernel.manager.interrupt_kernel()
    assert kernel.error() == "KeyboardInterrupt"
    assert kernel.run("print(torch.cat(list(loader)).tolist())") == f"{list(range(100))}\n"


PRINTING = """
class Prints(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        print("sample", index, flush=True)
        return index

torchs = DataLoader(Prints(), num_workers=1)
ours = DpexDataLoader(Prints(), num_workers=1, distribute_mode=True)
"""


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["torchs", "ours"])
def test_what_samples_print_appears_in_the_cell(kernel: Kernel, name: str) -> None:
    kernel.run(IMPORTS + PRINTING)
    kernel.begin(f"for batch in {name}: pass")
    kernel.until("sample 0\nsample 1\n")
    assert kernel.error() is None


A_CLASS = """
class Scaled(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {factor} * index + offset
"""
LOADERS = """
options = dict(batch_size=7, num_workers=2)
torchs = DataLoader(Scaled(), **options)
ours = DpexDataLoader(Scaled(), **options, distribute_mode=True, head_address={address!r})
"""
COMPARE = """
got, expected = torch.cat(list(ours)), torch.cat(list(torchs))
assert torch.equal(got, expected), (got, expected)
print(got[-1].item())
"""


@pytest.mark.extended
@pytest.mark.multiprocess
@ADDRESSES
def test_cells_are_run_and_changed_in_any_order(kernel: Kernel, address: str) -> None:
    loaders = LOADERS.format(address=address)
    kernel.run(IMPORTS)
    kernel.run("offset = 0")
    kernel.run(A_CLASS.format(factor=2))
    kernel.run(loaders)
    assert kernel.run(COMPARE) == kernel.run(COMPARE) == "58\n"
    kernel.run("offset = 1000")
    assert kernel.run(COMPARE) == "1058\n"
    kernel.run(A_CLASS.format(factor=3))
    assert kernel.run(COMPARE) == "1058\n", "loaders that were made before"
    kernel.run(loaders)
    assert kernel.run(COMPARE) == "1087\n"
    kernel.run(IMPORTS)
    kernel.run("Scaled.__getitem__ = lambda self, index: index")
    assert kernel.run(COMPARE) == "29\n"
    kernel.run("first = next(iter(ours))")
    assert kernel.run(COMPARE) == "29\n"


@pytest.mark.extended
@pytest.mark.multiprocess
@ADDRESSES
@pytest.mark.parametrize("killed", [False, True], ids=["asked to end", "killed"])
def test_a_kernel_is_restarted_in_mid_epoch(
    kernel: Kernel, place: Path, killed: bool, address: str
) -> None:
    loaders = LOADERS.format(address=address)
    epoch = f"{IMPORTS}\noffset = 0\n{A_CLASS.format(factor=2)}{loaders}"
    kernel.run(epoch)
    kernel.run("import atexit; atexit.register(Path('ended').touch)")
    kernel.run("batches = iter(ours); next(batches)")
    kernel.restart(now=killed)
    assert (place / "ended").exists() != killed
    kernel.run(epoch)
    assert kernel.run(COMPARE) == "58\n"
