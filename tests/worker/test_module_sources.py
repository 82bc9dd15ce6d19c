"""Tests of imports from the sources that the training process had."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dpex.worker import module_sources


class Folder:
    """A directory on ``sys.path`` with modules under new names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"own_{uuid.uuid4().hex}"

    def write(self, source: str, file: str = "{name}.py") -> Path:
        path = self.path / file.format(name=self.name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return path

    def load(self, *parts: str) -> ModuleType:
        return importlib.import_module(".".join([self.name, *parts]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.setattr(module_sources, "_FINDER", module_sources._Finder())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    folder = Folder(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def test_an_unchanged_file_is_imported_as_usual(folder: Folder) -> None:
    file = folder.write("value = 1")
    module_sources.import_from({folder.name: (str(file), b"value = 1")})
    module = folder.load()
    assert module.value == 1
    assert not isinstance(module.__loader__, module_sources._Loader)


@pytest.mark.parametrize("now", ["value = 2", "value =", None])
def test_an_edited_file_is_imported_as_it_was(now: str | None, folder: Folder) -> None:
    file = folder.write("value = 1")
    if now is None:
        file.unlink()
    else:
        file.write_text(now)
    module_sources.import_from({folder.name: (str(file), b"value = 1")})
    module = folder.load()
    assert module.value == 1
    assert module.__file__ == str(file)


def test_compiled_code_of_the_new_file_is_not_used(folder: Folder) -> None:
    file = folder.write("value = 2")
    assert folder.load().value == 2  # writes the compiled file, unless Python may not
    del sys.modules[folder.name]
    module_sources.import_from({folder.name: (str(file), b"value = 1")})
    assert folder.load().value == 1


def test_a_package_and_its_modules_may_be_edited(folder: Folder) -> None:
    files = {
        folder.name: folder.write("value = 2", "{name}/__init__.py"),
        f"{folder.name}.part": folder.write("value = 2", "{name}/part.py"),
    }
    module_sources.import_from(
        {
            folder.name: (str(files[folder.name]), b"from .part import value"),
            f"{folder.name}.part": (str(files[f"{folder.name}.part"]), b"value = 1"),
        }
    )
    assert folder.load().value == 1
    assert folder.load("part").__package__ == folder.name


def test_another_node_may_have_the_file_elsewhere(folder: Folder) -> None:
    here = folder.write("value = 2")
    module_sources.import_from({folder.name: ("/nowhere/own.py", b"value = 1")})
    module = folder.load()
    assert (module.value, module.__file__) == (1, str(here))
