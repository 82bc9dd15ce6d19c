"""Tests of the block format: batches to one Arrow row or to a message, and back."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dpex import tuning
from dpex.errors import SerializationError
from dpex.protocol.chunks import Entry
from dpex.wire.block_format import Block, BlockWriter, decode, read_block
from dpex.wire.pickling import Pickled, dump, dump_in_band, load
from dpex.wire.segments import SegmentReader
from dpex.wire.timings import Costs

Point = namedtuple("Point", "x y")
ThroughBlock = Callable[..., list[Any]]


@pytest.fixture(params=["stored", "message"])
def through_block(request: Any, monkeypatch: pytest.MonkeyPatch) -> ThroughBlock:
    """Return a function that writes values to a block, copies it as bytes, and decodes it."""
    monkeypatch.setattr(tuning, "SMALL_BYTES", 1 << 30)

    def copied(writer: BlockWriter) -> Block:
        if request.param == "message":
            message = writer.message()
            assert message is not None
            return read_block(message)
        sink = pa.BufferOutputStream()
        table = writer.table()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return read_block(pa.ipc.open_stream(sink.getvalue()).read_all())

    def through_block(*values: Any) -> list[Any]:
        writer = BlockWriter("run", 3)
        for number, value in enumerate(values):
            writer.add(Entry(number, dump(value, "batch")), Costs(seconds=0.5, samples=2))
        block = copied(writer)
        assert (block.run, block.chunk) == ("run", 3)
        assert block.costs == Costs(seconds=0.5 * len(values), samples=2 * len(values))
        entries = decode(block, SegmentReader(), pin_memory=False)
        return [entry.value for entry in entries]

    return through_block


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1 << 18, (1 << 18) + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_of_every_size_class_come_back(
    size: int, dtype: torch.dtype, through_block: ThroughBlock
) -> None:
    tensor = torch.arange(size).to(dtype)
    (back,) = through_block(tensor)
    assert back.dtype is dtype
    assert torch.equal(back, tensor)
    assert back.is_contiguous()
    back.fill_(0)


def test_tensors_of_one_batch_and_of_one_block_share_no_memory(through_block: ThroughBlock) -> None:
    first, second = through_block(
        [torch.ones(2000), torch.ones(2000)], [torch.ones(2000), torch.ones(2)]
    )
    for tensor in (*first, *second):
        tensor += 1
        assert set(tensor.tolist()) == {2.0}
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_strides_survive_where_memory_is_dense(through_block: ThroughBlock) -> None:
    channels_last = torch.rand(2, 3, 40, 40).contiguous(memory_format=torch.channels_last)
    transposed = torch.rand(50, 60).T
    expanded = torch.rand(1, 60).expand(50, 60)
    back = through_block([channels_last, transposed, expanded])[0]
    assert back[0].stride() == channels_last.stride()
    for value, expected in zip(back, [channels_last, transposed, expanded], strict=True):
        assert torch.equal(value, expected)


def test_a_view_sends_its_own_elements_only(through_block: ThroughBlock) -> None:
    row = torch.arange(1_000_000.0)[5:10]
    assert dump(row, "batch").size_bytes < 2000
    assert torch.equal(through_block(row)[0], row)


def test_what_is_repeated_is_sent_once(through_block: ThroughBlock) -> None:
    rows = torch.arange(5000.0).expand(200, 2, 5000)
    one = torch.rand(()).expand(3000)
    assert dump(rows, "batch").size_bytes < 5000 * 4 + 1000
    for sent, back in zip((rows, one), through_block(rows, one), strict=True):
        assert torch.equal(back, sent)
        assert back.stride() == sent.stride()


def test_arrays_of_files_are_sent_apart(tmp_path: Path, through_block: ThroughBlock) -> None:
    mapped = np.memmap(tmp_path / "tokens", np.uint16, "w+", shape=(100, 500))
    mapped[:] = np.arange(500)
    pickled = dump({"tokens": mapped}, "dataset")
    assert len(pickled.head) < 1000
    assert np.shares_memory(pickled.buffers[0], mapped), "it was copied"
    [back] = through_block(mapped)
    assert type(back) is np.memmap
    assert np.array_equal(back, mapped)


def test_nested_tensors_are_torch_s(through_block: ThroughBlock) -> None:
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)])
    [back] = through_block(nested)
    assert [row.tolist() for row in back.unbind()] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_structure_and_types_survive(through_block: ThroughBlock) -> None:
    value = {
        "point": Point(torch.ones(3), [1, "two", None, b"three"]),
        "array": np.arange(5000, dtype=np.int16).reshape(50, 100),
        "scalar": np.float32(1.5),
        "objects": np.array([{"a": 1}, None], dtype=object),
        "sparse": torch.eye(3).to_sparse(),
    }
    back = through_block(value)[0]
    assert isinstance(back["point"], Point)
    assert back["point"].y == [1, "two", None, b"three"]
    assert np.array_equal(back["array"], value["array"])
    back["array"][0, 0] = 7
    assert type(back["scalar"]) is np.float32
    assert back["objects"][0] == {"a": 1}
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))


def test_the_same_tensor_twice_stays_the_same_tensor(through_block: ThroughBlock) -> None:
    tensor = torch.rand(5000)
    first, second = through_block([tensor, tensor])[0]
    assert first is second


def test_requires_grad_of_a_leaf_survives_and_a_graph_is_refused(
    through_block: ThroughBlock,
) -> None:
    leaf = torch.rand(3, requires_grad=True)
    back = through_block(leaf)[0]
    assert back.requires_grad
    assert back.is_leaf
    with pytest.raises(SerializationError, match="detach"):
        dump(leaf * 2, "batch")


def test_views_that_torch_reduces_itself_come_back(through_block: ThroughBlock) -> None:
    conjugate = torch.rand(1000, dtype=torch.complex64).conj()
    assert torch.equal(through_block(conjugate)[0], conjugate)


def test_empty_batches(through_block: ThroughBlock) -> None:
    assert through_block([], None, "") == [[], None, ""]


class _Fragile:
    def __setstate__(self, state: Any) -> None:
        raise OSError("not here")

    def __init__(self) -> None:
        self.value = 1


def test_a_batch_that_cannot_be_unpacked_is_an_error_in_its_place() -> None:
    writer = BlockWriter("run", 0)
    for number, value in enumerate([1, _Fragile(), 3]):
        writer.add(Entry(number, dump(value, "batch")), Costs())
    first, second, third = decode(read_block(writer.table()), SegmentReader(), pin_memory=False)
    assert (first, third) == (Entry(0, 1), Entry(2, 3))
    assert (second.batch, second.outcome) == (1, "error")
    with pytest.raises(OSError, match="not here"):
        second.value.reraise()


def test_a_writer_is_empty_after_each_block() -> None:
    writer = BlockWriter("run", 0)
    writer.add(Entry(0, dump(torch.ones(5000), "batch")), Costs())
    assert writer.size_bytes > 20_000
    writer.table()
    assert writer.size_bytes == 0
    assert read_block(writer.table()).entries == []


@pytest.mark.parametrize(
    ("batches", "nbytes", "text", "small"),
    [
        (1, 90_000, "", True),
        (1, tuning.SMALL_BYTES, "", False),
        (200, 100, "", True),
        (1, 100, "x" * tuning.SMALL_BYTES, False),
    ],
    ids=["one", "large", "many", "long text"],
)
def test_a_message_carries_a_block_that_is_small_as_a_whole(
    batches: int, nbytes: int, text: str, small: bool
) -> None:
    writer = BlockWriter("run", 0)
    for number in range(batches):
        batch = dump(torch.zeros(nbytes, dtype=torch.uint8), "batch")
        writer.add(Entry(number, batch, left_out=((number, text),)), Costs())
    message = writer.message()
    assert (message is not None) == small
    if message is not None:
        assert len(message) < tuning.SMALL_BYTES
        assert len(read_block(message).entries) == batches
        assert writer.size_bytes == 0, "the writer starts the next block"
    else:
        assert len(read_block(writer.table()).entries) == batches


def test_a_message_names_nothing_of_numpy() -> None:
    """The modules of numpy's arrays have other names in other versions of numpy."""
    writer = BlockWriter("run", 0)
    writer.add(Entry(0, dump(torch.ones(5000), "batch")), Costs())
    message = writer.message()
    assert message is not None
    assert b"numpy" not in message


def test_an_object_that_cannot_travel_is_named_by_its_path() -> None:
    class Dataset:
        def __init__(self) -> None:
            self.files = {"train": [1, threading.Lock()]}

    with pytest.raises(SerializationError, match=r"loader\.files\['train'\]\[1\] \(of type _thr"):
        dump(Dataset(), "loader")


def test_in_band_pickles_are_one_piece() -> None:
    array = np.arange(100_000)
    whole = dump_in_band([array, torch.arange(100_000)], "chunk")
    back = load(Pickled(whole))
    assert np.array_equal(back[0], array)
    assert torch.equal(back[1], torch.arange(100_000))
