"""A ``sitecustomize`` that spoils one private name in every process, for dpex's code only.

``DPEX_SPOIL=how=module:Class.name`` gives the name, as in ``PrivateName.path``. With ``hidden``,
dpex does not find the name. With ``raises``, using it raises an error. With ``none``, ``zero``,
``huge`` or ``text``, it has this value, or returns it. With ``never``, a method of Ray Data that
decides about the start of tasks returns False to Ray too, and dpex waits only briefly for a start.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

VALUES = {"none": None, "zero": 0, "huge": 1 << 62, "text": "spoiled"}


def asked_by_dpex() -> bool:
    """Return whether dpex's code, not a test's or Ray's, reads the attribute or calls it."""
    return sys._getframe(2).f_code.co_filename.startswith(package())


@functools.cache
def package() -> str:
    spec = importlib.util.find_spec("dpex")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent) + os.sep


def spoiled(how: str, original: Any) -> Any:
    if how == "hidden":
        raise AttributeError("spoiled: there is no such name")
    if not callable(original) or isinstance(original, type):
        if how == "raises":
            raise RuntimeError("spoiled")
        return VALUES[how]

    def instead(*args: Any, **options: Any) -> Any:
        if not asked_by_dpex():  # the package calls it, because dpex has restored it
            return original(*args, **options)
        if how == "raises":
            raise RuntimeError("spoiled")
        return VALUES[how]

    return instead


class Spoiled:
    """A descriptor in place of a class's attribute, or of an attribute that instances set."""

    def __init__(self, how: str, name: str, original: Any, exists: bool) -> None:
        self.how, self.name, self.original, self.exists = how, name, original, exists

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None and self.kept in instance.__dict__:
            value = instance.__dict__[self.kept]
        elif not self.exists:
            raise AttributeError(self.name)
        else:
            bind = getattr(type(self.original), "__get__", None)
            value = self.original if bind is None else bind(self.original, instance, owner)
        return spoiled(self.how, value) if asked_by_dpex() else value

    @property
    def kept(self) -> str:
        return f"spoiled {self.name}"


class SpoiledOfInstances(Spoiled):
    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.kept] = value


def spoil(how: str, module: ModuleType, path: str) -> None:
    *classes, name = path.split(".")
    owner: Any = module
    for part in classes:
        owner = getattr(owner, part)
    if isinstance(owner, type):
        original = owner.__dict__.get(name, getattr(owner, name, None))
        exists = hasattr(owner, name)
        kind = Spoiled if exists else SpoiledOfInstances
        setattr(owner, name, kind(how, name, original, exists))
        return
    base = type(owner)

    def read(self: Any, wanted: str) -> Any:
        value = base.__getattribute__(self, wanted)
        return spoiled(how, value) if wanted == name and asked_by_dpex() else value

    def write(self: Any, changed: str, value: Any) -> None:
        if changed == name and isinstance(value, type(VALUES.get(how))):
            value = original  # dpex restores the spoiled value
        base.__setattr__(self, changed, value)

    original = getattr(owner, name, None)
    owner.__class__ = type(base.__name__, (base,), {"__getattribute__": read, "__setattr__": write})
    copyreg.pickle(owner.__class__, lambda spoiled: (importlib.import_module, (spoiled.__name__,)))


def refuse(module: ModuleType, path: str) -> None:
    owner, _, name = path.partition(".")
    setattr(getattr(module, owner), name, lambda *_: False)


def shorten(tuning: Any) -> None:
    tuning.TASKS_START_S, tuning.CLUSTER_LOOK_S = 1.0, 0.1


class Finder(importlib.abc.MetaPathFinder):
    """An import hook that spoils the name as soon as its module has been imported."""

    def __init__(self, module: str, then: Callable[[ModuleType], None]) -> None:
        self.module, self.then, self.done = module, then, False

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != self.module or self.done:
            return None
        self.done = True
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main() -> None:
    how, _, name = os.environ.get("DPEX_SPOIL", "").partition("=")
    if name:
        module, _, path = name.partition(":")
        if how == "never":
            sys.meta_path.insert(0, Finder(module, lambda found: refuse(found, path)))
            sys.meta_path.insert(0, Finder("dpex.tuning", shorten))
        else:
            sys.meta_path.insert(0, Finder(module, lambda found: spoil(how, found, path)))


main()
