"""The user's loader: the function that ``--loader`` names is imported and called."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from dpex.dataloader import DpexDataLoader
from dpex.doctor.facts import Fact, Problem

__all__ = ["describe_loader", "length_of", "make_loader"]


def make_loader(target: str) -> DataLoader[Any]:
    """Call the function that a text names, and return the loader that it returns.

    Args:
        target: ``"package.module:function"`` or ``"path/to/file.py:function"``.

    Raises:
        Problem: There is no such function, it raises, or it returns no loader.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise Problem(
            f'--loader must be "package.module:function" or "path/to/file.py:function", got '
            f"{target!r}"
        )
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = [place]  # a script that reads its arguments must not read the doctor's
    module = _of_file(Path(place)) if place.endswith(".py") else _imported(place, place)
    if not hasattr(module, name):
        raise Problem(f"{place} has no function {name!r}")
    function = getattr(module, name)
    if not callable(function):
        raise Problem(
            f"{target} is a {type(function).__name__}. Write a function that returns the loader, "
            'and put the training below `if __name__ == "__main__":`'
        )
    try:
        loader = function()
    except (Exception, SystemExit) as error:
        raise _raised(target, error) from error
    if not isinstance(loader, DataLoader):
        raise Problem(
            f"{target} must return a torch DataLoader or a DpexDataLoader, it returned "
            f"{type(loader).__name__}"
        )
    return loader


def describe_loader(loader: DataLoader[Any], target: str) -> Fact:
    """Return the line about the loader that the user's function made."""
    kind, dataset, length = type(loader), loader.dataset, length_of(loader.dataset)
    text = (
        f"{target}: {kind.__name__} of {type(dataset).__name__}"
        f"{'' if length is None else f' ({length:,} samples)'}, "
        f"batch_size={loader.batch_size}, num_workers={loader.num_workers}"
    )
    if kind.__iter__ not in {DataLoader.__iter__, DpexDataLoader.__iter__}:
        text += f"; the trial does not run {kind.__name__}'s own __iter__"
    return Fact(
        "loader",
        text,
        "loader",
        {
            "function": target,
            "class": kind.__name__,
            "dataset": type(dataset).__name__,
            "length": length,
            "batch_size": loader.batch_size,
            "num_workers": loader.num_workers,
        },
    )


def length_of(dataset: Any) -> int | None:
    """Return the number of a dataset's samples; None if ``len()`` raises any exception."""
    try:
        return len(dataset)
    except Exception:
        return None


def _of_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise Problem(f"there is no file {file}")
    sys.path.insert(0, str(file.resolve().parent))
    module = _imported(file.stem, str(file))
    if module.__file__ is None or not file.samefile(module.__file__):
        raise Problem(f"{file} has the name of another module, {file.stem!r}: rename the file")
    return module


def _imported(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_within(name, error.name or ""):
            raise Problem(
                f"there is no module {error.name!r} in {Path.cwd()} or on Python's path"
            ) from error
        raise _raised(f"the import of {place}", error) from error


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _raised(what: str, error: BaseException) -> Problem:
    text = f"{what} raised {type(error).__name__}: {error}"
    return Problem(text, "".join(traceback.format_exception(error)))
