"""Classes that are pickled by value, each of which a process defines once.

cloudpickle's reduction defines the class again for every pickle, even in a process that has it, and
then discards the second definition. A metaclass or an ``__init_subclass__`` that keeps a registry
sees both, and may refuse the second one. So dpex gives each class a key, and looks for the key
first. A fork of the training process has the classes with their keys.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from dpex.wire.local_modules import SCRIPTS, users_modules

__all__ = ["class_keys", "reduce_class", "remember"]

_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_keys: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
# Keys of the classes that are defined here, but do not have their attributes yet.
_unfilled: set[str] = set()


def remember() -> None:
    """Give keys to classes of the script and the user's modules before this process forks.

    Classes with names in the script need no key; see ``share_script``. To look at all classes of a
    process takes 9 ms: the last fork has write-protected their pages, and Python counts references
    there.
    """
    modules = {*SCRIPTS, *(name for name, _ in users_modules())}
    pending, seen = [object], {object}
    while pending:
        for kind in type.__subclasses__(pending.pop()):
            if kind not in seen:
                seen.add(kind)
                pending.append(kind)
                if kind.__module__ in modules:
                    _key_of(kind)


def class_keys() -> list[str]:
    """Return the keys of this process's classes, which differ from process to process."""
    return list(_classes.keys())


def reduce_class(kind: type, reduced: Any, *, overwrite: bool) -> Any:
    """Return the reduction of a class as ``__reduce__`` does.

    Args:
        kind: The class.
        reduced: cloudpickle's reduction of it. One that only names the class stays as it is.
        overwrite: Whether a process that has the class gives it the attributes that it has here.
    """
    match reduced:
        case (build, arguments, state, None, None, fill):
            arguments = _with_slots(kind, arguments)
            state = _with_qualname(kind, state)
            key = _key_of(kind)
            return (
                _define,
                (key, build, arguments),
                (key, fill, state, overwrite),
                None,
                None,
                _fill,
            )
    return reduced


def _key_of(kind: type) -> str:
    if kind not in _keys:
        key = uuid.uuid4().hex
        _classes[key], _keys[kind] = kind, key
    # Copy the string: string interning must not change the pickle.
    return "".join(_keys[kind])


def _define(key: str, build: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Return this process's class with a key, or define it without its attributes."""
    kind = _classes.get(key)
    if kind is None:
        kind = build(*arguments)
        if kind not in _keys:
            _unfilled.add(key)
            _keys[kind] = key
        _classes[key] = kind
    return kind


def _fill(kind: type, state: tuple[str, Callable[[type, Any], None], Any, bool]) -> None:
    key, fill, attributes, overwrite = state
    if overwrite or key in _unfilled:
        _unfilled.discard(key)
        fill(kind, attributes)


def _with_qualname(kind: type, state: Any) -> Any:
    """Add the qualified name, which cloudpickle omits, to the attributes of a class."""
    if kind.__qualname__ != kind.__name__ and isinstance(state, tuple):
        attributes = state[0]
        if isinstance(attributes, dict):
            # As for the file name of code: string interning must not change the pickle.
            attributes["__qualname__"] = "".join(kind.__qualname__)
    return state


def _with_slots(kind: type, arguments: Any) -> Any:
    """Add the slots, which cloudpickle 3.1.3 omits, to the arguments that define a class.

    Without them the class's instances have a ``__dict__``, which those of the training process
    lack, so a batch of them could not be unpickled there.
    """
    match arguments:
        case (metaclass, name, bases, dict(contents), *more) if (
            "__slots__" in vars(kind)
            and metaclass is type(kind)
            and NamedTuple not in bases  # which adds its own slots, and refuses others
        ):
            return (
                metaclass,
                name,
                bases,
                {"__slots__": vars(kind)["__slots__"], **contents},
                *more,
            )
    return arguments
