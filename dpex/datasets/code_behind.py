"""The code behind modules: the sources of the user's own, the builds of what is installed."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import xxhash

from dpex.wire.local_modules import installed_roots

__all__ = ["code_behind", "imports_in"]

# What runs is pickled by value; what does not make samples.
_LEFT_OUT = {"__main__", "__mp_main__", "dpex", "dpex.cluster"}


def code_behind(names: Iterable[str]) -> list[tuple[str, bytes]]:
    """Return what stands for the code of modules and of what they import, by name and in order.

    Of a module that is of no installed distribution, or is dpex's, that is a digest of its source,
    or of the archive that it is in; what is imported anywhere in its source, or lies in its
    variables, is looked at in turn, whether it is loaded or not. Of an installed one it is the
    version of its distribution and of all that it requires, with a digest of the lists of their
    files, and one of the source of those that are named. A file that was written to since this
    process began is another one every time.

    Args:
        names: Of the modules.
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
        if file is None and parent:  # no module, or one without code of its own
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
    """Return what import statements of a source name, also those inside of functions.

    Args:
        file: The source.
        module: Its name, for relative imports.

    Returns:
        Names of modules, and of what may be modules or be in one; none of what is no Python.
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
            except ImportError:  # beyond the package: it is never run
                continue
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def _in_variables(module: str) -> Iterator[str]:
    """Yield the modules of what lies in a loaded module's variables, however it came there."""
    variables = getattr(sys.modules.get(module), "__dict__", {})
    for value in list(variables.values()):
        kind = type(value)  # not isinstance(), which asks for __class__: a proxy may refuse
        try:
            if issubclass(kind, ModuleType):
                name = value.__name__
            else:
                name = (value if issubclass(kind, FunctionType | type) else kind).__module__
        except Exception:  # it refuses that too
            continue
        if type(name) is str:
            yield name


def _file_of(module: str) -> Path | None:
    """Return a module's file, if it has one; nothing is imported for that."""
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        if not isinstance(file, str):
            return None
        # Some that no import made name a file that is none, such as torch.ops.
        made_by_hand = getattr(sys.modules[module], "__spec__", None) is None
        return None if made_by_hand and _on_disk(Path(file)) is None else Path(file)
    parent = module.rpartition(".")[0]
    places = _places_of(parent) if parent else None
    spec = None if parent and places is None else _spec(module, places)
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _places_of(package: str) -> list[str] | None:
    """Return where a package's modules are; None if it is no package."""
    if package in sys.modules:
        found = getattr(sys.modules[package], "__path__", None)
    else:
        parent = package.rpartition(".")[0]
        places = _places_of(parent) if parent else None
        spec = None if parent and places is None else _spec(package, places)
        found = spec and spec.submodule_search_locations
    return None if found is None else list(found)


def _spec(module: str, places: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next(filter(None, (find(module, places, None) for find in finders if find)), None)


def _is_below(file: Path, roots: list[Path]) -> bool:
    return any(root in file.resolve().parents for root in roots)


def _is_standard(file: Path, roots: list[Path]) -> bool:
    """Tell whether a file is the standard library's; a module of the user's may have its names."""
    return _is_below(file, roots) and {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _on_disk(file: Path) -> Path | None:
    """Return a file, or the archive that it is in."""
    return next(filter(os.path.isfile, (file, *file.parents)), None)


def _digest(file: Path) -> bytes:
    """Return what stands for a file's contents, or for those of the archive that it is in."""
    place = _on_disk(file) or file
    try:
        state = place.stat()
        if state.st_mtime <= _process_start():
            return _digest_of(place, state.st_ctime_ns)
    except OSError:
        pass
    return uuid.uuid4().bytes  # what was imported may be what it was before


@functools.cache
def _digest_of(file: Path, changed_ns: int) -> bytes:
    """Read a file, again only where it was changed."""
    return xxhash.xxh3_128(file.read_bytes()).digest()


@functools.cache
def _process_start() -> float:
    """Return when this process began, in seconds since the epoch."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
        assert boot is not None
        return int(boot[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AssertionError):  # not Linux: as far as we know
        return time.time()


@functools.cache
def _distributions_of(top: str) -> tuple[str, ...]:
    """Return the distributions that a top-level module may come from."""
    try:
        found = importlib.metadata.distribution(top)
        if "Name" in found.metadata:  # not in what a removed one has left over
            return (found.name,)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pass
    return tuple(filter(None, _all_distributions().get(top, ())))


@functools.cache
def _all_distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())  # half a second


def _add_versions(distribution: str, versions: dict[str, str]) -> None:
    """Note the versions of a distribution and of what is installed of all that it requires."""
    name = re.sub(r"[-_.]+", "-", distribution).lower()
    if name in versions:
        return
    of_that_name = importlib.metadata.distributions(name=distribution)
    found = next((found for found in of_that_name if "Version" in found.metadata), None)
    if found is None:
        return
    # The same version can be built again, of other sources.
    record = xxhash.xxh3_128((found.read_text("RECORD") or "").encode()).hexdigest()
    versions[name] = f"{found.version} {record}"
    for requirement in found.requires or ():
        required = re.match(r"[\w.-]+", requirement)
        if required and "extra ==" not in requirement:
            _add_versions(required[0], versions)
