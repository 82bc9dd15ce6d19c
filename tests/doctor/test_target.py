"""Tests of the function that ``dpex doctor --loader`` names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from dpex.doctor.facts import Problem
from dpex.doctor.target import describe_loader, make_loader

PROGRAM = """
import sys
import {neighbour}
from torch.utils.data import DataLoader

def loader():
    return DataLoader({neighbour}.samples, batch_size=4, num_workers=2)

def arguments():
    assert sys.argv[1:] == [], sys.argv
    return loader()

def nothing(): pass
def raises(): raise KeyError("no such path")
def leaves(): sys.exit(2)
number = 3

if __name__ == "__main__":
    raise AssertionError("the guard does not hold")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory with a program and its neighbour, and enter it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["dpex", "doctor", "--loader", "a:b"])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(tmp_path)
    neighbour = "samples_of_the_doctor"
    (tmp_path / "inner").mkdir()
    for directory in (tmp_path, tmp_path / "inner"):
        (directory / f"{neighbour}.py").write_text("samples = list(range(40))\n")
        (directory / "program_of_the_doctor.py").write_text(PROGRAM.format(neighbour=neighbour))
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        "program_of_the_doctor:loader",
        "program_of_the_doctor.py:loader",
        "inner/program_of_the_doctor.py:loader",
        "inner.program_of_the_doctor:loader",
        "program_of_the_doctor:arguments",
    ],
)
def test_a_module_or_a_file_is_imported_and_its_guard_holds(place: Path, target: str) -> None:
    loader = make_loader(target)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 10
    fact = describe_loader(loader, target)
    assert fact.text == f"{target}: DataLoader of list (40 samples), batch_size=4, num_workers=2"
    assert fact.value["length"] == 40


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("program_of_the_doctor", r"--loader must be .*, got 'program_of_the_doctor'"),
        (":loader", "--loader must be"),
        ("nowhere.at_all:loader", r"no module 'nowhere' in .* or on Python's path"),
        ("inner.nowhere:loader", r"no module 'inner.nowhere' in"),
        ("nowhere.py:loader", r"^there is no file nowhere\.py$"),
        ("program_of_the_doctor:absent", r"^program_of_the_doctor has no function 'absent'$"),
        ("program_of_the_doctor:number", r"^program_of_the_doctor:number is a .* a function that"),
        ("program_of_the_doctor:nothing", r"must return a torch DataLoader .* returned NoneType$"),
        ("program_of_the_doctor:raises", r"raised KeyError: 'no such path'$"),
        ("program_of_the_doctor:leaves", r"raised SystemExit: 2$"),
    ],
)
def test_what_names_no_loader(place: Path, target: str, said: str) -> None:
    with pytest.raises(Problem, match=said):
        make_loader(target)


def test_an_error_of_the_user_s_module_has_its_traceback(place: Path) -> None:
    (place / "broken_program.py").write_text("import not_installed_at_all\n")
    for target in ("broken_program:loader", "broken_program.py:loader"):
        with pytest.raises(
            Problem, match=r"^the import of broken_program.* raised Module"
        ) as raised:
            make_loader(target)
        assert 'broken_program.py", line 1' in raised.value.details


def test_a_file_with_the_name_of_another_module(place: Path) -> None:
    (place / "json.py").write_text("")
    with pytest.raises(Problem, match=r"^json\.py has the name of another module, 'json': rename"):
        make_loader("json.py:loader")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Endless(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


class OwnLoader(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter(())


def test_what_the_trial_leaves_out_is_said() -> None:
    fact = describe_loader(OwnLoader(Stream()), "module:function")
    assert fact.text == (
        "module:function: OwnLoader of Stream, batch_size=1, num_workers=0; the trial does not run "
        "OwnLoader's own __iter__"
    )
    assert fact.value["length"] is None


def test_a_length_that_raises_is_unknown() -> None:
    assert describe_loader(DataLoader(Endless()), "module:function").value["length"] is None
