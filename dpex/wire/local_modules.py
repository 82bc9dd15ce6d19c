"""The user's own modules: modules that belong to no installed distribution.

A process that lacks such a module, or has another version of it, gets its code by value.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

__all__ = ["by_value", "changed", "installed_roots", "own_modules"]

# Modification time of each module's file and the code in it, when ``changed`` first saw the module.
_seen: dict[str, tuple[float, dict[str, Any]]] = {}
# Modules that are known not to be the user's own.
_others: dict[str, ModuleType] = {}


def changed() -> bool:
    """Return whether a module's code has changed since a worker process may have imported it.

    The code changes if the user reloads the module, edits it in a notebook, or assigns another
    function or class to a name in it. A rewritten file also counts, because a worker process that
    starts later imports the new file.
    """
    found = False
    for name, module in _modules():
        now = _written(module.__file__), _code_in(vars(module), f"{module.__name__}.")
        then = _seen.setdefault(name, now)
        found = found or now != then
    return found


def own_modules() -> set[str]:
    """Return the names of the user's own modules that this process has imported."""
    return {name for name, _ in _modules()}


def _written(file: str | None) -> float:
    try:
        return os.stat(file or "").st_mtime  # noqa: PTH116 - for each module, at every iter()
    except OSError:
        return 0.0


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if _others.get(name) is module:
            continue  # nearly every module; each iter() runs this loop
        file = getattr(module, "__file__", None)
        if not (file and isinstance(module, ModuleType)) or name in ("__main__", "__mp_main__"):
            continue
        if name.partition(".")[0] != "dpex" and _is_local(file):
            yield name, module
        else:
            _others[name] = module


def _code_in(names: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the code of the functions and classes in a namespace.

    Two results are equal if the code is equal, even if the function objects differ.

    Args:
        names: The namespace of a module or a class.
        place: Prefix of the full names of the classes that this module or class defines.
    """
    code = {name: _code_of(value, place) for name, value in list(names.items())}
    return {name: value for name, value in code.items() if value is not None}


def _code_of(value: Any, place: str) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        return value.__code__, value.__module__
    if isinstance(value, type):
        name = f"{value.__module__}.{value.__qualname__}"
        own = name.startswith(place)
        return name, _code_in(vars(value), f"{name}.") if own else None
    return None


@contextmanager
def by_value() -> Iterator[None]:
    """Pickle functions and classes of the user's own modules by value in this context.

    This applies to the modules that are imported when the context begins.
    """
    known = cloudpickle.list_registry_pickle_by_value()
    modules = [module for name, module in _modules() if name not in known]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@functools.cache
def _is_local(file: str) -> bool:
    # Compare names first: to resolve the path of every file that torch imports takes 0.1 s.
    for root in _named_roots():
        if file.startswith(root):
            if _is_link(root + file[len(root) :].partition(os.sep)[0]):
                break
            return False
    path = Path(file).resolve()
    # The __file__ of some modules, such as torch.ops, is not a file.
    # A module may also be in an archive on sys.path.
    source = path.suffix == ".py" and any(p.is_file() for p in (path, *path.parents))
    return source and not any(
        parent in _roots() or path.relative_to(parent).parts[0] in _installed_names(parent)
        for parent in path.parents
    )


@functools.cache
def _installed_names(directory: Path) -> frozenset[str]:
    """Return the names in a directory of ``sys.path`` that belong to installed distributions.

    ``pip install --target`` and PEX install distributions beside the roots.
    """
    if all(Path(path).resolve() != directory for path in sys.path):
        return frozenset()
    records = directory.glob("*.dist-info/RECORD")
    lines = itertools.chain.from_iterable(r.read_text().splitlines() for r in records)
    return frozenset(re.split("[/,]", line)[0] for line in lines)


@functools.cache
def _is_link(path: str) -> bool:
    return Path(path).is_symlink()


@functools.cache
def _roots() -> list[Path]:
    return installed_roots()


@functools.cache
def _named_roots() -> list[str]:
    """Return the roots as paths of modules spell them, resolved or not, longest first."""
    names = {str(path) for path in _directories()} | {str(path) for path in _roots()}
    return [name + os.sep for name in sorted(names, key=len, reverse=True)]


def installed_roots() -> list[Path]:
    """Return the directories of the standard library and of installed distributions."""
    return sorted({path.resolve() for path in _directories()})


def _directories() -> set[Path]:
    paths = sysconfig.get_paths()
    found = {Path(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return found | {Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))}
