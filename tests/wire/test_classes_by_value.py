"""Tests of classes that are pickled by value."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace

from dpex.wire.classes_by_value import class_keys, remember
from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import dump, dump_in_band, load

HERE = Readers(same_host=True)


class Registry(type):
    """A metaclass that refuses a second class of a name."""

    names: dict[str, type] = {}  # noqa: RUF012 - the test's classes share it

    def __init__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> None:
        super().__init__(name, bases, content)
        assert Registry.names.setdefault(name, cls) is cls, "already registered"


@pytest.mark.parametrize("readers", [None, HERE], ids=["batch", "dataset"])
def test_a_class_is_not_defined_again_where_it_exists(readers: Readers | None) -> None:
    class Registered(metaclass=Registry):
        pass

    try:
        assert load(dump([Registered], "x", readers)) == [Registered]
        assert type(load(dump(Registered(), "x", readers))) is Registered
    finally:
        del Registry.names["Registered"]


def test_a_batch_does_not_change_a_class_that_the_reader_has_but_a_dataset_does() -> None:
    class Counted:
        made = 1

    batch, dataset = dump(Counted(), "batch"), dump(Counted(), "dataset", HERE)
    Counted.made = 2
    load(batch)
    assert Counted.made == 2
    load(dataset)
    assert Counted.made == 1


def has_key(kind: type) -> bool:
    """Return whether a class has had a key before this call, which gives it one."""
    keys = class_keys()
    pickled = dump_in_band(kind, "batch")
    return any(key.encode() in pickled for key in keys)


def test_the_script_s_classes_have_keys_before_a_fork() -> None:
    class Unnamed:
        pass

    Unnamed.__module__ = "__main__"
    remember()
    assert has_key(Unnamed)


def in_script(kind: Any) -> Any:
    kind.__module__, kind.__qualname__ = "__main__", kind.__name__
    return kind


def named_tuple() -> Any:
    class Pair(NamedTuple):
        one: int

    return in_script(Pair)(1)


def with_slots() -> Any:
    one = in_script(type("Slotted", (), {"__slots__": ("one",)}))()
    one.one = 1
    return one


def with_dict() -> Any:
    one = in_script(type("Plain", (), {"many": [1, 2]}))()
    one.one = 1
    return one


def shown(obj: Any) -> list[Any]:
    return [type(obj).__qualname__, isinstance(obj, tuple), hasattr(obj, "__dict__"), obj.one]


@pytest.mark.parametrize("make", [named_tuple, with_slots, with_dict])
def test_another_process_defines_a_class_with_its_attributes_and_slots(
    make: Callable[[], Any],
) -> None:
    obj = make()
    program = (
        "import json, pickle, sys; obj = pickle.load(sys.stdin.buffer); print(json.dumps("
        "[type(obj).__qualname__, isinstance(obj, tuple), hasattr(obj, '__dict__'), obj.one]))"
    )
    read = subprocess.run(
        [sys.executable, "-c", program],
        input=dump_in_band(obj, "batch"),
        capture_output=True,
        check=True,
    ).stdout
    assert json.loads(read) == shown(obj)


def test_forked_workers_use_the_script_s_classes() -> None:
    with workplace() as place:
        done = run_program(PROGRAMS / "registry_program.py", place=place, seconds=PROGRAM_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 10, 20, 30]", "[0, 20, 40, 60]"] * 2
