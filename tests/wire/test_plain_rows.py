"""Tests of large lists of plain rows in the pickle of a dataset."""

from __future__ import annotations

import marshal
import pickle
from collections import namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from dpex import tuning
from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import Pickled, dump, load
from dpex.wire.plain_rows import plain_rows

READERS = Readers(same_host=True)
NUMBER = tuning.PLAIN_ROWS
Pair = namedtuple("Pair", ["path", "label"])


class Kind(IntEnum):
    CAT = 1


class Text(str):
    pass


class Holder:
    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def marshalled(pickled: Pickled) -> list[Any]:
    return [marshal.loads(pickled.buffers[slot].tobytes()) for slot in pickled.parsed_slots]


@pytest.mark.parametrize(
    "row",
    [
        lambda i: (f"image{i}", i % 10),
        lambda i: i,
        lambda i: (i, ("nested", None, -0.0), b"x") if i % 2 else "alone",
        lambda i: (1 << i % 200, i / 7, True, 2j, "\ud800"),
    ],
    ids=["paths", "numbers", "nested", "all types"],
)
def test_plain_rows_arrive_as_they_are(row: Any) -> None:
    rows = [row(i) for i in range(NUMBER)]
    holder = Holder(rows=rows, same=rows, name="x")
    pickled = dump(holder, "loader", READERS)
    assert len(marshalled(pickled)) == 1, "the list is there once"
    loaded = load(pickled)
    assert pickle.dumps(list(map(repr, loaded.rows))) == pickle.dumps(list(map(repr, rows)))
    assert loaded.same is loaded.rows
    loaded.rows.append(None)
    assert loaded.name == "x"


@pytest.mark.parametrize(
    "row",
    [
        Pair("path", 1),
        Kind.CAT,
        Text("path"),
        ("path", np.int64(1)),
        ("path", np.zeros(2)),
        ("path", bytearray(b"x")),
        ["path", 1],
        ("path", [1]),
        {"path": 1},
        (((((1,),),),),),
    ],
    ids=str,
)
def test_other_rows_are_left_to_pickle(row: Any) -> None:
    rows: list[Any] = [("path", 1)] * (NUMBER - 1) + [row]
    assert plain_rows(rows) is None
    pickled = dump(Holder(rows=rows), "loader", READERS)
    assert not pickled.parsed_slots
    last = load(pickled).rows[-1]
    assert type(last) is type(row)
    assert repr(last) == repr(row)


def test_small_lists_and_lists_of_batches_are_left_to_pickle() -> None:
    assert not dump(Holder(rows=[1] * (NUMBER - 1)), "loader", READERS).parsed_slots
    assert not dump(Holder(rows=[1] * NUMBER), "batch").parsed_slots


def test_a_list_that_is_there_twice_stays_one() -> None:
    rows = list(range(NUMBER))
    loaded = load(dump(Holder(rows=rows, splits={"train": rows}), "loader", READERS))
    assert loaded.splits["train"] is loaded.rows


def test_two_holders_of_a_list_share_it() -> None:
    rows = list(range(NUMBER))
    pickled = dump([Holder(rows=rows), Holder(rows=rows)], "loader", READERS)
    assert len(marshalled(pickled)) == 1
    first, second = load(pickled)
    assert first.rows is second.rows


class Restored:
    """An object whose state is a list of its own making, and that restores it itself."""

    def __init__(self) -> None:
        self.rows = list(range(NUMBER))

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rows = state["kept"][::-1]


def test_an_object_s_own_state_reaches_its_setstate() -> None:
    pickled = dump(Restored(), "loader", READERS)
    assert marshalled(pickled) == [list(range(NUMBER))]
    assert load(pickled).rows == list(range(NUMBER))[::-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.__setitem__(5, ("other", 1)),
        lambda rows: rows.__setitem__(5, (rows[5][0], rows[5][1] + 1)),
        lambda rows: rows.__setitem__(slice(0, 2), [rows[1], rows[0]]),
        lambda rows: rows.append(("new", 1)),
        lambda rows: rows.__setitem__(5, [*rows[5]]),
        lambda rows: rows.__setitem__(5, (rows[5][0], float(rows[5][1]))),
    ],
    ids=["a row", "a label", "a swap", "a new row", "a type", "a type in a row"],
)
def test_every_change_is_seen(change: Any) -> None:
    rows: list[Any] = [(f"image{i}", i) for i in range(NUMBER)]
    holder = Holder(rows=rows)
    before = dump(holder, "loader", READERS).digest
    assert dump(holder, "loader", READERS).digest == before
    change(rows)
    assert dump(holder, "loader", READERS).digest != before


def test_a_change_inside_a_row_is_seen() -> None:
    rows: list[Any] = [(f"image{i}", []) for i in range(NUMBER)]
    holder = Holder(rows=rows)
    before = dump(holder, "loader", READERS).digest
    rows[5][1].append(1)
    pickled = dump(holder, "loader", READERS)
    assert pickled.digest != before
    assert load(pickled).rows[5] == ("image5", [1])
