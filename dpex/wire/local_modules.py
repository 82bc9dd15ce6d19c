"""The user's own modules: modules that belong to no installed distribution.

Worker processes run the version of each module that the training process runs, whatever is in its
file meanwhile. A process that imports a module gets the source that the file had when dpex first
saw the module. If this process does not run that source, its code goes by value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from dpex.wire.machine import process_start

__all__ = [
    "SCRIPTS",
    "by_value",
    "changed",
    "installed_roots",
    "sources",
    "users_modules",
]


@dataclass(frozen=True)
class _Version:
    """Version of a module, as this process had it when ``changed`` first saw it.

    Attributes:
        spec: The module's spec. A reload gives the module a new spec.
        code: The code of its functions and classes; see ``_code_in``.
        file: Path of its source file.
        source: The content of its source file, if it can be read.
        differs: Whether the module already had other code than its file.
    """

    spec: Any
    code: dict[str, Any]
    file: str
    source: bytes | None
    differs: bool


SCRIPTS = ("__main__", "__mp_main__")
"""Names of the script as a module."""
# ``torch.compile`` adds functions with these names to the module of a function that it compiles.
_OF_TORCH_COMPILE = ("__compiled_fn_", "__resume_at_")
_seen: dict[str, _Version] = {}
# Modules that are known not to be the user's own.
_others: dict[str, ModuleType] = {}


def changed() -> list[str]:
    """Return the modules whose code in this process a worker process cannot get by an import.

    The user may have reloaded a module, edited it in a notebook, or assigned another function or
    class to a name in it. Or the user edited its file between its import and the first ``iter()``.
    A rewritten file alone is no change: worker processes import the recorded source.
    """
    found = []
    for name, module in users_modules():
        then = _first_version(name, module)
        if (
            then.differs
            or module.__spec__ is not then.spec
            or _code_in(vars(module), f"{module.__name__}.") != then.code
        ):
            found.append(name)
    return found


def sources() -> dict[str, tuple[str, bytes]]:
    """Return the file and the recorded source of each module, for processes that import it."""
    return {
        name: (then.file, then.source)
        for name, then in _seen.items()
        if then.source is not None and not then.differs
    }


def _first_version(name: str, module: ModuleType) -> _Version:
    if name not in _seen:
        _seen[name] = _version_of(module)
    return _seen[name]


def _version_of(module: ModuleType) -> _Version:
    file = module.__file__ or ""
    code = _code_in(vars(module), f"{module.__name__}.")
    source, differs = None, _is_patched(code)
    with contextlib.suppress(OSError):  # for example a file in an archive
        source = Path(file).read_bytes()
        # To compile all files of a large project takes a second.
        if Path(file).stat().st_mtime > process_start():
            differs = differs or not _has_code(source, file, code)
    return _Version(module.__spec__, code, file, source, differs)


def _is_patched(code: dict[str, Any]) -> bool:
    """Return whether the script has assigned its own functions or classes to names in a module."""
    for first, second in code.values():
        if isinstance(first, CodeType):
            found = second in SCRIPTS
        else:
            found = first.partition(".")[0] in SCRIPTS or bool(second and _is_patched(second))
        if found:
            return True
    return False


def _has_code(source: bytes, file: str, code: dict[str, Any]) -> bool:
    """Return whether a file's source contains all code that a module has from this file."""
    try:
        pending: list[Any] = [compile(source, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return False
    found = set()
    while pending:
        value = pending.pop()
        if isinstance(value, CodeType):
            found.add(value)
            pending += value.co_consts
    return found.issuperset(c for c in _code_objects(code) if c.co_filename == file)


def _code_objects(code: Any) -> Iterator[CodeType]:
    """Yield the code objects in a result of ``_code_in``."""
    if isinstance(code, CodeType):
        yield code
    elif isinstance(code, dict | tuple):
        for part in code.values() if isinstance(code, dict) else code:
            yield from _code_objects(part)


def users_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the name and the content of each module of the user's, except the script."""
    for name, module in list(sys.modules.items()):
        if _others.get(name) is module:
            continue  # nearly every module; each iter() runs this loop
        file = getattr(module, "__file__", None)
        if not (file and isinstance(module, ModuleType)) or name in SCRIPTS:
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
    own = {n: value for n, value in list(names.items()) if not n.startswith(_OF_TORCH_COMPILE)}
    code = {name: _code_of(value, place) for name, value in own.items()}
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


_registering = threading.RLock()


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """Pickle functions and classes of the user's own modules by value in this context.

    This applies to the modules that are imported when the context begins. One thread at a time is
    in such a context, because cloudpickle's registry is global.
    """
    with _registering:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [module for name, module in users_modules() if name not in known]
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
