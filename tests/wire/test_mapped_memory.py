"""Tests of mapped files, which workers on a Ray map too, and of shared memory, which they lack."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace
from cluster_programs.clusters import Cluster
from cluster_programs.seeing import hiding
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from dpex.errors import NodeDataError, SerializationError
from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import Pickled, dump, load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HERE = Readers(same_host=True)
ELSEWHERE = Readers(same_host=False)
PROGRAM = PROGRAMS / "mappings_program.py"
ROWS, COLUMNS = 1 << 10, 1 << 8
# Maximum size of a reference to a file, with the descriptions of its views.
REFERENCE_BYTES = 3_000

READ_ELSEWHERE = """
import pickle, sys
from dpex.wire.pickling import load
found = load(pickle.load(sys.stdin.buffer))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of int64 numbers that count up from 0."""
    path = tmp_path / "numbers"
    np.arange(ROWS * COLUMNS, dtype=np.int64).tofile(path)
    return path


def sent(obj: Any, readers: Readers = HERE) -> Any:
    """Return an object as a reader gets it; fail if its content is sent."""
    pickled = dump(obj, "x", readers)
    assert pickled.size_bytes < REFERENCE_BYTES
    return load(pickled)


def run_elsewhere(pickled: Pickled, code: str) -> str:
    """Unpickle in another process, run some code there, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ELSEWHERE + code],
        input=pickle.dumps(pickled),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda a: a,
    "rows": lambda a: a[7:90],
    "columns": lambda a: a[:, 3:100:2],
    "one element": lambda a: a[5, 6:7].reshape(()),
    "transposed": lambda a: a.T if isinstance(a, np.ndarray) else a.t(),
    "other dtype": lambda a: a.view(np.int32 if isinstance(a, np.ndarray) else torch.int32),
}
ARRAY_VIEWS: dict[str, Callable[[Any], Any]] = {
    "backwards": lambda a: a[::-1, ::-3],
    "repeated": lambda a: np.broadcast_to(a[3], (5, COLUMNS)),
    "structured": lambda a: a.view([("id", "<i4"), ("value", "<f4")]),
    "field": lambda a: a.view([("id", "<i4"), ("value", "<f4")])["value"],
    "records": lambda a: a.view([("id", "<i4"), ("value", "<f4")]).view(np.recarray),
    "fixed": lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
    "plain": np.asarray,
}


@pytest.mark.parametrize("view", [*VIEWS, *ARRAY_VIEWS])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_views_of_a_mapped_file_are_views_of_it_again(file: Path, view: str, mode: Any) -> None:
    mapped = np.memmap(file, np.int64, mode, shape=(ROWS, COLUMNS))
    array = {**VIEWS, **ARRAY_VIEWS}[view](mapped)
    found = sent(array)
    assert type(found) is type(array)
    assert (found.dtype, found.shape, found.strides) == (array.dtype, array.shape, array.strides)
    assert found.flags.writeable == array.flags.writeable
    assert found.tobytes() == array.tobytes()
    if view == "whole":
        assert (found.filename, found.mode, found.offset) == (mapped.filename, mode, 0)
        found.flush()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shared", [True, False])
def test_views_of_a_mapped_tensor_are_views_of_it_again(
    file: Path, view: str, shared: bool
) -> None:
    size = ROWS * COLUMNS
    mapped = torch.from_file(str(file), shared=shared, size=size, dtype=torch.int64)
    tensor = VIEWS[view](mapped.view(ROWS, COLUMNS))
    found = sent(tensor)
    assert (found.dtype, found.shape, found.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert torch.equal(found, tensor)


def test_objects_in_mapped_memory_keep_their_attributes(file: Path) -> None:
    array: Any = np.memmap(file, np.int64, "r+")
    records: Any = array.view([("id", "<i4"), ("value", "<f4")]).view(np.recarray)
    tensor: Any = torch.from_file(str(file), shared=True, size=ROWS, dtype=torch.int64)
    for name, obj in (("array", array), ("records", records), ("tensor", tensor)):
        obj.tag, obj.own = name, obj
    found = sent([array, records, tensor])
    assert [obj.tag for obj in found] == ["array", "records", "tensor"]
    assert all(obj.own is obj for obj in found)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_tensor_on_an_array_on_a_file(file: Path, mode: Any) -> None:
    tensor = torch.from_numpy(np.memmap(file, np.int64, mode)[9:])
    assert torch.equal(sent(tensor), tensor)


def test_what_is_written_reaches_the_file(file: Path) -> None:
    array = np.memmap(file, np.int64, "r+")
    tensor = torch.from_file(str(file), shared=True, size=array.size, dtype=torch.int64)
    pickled = dump({"array": array[2:], "tensor": tensor}, "x", HERE)
    run_elsewhere(pickled, "found['array'][0] = -1; found['tensor'][5] = -2")
    assert (tensor[2], array[5]) == (-1, -2)
    assert np.fromfile(file, np.int64, 6).tolist() == [0, 1, -1, 3, 4, -2]
    array[0] = 99
    assert run_elsewhere(pickled, "print(int(found['tensor'][0]))") == "99\n"
    assert pickled.digest == dump({"array": array[2:], "tensor": tensor}, "x", HERE).digest


def test_attributes_that_view_one_mapping_share_it(file: Path) -> None:
    for memory in (
        np.memmap(file, np.int64, "c"),
        torch.from_file(str(file), shared=False, size=ROWS * COLUMNS, dtype=torch.int64),
    ):
        first, second = sent([memory[1:], memory[:9]])
        first[0] = 77
        assert second[1] == 77


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_private_mapping_is_the_reader_s_own(file: Path, kind: str) -> None:
    mapped: Any = np.memmap(file, np.int64, "c")
    if kind == "tensor":
        mapped = torch.from_file(str(file), shared=False, size=mapped.size, dtype=torch.int64)
    pickled = dump(mapped, "x", HERE)
    first, second = load(pickled), load(pickled)
    first[0] = -1
    assert (second[0], mapped[0], np.fromfile(file, np.int64, 1)[0]) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_what_was_written_to_a_private_mapping_is_sent(file: Path, kind: str) -> None:
    mapped: Any = np.memmap(file, np.int64, "c")
    if kind == "tensor":
        mapped = torch.from_file(str(file), shared=False, size=mapped.size, dtype=torch.int64)
    before = dump(mapped, "x", HERE)
    mapped[3] = -3
    pickled = dump(mapped, "x", HERE)
    assert pickled.digest != before.digest
    assert load(pickled)[:5].tolist() == [0, 1, 2, -3, 4]


def test_a_file_larger_than_the_memory_is_neither_read_nor_sent(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as opened:
        opened.truncate(1 << 38)
    mapped = [np.memmap(path, np.uint16, mode) for mode in ("r", "r+")]
    mapped[1][-1] = 7
    pickled = dump(mapped, "x", HERE)
    assert pickled.size_bytes < REFERENCE_BYTES
    assert pickled.digest
    assert [array[-1] for array in load(pickled)] == [7, 7]


def test_small_and_empty_ones(tmp_path: Path) -> None:
    np.arange(3).tofile(tmp_path / "small")
    small = np.memmap(tmp_path / "small", np.int64, "r+")
    found = sent(small)
    small[1] = 8
    assert found.tolist() == [0, 8, 2]
    assert sent([small[:0], torch.zeros(0, 3).share_memory_()])[0].shape == (0,)


def test_a_file_without_a_name_and_one_in_its_place(file: Path) -> None:
    mapped = np.memmap(file, np.int64, "r+")
    size = ROWS * COLUMNS
    private = torch.from_file(str(file), shared=False, size=size, dtype=torch.int64)
    before = dump(mapped, "x", HERE)
    file.with_name("new").write_bytes(bytes(mapped.nbytes))
    file.with_name("new").replace(file)
    with pytest.raises(NodeDataError, match=f"{file}.*another file is at its path"):
        load(before)
    with pytest.raises(SerializationError, match="would write to copies"):
        dump(mapped, "x", HERE)
    assert load(dump(private, "x", HERE))[:2].tolist() == [0, 1]


def test_a_file_that_became_shorter_is_not_mapped(file: Path) -> None:
    pickled = dump(np.memmap(file, np.int64, "r"), "x", HERE)
    os.truncate(file, 100)
    with pytest.raises(NodeDataError, match="the file here has 100 bytes"):
        load(pickled)


def test_another_node_maps_its_own_file_of_the_same_size(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = dump(np.memmap(file, np.int64, "r"), "x", ELSEWHERE)
    monkeypatch.setattr("dpex.wire.mapped_files.machine", lambda: "another")
    content = file.read_bytes()
    file.with_name("copy").write_bytes(content)
    file.with_name("copy").replace(file)
    assert load(pickled)[7] == 7
    file.write_bytes(content + b"more")
    with pytest.raises(NodeDataError, match=f"{file}.*has {len(content) + 4:,} bytes"):
        load(pickled)
    file.unlink()
    with pytest.raises(NodeDataError, match=f"{file}.* on node {os.uname().nodename}.*No such"):
        load(pickled)


def test_tables_on_a_mapped_file(tmp_path: Path) -> None:
    names = [f"name {row}" for row in range(1 << 16)]
    table = pa.table({"row": np.arange(1 << 16), "name": names})
    with pa.ipc.new_file(tmp_path / "table", table.schema) as writer:
        writer.write_table(table, max_chunksize=1 << 12)
    mapped = pa.ipc.open_file(pa.memory_map(str(tmp_path / "table"))).read_all()
    pickled = dump(mapped.slice(100), "x", HERE)
    assert pickled.size_bytes < table.nbytes // 10
    assert load(pickled).equals(table.slice(100))


def test_mmap_keeps_its_position(file: Path) -> None:
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 5_000, offset=mmap.PAGESIZE)
    mapped.seek(6)
    found = sent(mapped)
    found[3] = 3
    assert (found.tell(), len(found), mapped[3]) == (6, 5_000, 3)


class Noted(torch.Tensor):
    pass


@pytest.fixture
def named() -> Iterator[SharedMemory]:
    shared = SharedMemory(create=True, size=100)
    yield shared
    shared.close()
    shared.unlink()


def shared_tensor(strategy: str) -> torch.Tensor:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        return torch.zeros(3).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.inner = [attributes]


@pytest.mark.parametrize("readers", [HERE, ELSEWHERE], ids=["here", "elsewhere"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: shared_tensor("file_descriptor"),
        lambda: shared_tensor("file_system"),
        lambda: torch.zeros(4, requires_grad=True).share_memory_(),
        lambda: torch.nn.Parameter(torch.zeros(4)).share_memory_(),
        lambda: torch.zeros(4).share_memory_().as_subclass(Noted),
        lambda: torch.zeros(4).share_memory_().untyped_storage(),
        lambda: np.frombuffer(multiprocessing.RawArray("d", 3)),
        lambda: multiprocessing.Array("d", 3),
        lambda: multiprocessing.RawValue("d"),
        lambda: multiprocessing.get_context("spawn").Value("i", 7),
        lambda: multiprocessing.Lock(),
        lambda: multiprocessing.Event(),
        lambda: multiprocessing.Barrier(2),
        lambda: multiprocessing.Condition(),
        lambda: multiprocessing.Semaphore(2),
        lambda: np.frombuffer(mmap.mmap(-1, 4096), np.uint8),
    ],
)
def test_shared_memory_is_refused(make: Callable[[], Any], readers: Readers) -> None:
    with pytest.raises(
        SerializationError, match=r"^x\.inner\[0\]\['memory'\].*head_address='processes'"
    ):
        dump(Holder(memory=make()), "x", readers)


def test_shared_memory_with_a_name_is_refused(named: SharedMemory) -> None:
    for memory in (named, np.ndarray((10,), np.uint8, named.buf)):
        with pytest.raises(SerializationError, match="head_address='processes'"):
            dump(memory, "x", HERE)


def test_other_nodes_read_a_copy_of_shared_memory_that_is_only_readable() -> None:
    array = np.frombuffer(multiprocessing.RawArray("d", [1, 2, 3]))
    array.flags.writeable = False
    with pytest.warns(UserWarning, match=r"^dpex: x\.inner\[0\]\['memory'\] is in memory"):
        pickled = dump(Holder(memory=array), "x", ELSEWHERE)
    assert load(pickled).inner[0]["memory"].tolist() == [1, 2, 3]


def test_batches_and_systems_without_proc_have_content(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [np.memmap(file, np.int64, "r+"), torch.zeros(1 << 12).share_memory_()]
    for readers in (None, HERE):
        if readers is not None:
            monkeypatch.setattr("dpex.wire.mapped_memory.spans", _no_proc)
        array, tensor = load(dump(batch, "x", readers))
        array[0], tensor[0] = 5, 5
        assert (batch[0][0], batch[1][0]) == (0, 0)


def _no_proc(*_: Any) -> Any:
    raise FileNotFoundError("/proc/self/maps")


# --- with worker processes ------------------------------------------------------------------------


@pytest.mark.usefixtures("shared_ray")
def test_batches_on_a_mapped_file_are_the_training_loop_s_own(file: Path) -> None:
    class Rows(Dataset[Any]):
        def __init__(self) -> None:
            self.rows = np.memmap(file, np.int64, "r+").reshape(ROWS, COLUMNS)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return self.rows[index]

    for batch in DpexDataLoader(Rows(), 1, num_workers=1, distribute_mode=True, collate_fn=list):
        assert batch[0].flags.writeable
        batch[0][:] = -1
    assert np.fromfile(file, np.int64, 5).tolist() == [0, 1, 2, 3, 4]


def outcomes(cluster: Cluster, file: Path) -> Any:
    arguments = ("cluster", cluster.address, str(file))
    options: dict[str, Any] = {"place": cluster.place, "seconds": PROGRAM_SECONDS}
    done = run_program(PROGRAM, *arguments, **options, **cluster.variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.extended
@pytest.mark.multiprocess
def test_nodes_map_files_and_refuse_memory() -> None:
    with workplace() as place:
        file = place / "files" / "numbers"
        file.parent.mkdir()
        np.arange(ROWS * COLUMNS, dtype=np.int64).tofile(file)
        cluster = Cluster(place)
        cluster.add("--num-cpus=2", "--node-ip-address=127.0.0.2")
        found = outcomes(cluster, file)
    second = ROWS * COLUMNS // 8
    assert found["mapped"] == [[[0, 1], [second, second + 1]], []]
    assert found["tensor"].startswith("SerializationError: loader.dataset.rows (of type torch.Te")
    assert found["fixed"][0] == [0, 0]
    assert found["fixed"][1][0].startswith("dpex: loader.dataset.rows is in memory that")
    assert len(found["stream"][0]) == 2
    assert found["stream"][1] == []
    assert "persistent_workers=False" in found["persistent stream"]


@pytest.mark.extended
@pytest.mark.multiprocess
def test_a_node_without_the_file_names_itself_and_the_file() -> None:
    with workplace() as place:
        file = place / "files" / "numbers"
        file.parent.mkdir()
        np.arange(ROWS * COLUMNS, dtype=np.int64).tofile(file)
        cluster = Cluster(place)
        cluster._start(
            *(f"--address={cluster.address}", "--num-cpus=2", "--node-ip-address=127.0.0.2"),
            under=hiding(file.parent),
        )
        error = outcomes(cluster, file)["mapped"]
        assert error.startswith("NodeDataError: ")
        assert "node 127.0.0.2" in error
        assert str(file) in error
        assert "No such file" in error
