"""Tests of arrays and tensors of a dataset that share memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import Pickled, dump, load


class Noted(torch.Tensor):
    pass


def pickled(obj: Any) -> Pickled:
    return dump(obj, "dataset", Readers(True, None))


def tensor_and_slice() -> list[Any]:
    whole = torch.zeros(8)
    return [whole, whole[2:6]]


def slice_before_tensor() -> list[Any]:
    return tensor_and_slice()[::-1]


def overlapping_slices() -> list[Any]:
    whole = torch.zeros(4, 6, dtype=torch.float64)
    return [whole[:3, 1:], whole[1:].t()]


def another_dtype() -> list[Any]:
    whole = torch.zeros(9, dtype=torch.uint8)[1:]
    return [whole, whole.as_strided((1,), (1,))]


def array_and_columns() -> list[Any]:
    whole = np.zeros((5, 4))
    return [whole[:, 3], whole, whole[::-1, :2]]


def fortran_array_and_its_reverse() -> list[Any]:
    whole = np.asfortranarray(np.zeros((3, 4), dtype=np.int16))
    return [whole.T[::-1], whole]


def array_and_its_tensor() -> list[Any]:
    array = np.zeros(4)
    return [array, torch.from_numpy(array)]


def array_and_a_tensor_of_its_slice() -> list[Any]:
    array = np.zeros(40, dtype=np.int32)
    return [torch.from_numpy(array[7:]), array]


def a_gradient_s_tensor() -> list[Any]:
    whole = torch.zeros(6)
    return [whole, whole.detach()[1:].requires_grad_()]


def large() -> list[Any]:
    whole = torch.zeros(3, 5000)
    return [whole[1], whole]


def structured() -> list[Any]:
    whole = np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])
    return [whole, whole["b"]]


def unaligned() -> list[Any]:
    memory = bytearray(64)
    return [
        torch.frombuffer(memory, dtype=torch.float32, offset=2, count=4),
        torch.frombuffer(memory, dtype=torch.uint8),
    ]


def every_second_row_and_the_first_rows() -> list[Any]:
    whole = np.zeros((20, 3))
    return [whole[::4], whole[:3]]


def neighbours() -> list[Any]:
    whole = np.zeros(40)
    return [whole[1:25], whole[24:25], whole[25:30], whole[26:28]]


def fields() -> list[Any]:
    whole = np.zeros(4, [("o", object), ("f", "f8"), ("g", "f8")])
    return [whole["f"], whole["g"]]


def matrix() -> list[Any]:
    whole = np.asmatrix(np.zeros((3, 4)))
    return [np.asarray(whole)[1:], np.asarray(whole)]


def write(obj: Any) -> None:
    """Add one to the first element."""
    if isinstance(obj, np.ndarray) and obj.dtype.names:
        obj["b"][0] += 1
    else:
        with torch.no_grad():
            obj[(0,) * obj.ndim] += 1


def content(objects: list[Any]) -> list[Any]:
    return [obj.tolist() for obj in objects]


@pytest.mark.parametrize(
    "make",
    [
        tensor_and_slice,
        slice_before_tensor,
        overlapping_slices,
        another_dtype,
        array_and_columns,
        fortran_array_and_its_reverse,
        array_and_its_tensor,
        array_and_a_tensor_of_its_slice,
        a_gradient_s_tensor,
        large,
        structured,
        unaligned,
        every_second_row_and_the_first_rows,
        neighbours,
        fields,
        matrix,
    ],
    ids=lambda make: make.__name__,
)
def test_writes_are_seen_where_they_are_in_the_original(make: Callable[[], list[Any]]) -> None:
    original = make()
    for place, obj in enumerate(original):
        write(obj)  # not all elements are zero
        copies = load(pickled(original))
        assert content(copies) == content(original)
        for copied, of in zip(copies, original, strict=True):
            assert (type(copied), copied.dtype) == (type(of), of.dtype)
            assert getattr(copied, "requires_grad", 0) == getattr(of, "requires_grad", 0)
        before = content(original)
        write(copies[place])
        assert content(original) == before, "the copies have their own memory"
        write(obj)
        assert content(copies) == content(original)


def test_read_only_views_stay_read_only() -> None:
    whole = np.arange(6)
    view = whole[1:]
    view.flags.writeable = False
    copied, copied_view = load(pickled([whole, view]))
    assert not copied_view.flags.writeable
    copied[1] = 9
    assert copied_view[0] == 9
    whole.flags.writeable = False
    assert content(load(pickled([whole, view]))) == content([whole, view])


def test_views_of_a_private_map_of_a_file_share_their_writes(tmp_path: Path) -> None:
    np.arange(40.0).tofile(tmp_path / "numbers")
    whole = np.memmap(tmp_path / "numbers", dtype="f8", mode="c")
    whole[0] = 5
    copied, view = load(pickled([np.asarray(whole), np.asarray(whole)[1:]]))
    copied[1] = 7
    assert view.tolist() == [7, *range(2, 40)]


def test_a_default_device_changes_nothing() -> None:
    original = tensor_and_slice()
    with torch.device("meta"):
        one = pickled(original)
    assert content(load(one)) == content(original)


def test_columns_are_pickled_without_the_other_columns() -> None:
    matrix = np.zeros((1000, 1000))
    one = pickled([matrix[:, 0], matrix[:, 1]])
    assert one.size_bytes < 2 * 8000 + 2000
    matrix[5, 50] = 1
    assert pickled([matrix[:, 0], matrix[:, 1]]).digest == one.digest


def test_slices_that_share_no_element_are_pickled_without_the_rest() -> None:
    whole = torch.zeros(1000, 1000)
    assert pickled([whole[3], whole[9]]).size_bytes < 2 * 4000 + 2000
    array = np.zeros((1000, 1000))
    assert pickled([array[3], array[9]]).size_bytes < 2 * 8000 + 2000
    assert pickled([array[3:5], array[4:6]]).size_bytes < 3 * 8000 + 2000


def test_tensors_that_share_memory_keep_their_attributes() -> None:
    whole: Any = torch.zeros(8)
    part: Any = whole[2:6]
    whole.tag, part.tag = "whole", "part"
    read = load(pickled([whole, part]))
    assert [tensor.tag for tensor in read] == ["whole", "part"]
    read[1][0] = 5
    assert read[0][2] == 5


def test_a_storage_shares_its_memory_with_its_tensors() -> None:
    tensor = torch.arange(8, dtype=torch.uint8)[1:]
    noted = torch.arange(3.0).as_subclass(Noted)
    read, storage, one, other = load(
        pickled([tensor, tensor.untyped_storage(), noted[:2], noted[1:]])
    )
    assert storage.tolist() == list(range(8)), "all bytes of the storage, and no other"
    storage[3] = 9
    assert read[2] == 9
    assert type(one) is type(other) is Noted
    one[1] = 7
    assert other[0] == 7
