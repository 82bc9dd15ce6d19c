"""Digests of the code of modules: source files for the user's, versions for installed ones."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import xxhash

from dpex.wire.local_modules import installed_roots
from dpex.wire.machine import process_start

__all__ = ["code_behind", "imports_in"]

# The script is pickled by value. `dpex` and `dpex.cluster` do not make samples.
_LEFT_OUT = {"__main__", "__mp_main__", "dpex", "dpex.cluster"}


def code_behind(names: Iterable[str]) -> list[tuple[str, bytes]]:
    """Return digests of the code of modules and of their imports, sorted by name.

    A module of the user or of dpex is represented by a digest of its source file, or of the archive
    that contains it. The search then follows all imports in the source, loaded or not, and the
    modules of the values in the module's variables.

    An installed module is represented by the versions of its distribution and of all its
    requirements, with digests of their file lists. A module in ``names`` also adds a digest of its
    source file.

    A file that changed after this process started has a different digest every time.

    Args:
        names: Names of the modules.
    """
    named = frozenset(names)
    found: dict[str, bytes] = {}
    versions: dict[str, str] = {}
    roots = installed_roots()
    pending, seen = set(named), set(_LEFT_OUT)
    while pending:
        name = pending.pop()
        top, parent = name.partition(".")[0], name.rpartition(".")[0]
        if name in seen or parent == "dpex.cluster":
            continue
        seen.add(name)
        file = _file_of(name)
        if file is None and parent:  # not a module, or a module without a file
            pending.add(parent)
            continue
        if top in sys.stdlib_module_names and (file is None or _is_standard(file, roots)):
            continue
        installed = top != "dpex" and (file is None or _is_below(file, roots))
        distributions = _distributions_of(top) if installed else ()
        if file is not None and not distributions:
            found[name] = _digest(file)
            pending |= {*imports_in(file, name), *_in_variables(name)}
            if parent and top != "dpex":
                pending.add(parent)
            continue
        if file is not None and name in named and file.is_file():
            found[name] = _digest(file)
        for distribution in distributions:
            _add_versions(distribution, versions)
    return sorted([*found.items(), *((f"{n}==", v.encode()) for n, v in versions.items())])


def imports_in(file: Path, module: str) -> set[str]:
    """Return the names in the import statements of a source file, also inside functions.

    Args:
        file: The source file.
        module: Name of its module, which relative imports start from.

    Returns:
        Names of modules, and of imported attributes, which may be modules too. The set is empty if
        the file cannot be read or is not Python.
    """
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            try:
                base = importlib.util.resolve_name(base, package)
            except ImportError:  # beyond the top-level package: this import always fails
                continue
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def _in_variables(module: str) -> Iterator[str]:
    """Yield the modules of all values in a loaded module's variables, imported or assigned."""
    variables = getattr(sys.modules.get(module), "__dict__", {})
    for value in list(variables.values()):
        kind = type(value)  # not isinstance(), which asks for __class__: a proxy may refuse
        try:
            if issubclass(kind, ModuleType):
                name = value.__name__
            else:
                name = (value if issubclass(kind, FunctionType | type) else kind).__module__
        except Exception:  # a proxy may refuse this too
            continue
        if type(name) is str:
            yield name


def _file_of(module: str) -> Path | None:
    """Return a module's file, or None if it has none, without importing the module."""
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        if not isinstance(file, str):
            return None
        # A module that no import created, such as torch.ops, may name a file that does not exist.
        made_by_hand = getattr(sys.modules[module], "__spec__", None) is None
        return None if made_by_hand and _on_disk(Path(file)) is None else Path(file)
    spec = _spec_of(module)
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _places_of(package: str) -> list[str] | None:
    """Return the search path of a package, or None if the name is not a package."""
    if package in sys.modules:
        found = getattr(sys.modules[package], "__path__", None)
    else:
        spec = _spec_of(package)
        found = spec and spec.submodule_search_locations
    return None if found is None else list(found)


def _spec_of(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module that is not loaded, or None if there is no such module."""
    parent = module.rpartition(".")[0]
    places = _places_of(parent) if parent else None
    if parent and places is None:
        return None
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next(filter(None, (find(module, places, None) for find in finders if find)), None)


def _is_below(file: Path, roots: list[Path]) -> bool:
    return any(root in file.resolve().parents for root in roots)


def _is_standard(file: Path, roots: list[Path]) -> bool:
    """Return whether a file is in the standard library; a user's module may have the same name."""
    return _is_below(file, roots) and {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _on_disk(file: Path) -> Path | None:
    """Return a file, the archive that contains it, or None if neither exists."""
    return next(filter(os.path.isfile, (file, *file.parents)), None)


def _digest(file: Path) -> bytes:
    """Return the digest of a file, or of the archive that contains it."""
    place = _on_disk(file) or file
    try:
        state = place.stat()
        if state.st_mtime <= process_start():
            return _digest_of(place, state.st_ctime_ns)
    except OSError:
        pass
    return uuid.uuid4().bytes  # the process may have imported the file's old content


@functools.cache
def _digest_of(file: Path, changed_ns: int) -> bytes:
    """Return the digest of a file, cached until its change time differs."""
    return xxhash.xxh3_128(file.read_bytes()).digest()


@functools.cache
def _distributions_of(top: str) -> tuple[str, ...]:
    """Return the distributions that a top-level module may belong to."""
    try:
        found = importlib.metadata.distribution(top)
        if "Name" in found.metadata:  # the leftovers of a removed distribution have no name
            return (found.name,)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pass
    return tuple(filter(None, _all_distributions().get(top, ())))


@functools.cache
def _all_distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())  # takes 0.5 s


def _add_versions(distribution: str, versions: dict[str, str]) -> None:
    """Add the versions of a distribution and of its installed requirements to ``versions``."""
    name = re.sub(r"[-_.]+", "-", distribution).lower()
    if name in versions:
        return
    of_that_name = importlib.metadata.distributions(name=distribution)
    found = next((found for found in of_that_name if "Version" in found.metadata), None)
    if found is None:
        return
    # The same version can be rebuilt from different sources, so hash the file list too.
    record = xxhash.xxh3_128((found.read_text("RECORD") or "").encode()).hexdigest()
    versions[name] = f"{found.version} {record}"
    for requirement in found.requires or ():
        required = re.match(r"[\w.-]+", requirement)
        if required and "extra ==" not in requirement:
            _add_versions(required[0], versions)
